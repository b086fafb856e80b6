"""Builds a private run from a model, its data and a method: the plan, its parts, and the first checks."""

from __future__ import annotations

import atexit
import hmac
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpcore import accounting
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, DeltaWarning, SpeedWarning, TrainingWarning
from dpcore.ledger import Ledger
from dpcore.ledger.checks import different_data
from dpcore.mechanism.ledger_account import LedgerAccount, SharedAccount
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.peers import Peers, by_the_first
from dpcore.mechanism.vectors import check_vectors
from dpcore.plan.plan import Plan
from dpcore.sampling import Sampler, is_sampler
from dpcore.sampling import sampler as make_sampler
from dpcore.spec import validate
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import Backend
from dpcore.spec.waiting import told_if_slow
from dpcore.stages.method import Method
from dpcore.stages.queries import Plain
from dpcore.torch.data import batches
from dpcore.torch.data.data import Data
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.data.overlap import check_once
from dpcore.torch.data.packed import caveats_of as caveats_of_rows
from dpcore.torch.data.remarks import remarks
from dpcore.torch.engine import Engine
from dpcore.torch.explain import Rehearsal
from dpcore.torch.gradients.per_example import WAYS, Loss, PerExampleGradient, is_compiled, try_out
from dpcore.torch.gradients.repeated import RepeatedPasses
from dpcore.torch.memory import free_memory, keep_freed_memory, limit_of, parse_memory
from dpcore.torch.model.check_module import Modes, check_module
from dpcore.torch.model.joint import loss_for
from dpcore.torch.model.precision import caveats_of as caveats_of_precision
from dpcore.torch.model.precision import parse as precision_of
from dpcore.torch.parameter_views import Working, backend_for, check_place, with_compiled, with_graphs
from dpcore.torch.peers import check_alike, check_alone, check_plain, check_same_data, gradient_of, peers_of
from dpcore.torch.preferences import PAIRS, Pairs
from dpcore.torch.processes import caveats_of
from dpcore.torch.randomness import CAVEAT
from dpcore.torch.run import PrivateOptimizer, PrivateRun
from dpcore.torch.wrong_arguments import check_method, explained

_CAPTURED = "dpcore: {} is captured as a graph and proved"
_PATIENCE = 5.0  # seconds; a longer set-up is reported by a line


