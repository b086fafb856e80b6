"""Builds a private run from a model, its data and a method."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from dpcore import accounting
from dpcore.errors import ArgumentError, ArgumentTypeError, DeltaWarning, SpeedWarning
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import Sampler, is_sampler
from dpcore.sampling import sampler as make_sampler
from dpcore.spec import validate
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.stages.method import Method
from dpcore.torch.data.data import Data
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.engine import Engine
from dpcore.torch.model.check_module import check_module
from dpcore.torch.model.made_up import trial_batch
from dpcore.torch.model.microbatch import DEFAULT_MAX_MEMORY, parse_memory, peak_bytes
from dpcore.torch.model.microbatch import microbatch_size as fitting_microbatch_size
from dpcore.torch.model.per_example import WAYS, Loss, PerExampleGradient
from dpcore.torch.model.trial import try_out
from dpcore.torch.optimizer import PrivateOptimizer
from dpcore.torch.parameter_views import Working, check_place
from dpcore.torch.randomness import CAVEAT
from dpcore.torch.run import PrivateRun


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
    max_memory: int | str = DEFAULT_MAX_MEMORY,
    microbatch_size: int | None = None,
    gradients: str = "auto",
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    key: bytes | None = None,
    exact_key: bool = False,
    private_diagnostics: bool = False,
    ledger: Any = None,
    data_id: str | None = None,
    run_name: str | None = None,
) -> PrivateRun:
    """Make a private run that trains `model` on `data` by `method`.

    Parameters
    ----------
    model : torch.nn.Module
        On its device already. Parameters with ``requires_grad`` are trained, the others left alone. Modules that mix
        examples, or that keep anything between calls, are refused, and then the model is as it was.
    data : Dataset, or tuple or mapping of torch.Tensor or numpy.ndarray
        A map-style dataset or ``(inputs, *targets)``; its number of examples is taken to be public.
    method : Method
        As ``dpcore.methods.disk(...)`` returns, with its `batch_size` (the expected one).
    target_epsilon, target_delta : float, optional
        With `target_epsilon` the noise multiplier is calibrated; otherwise the method must have one. `target_delta` is
        where epsilon is stated.
    epochs, steps : int, optional
        Length of the plan; give one. An epoch is dataset size / batch size steps, rounded up.
    loss : callable
        ``loss(output, *targets)`` of a batch; called with one example at a time. It may keep nothing between calls.
    sampling : str or Sampler
        What draws the batches, and what is accounted: a name of `dpcore.sampling.NAMES`, or an object. Correlated noise
        needs "fixed-order" or "shuffled", or, where the strategy is banded, "cyclic-poisson"; separately released
        second moments need a hard maximum of examples in a batch, which "poisson" has not.
        `dpcore.sampling.UserSampler` makes a user the unit of privacy.
    max_batch_size, groups : int, optional
        Of "truncated-poisson" (by default what is passed with a probability below 1e-6 a step), and of
        "cyclic-poisson".
    accountant : str, optional
        Used to calibrate; must cover the run in any case. By default the one that needs least noise.
    params : iterable, optional
        Parameter groups as for a torch optimizer, each with its own lr, weight_decay, momentum or betas and eps; by
        default one group of all trained parameters. The method's schedule multiplies every group's lr.
    max_memory : int or str
        Cap on what the gradients of a micro-batch take, measured on synthetic examples, in bytes or as "1 GiB".
    microbatch_size : int, optional
        Examples differentiated at once, instead of what fits `max_memory`. Which dropout mask an example gets depends
        on this split; without dropout it changes nothing but rounding.
    gradients : {"auto", "pairs", "vmap", "one-by-one"}
        How each example's gradient is found: from one batched pass over the model, by torch.func, or example by
        example, which every model bears. "auto" takes the first that agrees with autograd on made-up examples.
    collate_fn : callable, optional
        For a dataset, instead of torch's default_collate; one row for every example, of shapes that do not depend on
        the others.
    num_workers : int
        Threads that read examples of a dataset.
    key : bytes, optional
        32 secret bytes; by default from the operating system. See `dpcore.spec.keys.RunKeys.new`, also for `exact_key`.
    private_diagnostics : bool
        Keep the norm of each step's clipped average, in memory and in the secret part of the state. It is **private**:
        the statement says that publishing it voids the guarantee.
    ledger : path or dpcore.ledger.Ledger, optional
        Every step is reserved there before its batch is drawn, and training stops before it would cross the ledger's
        budget. With it, a checkpoint knows what was released after it was saved.
    data_id : str, optional
        A name for the data, by which a ledger tells that its runs saw the same. Tensors need none: they are
        fingerprinted.
    run_name : str, optional
        What the ledger calls the run; by default the model's class and the method.

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

    Notes
    -----
    Only shapes and dtypes of the data are read here; the model is tried out on synthetic values.
    """
    # What costs nothing comes first: the data are read and the model is tried once all the rest fits together.
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
    if not isinstance(method, Method):
        raise ArgumentTypeError(f"method={method!r}: must be a dpcore.Method, as dpcore.methods.disk(...) returns")
    parse_memory(max_memory)
    validate.choice(("auto", *WAYS), gradients=gradients)
    size = validate.integer(minimum=1, microbatch_size=microbatch_size) if microbatch_size is not None else None
    if ledger is None and (data_id is not None or run_name is not None):
        raise ArgumentError("data_id and run_name: must be given together with a ledger")
    keys = RunKeys.new(key, exact_key=exact_key)
    backend = load_backend()
    frozen = check_module(model)
    device = check_place(backend, model)
    gradient = PerExampleGradient(model, loss)
    parameters = dict(model.named_parameters())
    working = Working(backend, gradient.names, [parameters[name] for name in gradient.names])
    source = Data(data, device, collate_fn, num_workers)
    sampler = _sampler(method, source.length, sampling, max_batch_size=max_batch_size, groups=groups)
    plan = _with_noise(_plan(method, sampler, epochs, steps, gradient.names), target_epsilon, target_delta, accountant)
    remark = None if target_delta is None else accounting.delta_remark(target_delta, plan.sampler.dataset_size)
    if remark:
        warnings.warn(remark, DeltaWarning, stacklevel=2)
    layout = Layout.of((name, parameters[name].shape) for name in gradient.names)
    mechanism = Mechanism(plan, layout, working.arrays(), backend=backend, keys=keys)
    loader = PrivateLoader(source, mechanism)
    engine = Engine(gradient, mechanism, working, size or 1)
    engine.diagnostics = [] if private_diagnostics else None
    optimizer = PrivateOptimizer(list(working.parameters) if params is None else params, engine, loader)
    if ledger is not None:
        from dpcore.torch.ledger import attach, open_ledger

        ledger = open_ledger(ledger)

    example = source.template()
    gradient.passed_over += [data, source]
    try_out(gradient, example, frozen, gradients)
    if gradient.way != WAYS[0] and gradients == "auto":
        told = gradient.reasons[WAYS[0]]
        warnings.warn(
            f"gradients='auto': takes {gradient.way!r}, which is slower, since {told}", SpeedWarning, stacklevel=2
        )
    if size is None:
        rows = layout.dimension * working.dtype.itemsize * min(_points(plan), 2)
        at, made = gradient.parameters(), [trial_batch(example, examples) for examples in (1, 2)]
        one, two = (peak_bytes(functools.partial(gradient, at, few, synthetic=True)) for few in made)
        engine.microbatch_size = fitting_microbatch_size(max_memory, one, two, rows)
    if ledger is not None:
        attach(ledger, engine, source, data_id=data_id, run_name=run_name)
    caveats = (CAVEAT,) if gradient.draws or source.tensors is None else ()
    return PrivateRun(optimizer, loader, engine, frozen, target_delta, caveats)


def _points(plan: Plan) -> int:
    """The most parameter points of a step. Windows fill up in the first steps; later the number changes little."""
    first = range(min(plan.steps, plan.method.query.lags + 8))
    return max(len(plan.method.query.points(step)) for step in first)


def _sampler(method: Method, examples: int, sampling: str | Sampler, **options: int | None) -> Sampler:
    """Return the sampler for so many examples, given by name with its options, or as an object."""
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
        told = f"dataset_size={sampling.example_count}: must be"
        if sampling.unit_of_privacy != "example":
            told = f"user_of_example of length {sampling.example_count}: must name the user of each of the"
        raise ArgumentError(f"sampling.{told} {examples}, the number of examples of the data")
    return sampling


def _plan(method: Method, sampler: Sampler, epochs: int | None, steps: int | None, names: tuple[str, ...]) -> Plan:
    if (epochs is None) == (steps is None):
        raise ArgumentError(f"epochs={epochs!r}, steps={steps!r}: give exactly one of them")
    if steps is None:
        steps = validate.integer(minimum=1, epochs=epochs) * sampler.steps_per_epoch
    return Plan(method, sampler, validate.integer(minimum=1, steps=steps), names)


def _with_noise(plan: Plan, target_epsilon: float | None, target_delta: float | None, accountant: str | None) -> Plan:
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
