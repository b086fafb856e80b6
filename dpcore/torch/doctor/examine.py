"""The doctor: all checks of a user's own objects, one after the other, with nothing left behind."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dpcore import methods
from dpcore.errors import ArgumentError, ArgumentTypeError, DeltaWarning, DpcoreError, TrainingWarning
from dpcore.spec import validate
from dpcore.spec.free_memory import words
from dpcore.stages.method import Method
from dpcore.torch.doctor import reading, steps, trials
from dpcore.torch.doctor.audit_run import audited
from dpcore.torch.doctor.finding import Finding, Findings, NotTried, fault, not_tried, of_error, ok, remark
from dpcore.torch.doctor.subject import Subject, unchanged
from dpcore.torch.gradients.per_example import Loss
from dpcore.torch.groups import mismatches
from dpcore.torch.make_private import plan_of, sampler_of, with_noise
from dpcore.torch.model.check_module import TRAINED, refusals
from dpcore.torch.parameter_views import Working, backend_for, check_place
from dpcore.torch.peers import check_plain, is_sharded, peers_of
from dpcore.torch.wrong_arguments import check_method


def layers(subject: Subject) -> Iterator[Finding]:
    """Layers that are known to be unfit by their class and settings."""
    check_plain(subject.model)
    found = [of_error(refused) for refused in refusals(subject.model)]
    yield from found
    for name, module in subject.model.named_modules():
        if isinstance(module, _BatchNorm) and not module.training and module.num_batches_tracked == 0:
            yield remark(
                f"frozen module {name!r} has the statistics it was made with: mean 0, variance 1.",
                "load the weights and statistics of public data into it, or use GroupNorm",
            )
    if not found:
        count = sum(1 for _ in subject.model.modules())
        yield ok(f"none of {count} modules is of a kind that mixes examples or keeps statistics.")


def parameters(subject: Subject) -> Iterator[Finding]:
    """Tied, frozen and aliased parameters."""
    every = dict(subject.model.named_parameters())
    trained = {name: p for name, p in every.items() if p.requires_grad}
    if not trained:
        yield fault(
            f"none of {len(every)} parameters requires gradients.", "call requires_grad_(True) on the ones to train"
        )
    elif len(trained) < len(every):
        numbers = sum(p.numel() for p in trained.values()), sum(p.numel() for p in every.values())
        yield ok(
            f"{len(every) - len(trained)} of {len(every)} tensors are frozen and left alone; {numbers[0]:,} of "
            f"{numbers[1]:,} numbers are trained."
        )
    places: dict[int, list[str]] = {}
    for name, parameter in subject.model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for names in (found for found in places.values() if len(found) > 1):
        told = f"{', '.join(map(repr, names))} are one parameter: it is clipped, noised and trained once"
        yield ok(f"{told}, as {names[0]!r}.", name="tied parameters")
    memory: dict[int, str] = {}
    for name, parameter in trained.items():
        first = memory.setdefault(parameter.data_ptr(), name)
        if first != name and parameter.numel() and parameter.data_ptr():
            yield fault(
                f"parameters {first!r} and {name!r} are two and share memory: each would get noise and steps of its "
                "own.",
                "assign the same nn.Parameter to both modules, or clone its values",
                "tied parameters",
            )


def dtypes(subject: Subject) -> Iterator[Finding]:
    """Whether the parameters are in one place, and of dtypes that one clip norm can span."""
    backend = backend_for(subject.model)
    device = check_place(backend, subject.model)
    named = {name: p for name, p in subject.model.named_parameters() if p.requires_grad and p.dtype in TRAINED}
    if named:
        Working(backend, list(named), list(named.values()))
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in named.values()})
    told = ", widened to float32 for gradients and noise" if any(p.dtype.itemsize == 2 for p in named.values()) else ""
    yield ok(f"what is trained is {' and '.join(kinds) or 'nothing'}{told}, on {device}.")


def mode(subject: Subject) -> Iterator[Finding]:
    """Whether dropout is as the mode of the model says."""
    model = subject.model
    drops = [name for name, module in model.named_modules() if isinstance(module, _DropoutNd) and module.p > 0]
    off = [name for name in drops if not model.get_submodule(name).training]
    if drops and not model.training:
        yield fault(
            f"the model is in eval mode: dropout ({drops[0]!r}) would be off all through training.",
            "call model.train() before make_private",
        )
    elif off:
        yield remark(
            f"dropout {off[0]!r} is in eval mode, and the model in training mode.",
            "call model.train() if it shall drop",
        )
    else:
        yield ok(f"the model is in {'training mode' if model.training else 'eval mode, and has no dropout'}.")


def optimizer(subject: Subject) -> Iterator[Finding]:
    """Whether a torch optimizer and the model share parameters."""
    given = subject.optimizer
    if given is None:
        return
    if not isinstance(given, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer={type(given).__name__!r}: must be a torch.optim.Optimizer, or left out")
    named = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    complaints = list(mismatches(given.param_groups, list(named), list(named.values())))
    if complaints and len(named) == sum(complaint.startswith("parameter ") for complaint in complaints):
        yield fault(
            "the optimizer and the model share no parameter: a step moves other tensors.",
            "make the optimizer of model.parameters() after the model is moved, wrapped or loaded",
        )
        return
    yield from (of_error(ArgumentError(complaint)) for complaint in complaints)
    if not complaints:
        yield remark(
            f"{type(given).__name__} has the model's parameters, but a private run steps by its method: learning rate, "
            "momentum and decay are those of the method, or of params=.",
            "use private.optimizer for schedulers",
        )


def plan(subject: Subject) -> Iterator[Finding]:
    """Whether method, sampling and steps fit, and what they cost."""
    given = subject.options.get
    if subject.private is None:
        drawn = {"max_batch_size": given("max_batch_size"), "groups": given("groups")}
        sampler = sampler_of(subject.method, subject.source.length, given("sampling") or "poisson", **drawn)
        names = tuple(name for name, p in subject.model.named_parameters() if p.requires_grad) or ("none",)
        found = plan_of(subject.method, sampler, given("epochs"), given("steps"), names)
        with_noise(found, given("target_epsilon"), given("target_delta"), given("accountant"))
        yield ok(f"{found.steps} steps of about {found.batch_size:g} examples.")
        return
    run, delta = subject.private.plan, subject.delta
    epsilon = run.epsilon(delta)
    yield ok(
        f"{run.steps} steps of about {run.batch_size:g} of {subject.source.length:,} examples at noise multiplier "
        f"{run.noise_multiplier:.4g}: epsilon = {epsilon:.4g} at delta = {delta:.3g}.",
        details={"epsilon": epsilon, "delta": delta, "steps": run.steps},
    )
    for told in subject.warned:
        if isinstance(told, DeltaWarning):
            yield remark(of_error(told).sentence, "take a delta well below 1/n")
        if isinstance(told, TrainingWarning):
            yield replace(of_error(told, "values of the data", private=True), status="remark")


def cost(subject: Subject) -> Iterator[Finding]:
    """Memory and time of a step, and the rule of each layer, on made-up examples."""
    found = subject.run.explain()
    rules = Counter(layer.rule for layer in found.layers if layer.rule and layer.rule != "frozen")
    told = ", ".join(f"{count} by {rule!r}" for rule, count in rules.items())
    yield ok(
        f"a step takes about {found.seconds:.3g} s and {words(found.peak_bytes)}, in micro-batches of "
        f"{found.microbatch_size}; norms: {told}.",
        details=found.as_dict(),
    )


class Check(NamedTuple):
    """What is looked at, and the faults beside which it cannot be seen."""

    name: str
    look: Callable[[Subject], Iterator[Finding]]
    after: tuple[str, ...] = ()


_BUILT = ("layers", "frozen parameters", "data")
_CALLED = (*_BUILT, "dtypes", "forward", "loss")

# Those that run nothing come first; those that need a run that make_private accepts come last.
_CHECKS = (
    Check("layers", layers),
    Check("frozen parameters", parameters),
    Check("dtypes", dtypes),
    Check("mode", mode),
    Check("optimizer", optimizer),
    Check("data", reading.data),
    Check("reading", reading.reading, ("data",)),
    Check("finite values", reading.values, ("data",)),
    Check("plan", plan, ("data",)),
    Check("gradients", trials.gradients, _BUILT),
    Check("state", trials.state, _CALLED),
    Check("unused parameters", trials.unused, _CALLED[1:]),
    Check("loss", trials.loss, (*_CALLED, "mixing", "state")),
    Check("real examples", reading.clipping),
    Check("isolation", steps.neighbours),
    Check("NaN row", steps.nan_row),
    Check("empty batch", partial(steps.odd_batch, examples=0)),
    Check("batch of one", partial(steps.odd_batch, examples=1)),
    Check("checkpoint", steps.checkpoint),
    Check("cost", cost),
)
_TRIALS = ("gradients", "state", "unused parameters", "loss")
_OF_VALUES = ("finite values", "real examples", "isolation", "audit")  # what these say may show values of the data


def doctor(
    model: nn.Module,
    data: Any,
    method: Method | None = None,
    *,
    loss: Loss = F.cross_entropy,
    optimizer: Any = None,
    audit: bool = True,
    confidence: float = 0.99,
    seconds: float = 60.0,
    **options: Any,
) -> Findings:
    """Examine a model, its data, a loss and a method, as `make_private` would get them.

    Nothing of a real run is spent: no ledger is opened, keys are fresh, and what is released is thrown away. Model,
    loss, optimizer and data are left as they were found, and so are the generators of torch, NumPy and Python.

    Parameters
    ----------
    model, data, method, loss
        As for `dpcore.torch.make_private`. Without a method a plain DP-SGD is taken.
    optimizer : torch.optim.Optimizer, optional
        One that was made for the model: does it have the model's parameters?
    audit : bool
        Whether to put canaries through the run's own step, see `dpcore.torch.doctor.audit_run`.
    confidence : float
        Of the audit: 1 minus the probability that it refutes a true claim.
    seconds : float
        Of all checks; the audit takes what the others leave, at most half, and ends early where it is decided.
    **options
        Other keywords of `make_private`; 100 steps where neither `epochs` nor `steps` is given. Those of a real run
        (`ledger`, `key`, ...) are left aside.

    Returns
    -------
    Findings
        A list of `Finding`; ``print`` shows it, and `Findings.ok` says whether there is no fault.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For a model that is no module, a method that is no method, or keywords that `make_private` does not know.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
    if method is not None:
        check_method(method)
    validate.open_unit(confidence=confidence)
    validate.positive(seconds=seconds)
    chosen = method or methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=_batch_size(data))
    subject = Subject(model, data, chosen, loss, options, optimizer)
    subject.deadline = time.monotonic() + seconds
    checks = [*_CHECKS, *([Check("audit", partial(audited, confidence=confidence))] if audit else [])]
    with unchanged({"model": model, "loss": loss}, data, subject.device):
        found = examined(subject, checks)
    if method is None:
        told = "no method was given: plain DP-SGD was tried, at noise multiplier 1."
        found.append(remark(told, "give method= to examine the run that you plan", "plan"))
    return found