@explained
def make_private(
    model: nn.Module,
    data: Any,
    method: Method,
    *,
    target_epsilon: float | None = None,
    target_delta: float | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    loss: Loss = F.cross_entropy,
    sampling: str | Sampler = "poisson",
    max_batch_size: int | None = None,
    groups: int | None = None,
    accountant: str | None = None,
    params: Any = None,
    max_memory: int | str | None = None,
    microbatch_size: int | None = None,
    gradients: str = "auto",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    augmentations: int = 1,
    cuda_graphs: bool | str = False,
    compile: bool | None = None,  # noqa: A002 - torch's own word
    precision: str | None = None,
    example_batch: Any = None,
    key: bytes | None = None,
    exact_key: bool = False,
    ledger: Any = None,
    data_id: str | None = None,
    run_name: str | None = None,
    process_group: Any = None,
) -> PrivateRun:
    """Make a private run that trains `model` on `data` by `method`.

    Parameters
    ----------
    model : torch.nn.Module
        On its device already. Parameters with ``requires_grad`` are trained, the others left alone. Modules that mix
        examples, or that keep anything between calls, are refused; the model is then unchanged.
    data : Dataset, or tuple or mapping of torch.Tensor or numpy.ndarray
        A map-style dataset (of Hugging Face, too; a list is one, of its examples) or a tuple ``(inputs, *targets)`` or
        mapping of columns; its number of examples is taken to be public.
    method : Method
        For example ``dpcore.methods.disk(...)``, with its expected `batch_size`.
    target_epsilon, target_delta : float, optional
        With `target_epsilon` the noise multiplier is calibrated; otherwise the method must have one. Epsilon is stated
        at `target_delta`.
    epochs, steps : int, optional
        Length of the plan; give one. An epoch is dataset size / batch size steps, rounded up.
    loss : callable
        ``loss(output, *targets)`` of a batch; called with one example at a time. It may keep nothing between calls.
    sampling : str or Sampler
        It draws the batches, and its event is accounted: a name of `dpcore.sampling.NAMES`, or an object. Correlated
        noise needs "fixed-order", "shuffled" or "random-allocation", or "cyclic-poisson" if the strategy is banded.
        Separately released second moments need "fixed-order", "shuffled", "truncated-poisson" or "cyclic-poisson".
        `dpcore.sampling.UserSampler` makes a user the unit of privacy.
    max_batch_size, groups : int, optional
        `max_batch_size` is for "truncated-poisson"; by default a batch would exceed it with a probability below 1e-6 a
        step. `groups` is for "cyclic-poisson".
    accountant : str, optional
        The accountant that calibrates; it must cover the run in any case. By default the one that needs least noise.
    params : iterable, optional
        Parameter groups as for a torch optimizer, each with its own lr, weight_decay, momentum or betas and eps; by
        default one group of all trained parameters. The method's schedule multiplies every group's lr.
    max_memory : int or str, optional
        Limit on the memory of the sum over a micro-batch, in bytes or as "1 GiB". The memory is estimated from the
        sizes in the proved graph, or without proof from those of the gradients. By default half of the memory that the
        machine, or the model's device, has free now. If a step runs out of memory, it is tried again with half the
        micro-batch.
    microbatch_size : int, optional
        Number of examples differentiated at once, instead of one that fits `max_memory`; no more than a step seldom
        exceeds. If fewer are drawn, rows are filled up to it. The split decides which dropout mask an example gets;
        without dropout it changes nothing but rounding.
    gradients : {"auto", "pairs", "one-by-one"}
        How each example's gradient is found: "pairs" runs the graph of the model's operations, proved to keep the
        examples apart; "one-by-one" takes one example at a time, which is slow and works for every model. "auto" takes
        "pairs" if there is a proof; "pairs" without a proof is an error.
    collate_fn : callable, optional
        For a dataset, instead of torch's default_collate. It returns one row for every example, with a shape that does
        not depend on the other examples.
    num_workers : int
        Number of batches of a dataset that are read ahead while steps run, each in a process of its own with a copy of
        the dataset. With a ledger, only reserved steps are read ahead.
    augmentations : int
        K: each drawn example of a dataset is read K times. The mean of its K gradients is clipped as one vector, so
        more views cost no privacy.
    cuda_graphs : bool or "model"
        Repeat the launches of norms, sums and the step as CUDA graphs, if they equal those of an earlier step. It needs
        the backend "triton" and one process, and changes no bit. "model" also repeats the model's passes, if its graph
        is proved; captured passes keep their memory.
    compile : bool, optional
        Let torch.compile make kernels of the proved graph; by default if the model was given to torch.compile. It takes
        minutes, once for all sizes of batches, and needs a C++ compiler on a CPU.
    precision : {"bf16"}, optional
        Let forward passes and losses run in bfloat16 by torch's autocast, in this call and in every step, whatever
        autocast is around them. By default the autocast around this call counts; it must be around every step, too.
    example_batch : batch, optional
        Two examples or more in the form of a batch, on which the model is tried. Needed if made-up values would be out
        of its range, as with ids above 1 or sorted offsets. Its values must be **public**: errors may quote them.
    key : bytes, optional
        32 secret bytes; by default from the operating system. See `dpcore.spec.keys.RunKeys.new`, also for `exact_key`.
    ledger : path or dpcore.ledger.Ledger, optional
        Every step is reserved there before its batch is drawn, and training stops before it would cross the ledger's
        budget. Releases after a checkpoint was saved are known from it.
    data_id : str, optional
        A name for the data; a ledger compares it to see whether its runs have the same data. Tensors need none: they
        are fingerprinted.
    run_name : str, optional
        The run's name in the ledger; by default the model's class and the method.
    process_group : torch.distributed.ProcessGroup, optional
        The processes that train the model together, each with the same model and data; by default those of
        `torch.distributed.init_process_group`. Each reads and clips its share of a batch, and draws the noise of its
        own part of the parameters.

    Returns
    -------
    PrivateRun

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For arguments that do not fit, and for models that cannot be trained example by example.
    BackendError
        For a model that is not where the active backend computes.
    PrivacyError
        If no noise multiplier reaches the target, no accountant covers the run, or a parameter group carries a privacy
        setting.
    DataError
        If the ledger cannot be used.

    Warns
    -----
    DeltaWarning
        If `target_delta` is at least 1/n.
    TrainingWarning
        If `data` have values that are not finite, or inputs far from 1 in size; from the first step on, if a model with
        dropout is in eval mode. Such a sentence is about **private** data: it is for the one who starts the run. It
        does not change the run and is written nowhere.

    Notes
    -----
    Of the data this reads shapes and dtypes, labels in tensors (one that is no class raises an error), and for a
    TrainingWarning the values of tensors, or of up to 64 examples of a dataset, for half a second at most. The model is
    tried out on synthetic values, or `example_batch`. On a CPU with glibc the process keeps freed memory for the next
    step (`mallopt`), unless an environment variable configures that.
    """
    # Cheap checks come first: the data are read and the model is tried only if all the rest fits together.
    check_plain(model)
    check_method(method)
    if max_memory is not None:
        parse_memory(max_memory)
    validate.choice(("auto", *WAYS), gradients=gradients)
    size = validate.integer(minimum=1, microbatch_size=microbatch_size) if microbatch_size is not None else None
    if ledger is None and (data_id is not None or run_name is not None):
        raise ArgumentError("data_id and run_name: must be given together with a ledger")
    peers = peers_of(process_group, model)
    check_alone(peers, cuda_graphs=cuda_graphs)
    keys = RunKeys.from_dict(peers.same(RunKeys.new(key, exact_key=exact_key).to_dict()))
    backend = with_graphs(backend_for(model), cuda_graphs)
    frozen = check_module(model)
    device = check_place(backend, model)
    gradient, gradients = gradient_of(model, loss_for(model, loss), peers, method, gradients)
    gradient.repeated = RepeatedPasses(gradient.values, backend) if cuda_graphs == "model" else None
    gradient.set_precision(precision_of(precision))
    gradient.proved.compiled = is_compiled(model) if compile is None else compile
    if device.type == "cpu":
        keep_freed_memory()
    working = Working(backend, gradient.names, [model.get_parameter(name) for name in gradient.names])
    source = Data(data, device, collate_fn, num_workers, augmentations)
    sampler = sampler_of(method, source.length, sampling, max_batch_size=max_batch_size, groups=groups)
    unit = _check_rows(model, data, sampler)
    plan = plan_of(method, sampler, epochs, steps, gradient.names)
    plan = with_noise(plan, target_epsilon, target_delta, accountant)
    remark = None if target_delta is None else accounting.delta_remark(target_delta, plan.sampler.dataset_size)
    if remark:
        warnings.warn(remark, DeltaWarning, stacklevel=3)
    names = {"data_id": data_id, "run_name": run_name, "precision": precision}
    more = {"key": key, "ledger (given or not)": ledger is not None, **names}
    check_alike(peers, model, plan, layout_of(working), backend.name, source, more)
    engine, loader, optimizer = assembled(
        gradient, working, source, plan, keys, backend=backend, peers=peers, params=params, microbatch_size=size or 1
    )
    if ledger is not None:
        opened = by_the_first(peers, lambda: open_ledger(ledger), sent=False)
    example = source.example(example_batch)
    check_same_data(peers, source, keys)
    gradient.passed_over += [data, source]
    with told_if_slow(lambda: _CAPTURED.format(type(model).__name__), _PATIENCE):
        try_out(gradient, example, frozen, gradients)
    engine.mechanism.backend = with_compiled(backend, gradient.proved.compiled)
    peers.check_alike({"model and loss (their graphs)": gradient.proved.digest() or gradient.way})
    for remark in _slow(gradient, gradients):
        warnings.warn(remark, SpeedWarning, stacklevel=3)
    _check_classes(gradient, source)
    for remark in remarks(source, gradient.loss) if peers.rank == 0 else ():
        warnings.warn(remark, TrainingWarning, stacklevel=3)
    rehearsal = Rehearsal(engine, example)
    rehearsal.check_grid()
    rehearsal.fit(limit_of(max_memory, device) if size is None else size)
    engine.microbatch_given = size is not None or max_memory is not None
    if ledger is not None:
        attach(opened, engine, source, data_id=data_id, run_name=run_name)
    drawn = (CAVEAT,) if gradient.draws or source.tensors is None else ()
    caveats = (*unit, *drawn, *caveats_of_precision(gradient.autocast), *caveats_of(peers))
    return PrivateRun(optimizer, loader, rehearsal, Modes(model, frozen), target_delta, caveats)


def _check_rows(model: nn.Module, data: Any, sampler: Sampler) -> tuple[str, ...]:
    """Refuse rows that are known to be several people's; return what the statement says of rows."""
    check_once(data, sampler)
    return (*caveats_of_rows(data, sampler), *((PAIRS,) if isinstance(model, Pairs) else ()))


def _slow(gradient: PerExampleGradient, gradients: str) -> Iterator[str]:
    """Yield warnings if the model's graph does not run; turn off CUDA graphs of its passes, which need one."""
    if gradient.way == WAYS[0]:
        return
    if gradients == "auto":
        yield f"gradients='auto': takes {gradient.way!r}, which is slower, since {gradient.reasons[WAYS[0]]}"
    if gradient.repeated is not None:
        gradient.repeated = None
        why = f"not repeated, since only proved graphs are, and {gradient.way!r} runs the model itself"
        yield f"cuda_graphs='model': the model's passes are {why}"
    if gradient.proved.compiled:
        why = f"not compiled, since only proved graphs are, and {gradient.way!r} runs the model as it was written"
        yield f"compile: the model is {why}"


def _check_classes(gradient: PerExampleGradient, source: Data) -> None:
    """Refuse labels in tensors that are no classes of the model, under torch's loss over classes."""
    loss = gradient.loss
    if gradient.classes is None or source.tensors is None:
        return
    if loss is F.cross_entropy or (type(loss) is nn.CrossEntropyLoss):
        _, targets = batches.normalize(source.tensors)
        for labels in batches.leaves(targets):
            check_labels(labels, gradient.classes, getattr(loss, "ignore_index", -100))