def _batch_size(data: Any) -> int:
    first = data[0] if isinstance(data, tuple) and data else data
    try:
        return max(1, min(32, len(first)))
    except TypeError:
        raise ArgumentError("method=None: must be given for data without a length") from None


def _alone(subject: Subject, checks: list[Check]) -> Findings:
    """Make all checks in this process."""
    found = Findings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.build()
        for check in checks:
            for finding in _checked(subject, check):
                told = [known.name for known in found.faults if known.sentence == finding.sentence]
                if finding.status == "fault" and told:
                    again = f"mend the fault {told[0]!r} first"
                    finding = not_tried("it fails by a fault that was named above.", again, finding.name)
                found.append(finding)
                subject.faults |= {finding.name} if finding.status == "fault" else set()
    if subject.refused is not None and found.ok:
        found.append(of_error(subject.refused, "make_private"))
    return found


def _checked(subject: Subject, check: Check) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a finding, too."""
    found: list[Finding] = []
    try:
        for first in (name for name in check.after if name in subject.faults):
            raise NotTried("a fault hides it.", f"mend the fault {first!r} first")
        for finding in check.look(subject):
            found.append(finding)  # noqa: PERF402 - kept where the check raises later
    except NotTried as cause:
        found.append(not_tried(cause.sentence, cause.remedy))
    except DpcoreError as error:
        private = check.name == "reading"
        found.append(trials.fault_of(subject, error) if check.name in _TRIALS else of_error(error, private=private))
    except Exception as error:  # noqa: BLE001 - a user's own objects may raise anything
        told = str(error).splitlines()[0][:200] if str(error) else "no message"
        found.append(fault(f"fails with {type(error).__name__} ({told}).", "mend it, and examine again"))
    for finding in found:
        private = finding.private or check.name in _OF_VALUES
        yield replace(finding, name=finding.name or check.name, private=private)


def examined(subject: Subject, checks: list[Check]) -> Findings:
    """Let each process examine its own objects alone, then all together whether they agree.

    All processes must call it, as they must call `make_private`. The checks of one process send nothing to others: one
    that fails in a rank keeps no other waiting.
    """
    group = subject.options.get("process_group")
    if is_sharded(subject.model):
        told = "this process has parts of the model's parameters alone."
        return Findings([not_tried(told, "examine the whole model in one process, before fully_shard", "model")])
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        found, remedy = _alone(subject, checks), "start the script by torchrun to compare its ranks"
        found.append(not_tried("this is one process alone.", remedy, "processes"))
        return found
    ranks = list(range(dist.get_world_size()))
    alone = [dist.new_group([rank]) for rank in ranks]
    subject.options["process_group"] = alone[dist.get_rank()]
    found = _alone(subject, checks)
    subject.options["process_group"] = group
    failed = peers_of(group, subject.model).added([float(subject.private is None)])[0]
    if failed:
        told = f"make_private refuses the objects of {failed:.0f} of {len(ranks)} processes."
        found.append(not_tried(told, "mend the faults that these name", "processes"))
        return found
    subject.private = None
    subject.build()
    same = ok(f"{len(ranks)} processes have the same plan, model and data.", name="processes")
    found.append(same if subject.refused is None else of_error(subject.refused, "processes"))
    return found