_PIECE = 1 << 22


def check_labels(labels: torch.Tensor, classes: int, ignore_index: int = -100) -> None:
    """Refuse integer labels that are neither in [0, classes) nor `ignore_index`; other labels pass.

    Notes
    -----
    Whether it raises depends on the data: one example can decide whether there is a run. The error is for the one who
    starts the run, and has the data; it names no value, place or number of labels. It has no guarantee: keep it with
    the data, and let no program start another run after it.
    """
    if labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex():
        return
    for part in torch.split(labels.detach().reshape(-1), _PIECE):
        piece = part.long()  # in uint8 -100 would be 156
        if bool((((piece < 0) | (piece >= classes)) & (piece != ignore_index)).any()):
            raise ArgumentError(
                f"labels: must lie in [0, {classes}), one for each of the model's {classes} outputs, or be "
                f"ignore_index={ignore_index}; some do not (none is shown, as labels are private)"
            )


def open_ledger(ledger: Any) -> Ledger:
    """Return the ledger, opened if it was given as a path."""
    if isinstance(ledger, Ledger):
        return ledger
    if isinstance(ledger, (str, Path)):
        return Ledger.open(Path(ledger))
    raise ArgumentTypeError(f"ledger={ledger!r}: must be a path or a dpcore.ledger.Ledger")


def attach(ledger: Ledger | None, engine: Engine, source: Data, *, data_id: str | None, run_name: str | None) -> None:
    """Give the engine's mechanism an account in the ledger; nothing is written before the first batch is drawn.

    Of several processes the first passes the ledger, the others None.
    """
    for name, value, wanted in (
        ("data_id", data_id, "a name that changes when the data do"),
        ("run_name", run_name, "what the ledger shall call the run"),
    ):
        if value is not None and not str(value).strip():
            raise ArgumentError(f"{name}={value!r}: must be {wanted}")
    mechanism = engine.mechanism

    def made() -> LedgerAccount:
        assert ledger is not None
        fingerprint = _fingerprint(source, ledger.salt, data_id)
        known = {run.dataset for run in ledger.runs() if run.dataset}
        if fingerprint and known and fingerprint not in known:  # said before the run is paid for
            remark = different_data(len(known) + 1)
            warnings.warn(
                f"ledger={str(ledger.path)!r}: {remark} Other people need another ledger.",
                TrainingWarning,
                stacklevel=5,
            )
        account = LedgerAccount(
            ledger,
            mechanism,
            name=run_name or f"{type(engine.gradient.model).__name__}, {mechanism.plan.method.name}",
            dataset=fingerprint,
        )
        # A process that ends normally gives back the steps that it reserved and did not release.
        atexit.register(_close, weakref.ref(account))
        return account

    account = by_the_first(mechanism.peers, made, sent=False)
    mechanism.account = account if mechanism.peers.world_size == 1 else SharedAccount(mechanism.peers, account)


def _fingerprint(data: Data, salt: bytes, data_id: str | None = None) -> str:
    """Return an HMAC of the data, or of the caller's name for them; empty for a dataset without a name.

    Its key is the ledger's salt: a plain digest of private data would let anybody test a guess of them.
    """
    if data_id is not None:
        return hmac.new(salt, f"named {data.length} {data_id}".encode(), "sha256").hexdigest()
    if data.tensors is None:
        return ""
    total = hmac.new(salt, b"tensors", "sha256")
    for tensor in data.tensors:
        total.update(f"\0{tuple(tensor.shape)} {tensor.dtype}\0".encode() + batches.content(tensor))
    return total.hexdigest()


def _close(reference: weakref.ref[LedgerAccount]) -> None:
    account = reference()
    if account is None:
        return
    try:
        account.close()
    except DataError as error:  # moved or damaged since: nothing is given back, and a sentence says so
        warnings.warn(f"the steps that were reserved stay counted: {error}", stacklevel=1)


def sampler_of(method: Method, examples: int, sampling: str | Sampler, **options: int | None) -> Sampler:
    """Return the sampler for this number of examples, given by name with its options, or as an object."""
    if isinstance(sampling, str):
        if method.batch_size is None:
            raise ArgumentError("batch_size=None: give the method its expected batch size, as in disk(batch_size=256)")
        return make_sampler(sampling, dataset_size=examples, batch_size=method.batch_size, **options)
    for option, value in options.items():
        if value is not None:
            raise ArgumentError(f"{option}={value!r}: is only for a sampling by name; the sampler has its own")
    if not is_sampler(sampling):
        raise ArgumentTypeError(
            f"sampling={sampling!r}: must be a name, such as 'poisson', or a sampler of dpcore.sampling, such as "
            "PoissonSampler(dataset_size=..., batch_size=...); what torch's samplers draw is not accounted"
        )
    if sampling.example_count != examples:
        problem = f"dataset_size={sampling.example_count}: must be"
        if sampling.unit_of_privacy != "example":
            problem = f"user_of_example of length {sampling.example_count}: must name the user of each of the"
        raise ArgumentError(f"sampling.{problem} {examples}, the number of examples of the data")
    return sampling


def plan_of(method: Method, sampler: Sampler, epochs: int | None, steps: int | None, names: tuple[str, ...]) -> Plan:
    """Return the plan of `epochs` or `steps`; the noise multiplier may still be missing."""
    if (epochs is None) == (steps is None):
        raise ArgumentError(f"epochs={epochs!r}, steps={steps!r}: give exactly one of them")
    if steps is None:
        steps = validate.integer(minimum=1, epochs=epochs) * sampler.steps_per_epoch
    return Plan(method, sampler, validate.integer(minimum=1, steps=steps), names)


def with_noise(plan: Plan, target_epsilon: float | None, target_delta: float | None, accountant: str | None) -> Plan:
    """Return the plan with a noise multiplier: the method's, or one calibrated to the target."""
    if target_delta is not None:
        validate.open_unit(target_delta=target_delta)
    given = plan.method.noise.noise_multiplier
    if target_epsilon is None:
        if given is None:
            raise ArgumentError(
                "noise_multiplier=None: give the method one, or target_epsilon and target_delta to have it calibrated"
            )
        plan.check_covered(accountant)
        return plan
    validate.positive(target_epsilon=target_epsilon)
    if given is not None:
        raise ArgumentError(
            f"target_epsilon={target_epsilon!r}: the method already has noise_multiplier={given!r}; give one of them"
        )
    if target_delta is None:
        raise ArgumentError("target_delta=None: must be given with target_epsilon, for example 1e-5")
    return plan.calibrated(target_epsilon, target_delta, accountant=accountant)


def layout_of(working: Working) -> Layout:
    """Return where each trained tensor's elements lie in the random stream."""
    return Layout.of((name, p.shape) for name, p in zip(working.names, working.parameters, strict=True))


def assembled(
    gradient: PerExampleGradient,
    working: Working,
    source: Data,
    plan: Plan,
    keys: RunKeys,
    *,
    backend: Backend[Any],
    peers: Peers,
    params: Any = None,
    microbatch_size: int = 1,
) -> tuple[Engine, PrivateLoader, PrivateOptimizer]:
    """Return a run's engine, with a mechanism of these keys, the loader of its batches, and its optimizer."""
    layout, parameters = layout_of(working), working.arrays()
    device = working.parameters[0].device
    if device.type == "cuda":  # the mechanism looks at the machine's memory only
        check_vectors(plan, layout, parameters, peers, *free_memory(device))
    mechanism = Mechanism(plan, layout, parameters, backend=backend, keys=keys, peers=peers)
    loader = PrivateLoader(source, mechanism)
    engine = Engine(gradient, mechanism, working, microbatch_size)
    engine.views = source.views
    if isinstance(plan.method.query, Plain):  # combined and scaled gradients take other ways as pairs
        gradient.proved.prefers_pairs = backend.prefers_pairs
    return engine, loader, PrivateOptimizer(list(working.parameters) if params is None else params, engine)
