"""The doctor: all checks of a user's own objects, one after the other, with nothing left behind."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

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
from dpcore.torch.check_processes import check_plain
from dpcore.torch.doctor import reading, steps, trials
from dpcore.torch.doctor.audit_run import audited
from dpcore.torch.doctor.finding import Finding, Findings, NotTried, fault, not_tried, of_error, ok, remark
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.doctor.unchanged import unchanged
from dpcore.torch.gradients.per_example import Loss
from dpcore.torch.groups import mismatches
from dpcore.torch.model.check_module import TRAINED, refusals
from dpcore.torch.model.functional import refuse_foreign
from dpcore.torch.parameter_views import Working, backend_for, check_place
from dpcore.torch.peers import is_sharded, peers_of
from dpcore.torch.planning import plan_of, sampler_of, with_noise


def layers(subject: Subject) -> Iterator[Finding]:
    """Layers that are known to be unfit by their class and settings."""
    check_plain(subject.model)
    found = [of_error("layers", refused) for refused in refusals(subject.model)]
    yield from found
    untold = [
        name
        for name, module in subject.model.named_modules()
        if isinstance(module, _BatchNorm) and not module.training and module.num_batches_tracked == 0
    ]
    for name in untold:
        yield remark(
            "layers",
            f"frozen module {name!r} has the statistics it was made with: mean 0, variance 1.",
            "load the weights and statistics of public data into it, or use GroupNorm",
        )
    if not found:
        count = sum(1 for _ in subject.model.modules())
        yield ok("layers", f"none of {count} modules is of a kind that mixes examples or keeps statistics.")


def parameters(subject: Subject) -> Iterator[Finding]:
    """Tied, frozen and aliased parameters."""
    every = dict(subject.model.named_parameters())
    trained = {name: p for name, p in every.items() if p.requires_grad}
    if not trained:
        yield fault(
            "frozen parameters",
            f"none of {len(every)} parameters requires gradients.",
            "call requires_grad_(True) on the ones to train",
        )
    elif len(trained) < len(every):
        numbers = sum(p.numel() for p in trained.values()), sum(p.numel() for p in every.values())
        yield ok(
            "frozen parameters",
            f"{len(every) - len(trained)} of {len(every)} tensors are frozen and "
            f"left alone; {numbers[0]:,} of {numbers[1]:,} numbers are trained.",
        )
    places: dict[int, list[str]] = {}
    for name, parameter in subject.model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), []).append(name)
    for names in (found for found in places.values() if len(found) > 1):
        yield ok(
            "tied parameters",
            f"{', '.join(map(repr, names))} are one parameter: it is clipped, noised "
            f"and trained once, as {names[0]!r}.",
        )
    memory: dict[int, str] = {}
    for name, parameter in trained.items():
        first = memory.setdefault(parameter.data_ptr(), name)
        if first != name and parameter.numel() and parameter.data_ptr():
            yield fault(
                "tied parameters",
                f"parameters {first!r} and {name!r} are two and share memory: each "
                "would get noise and steps of its own.",
                "assign the same nn.Parameter to both modules, or clone its values",
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
    yield ok("dtypes", f"what is trained is {' and '.join(kinds) or 'nothing'}{told}, on {device}.")


def unused(subject: Subject) -> Iterator[Finding]:
    """Parameters on which the loss does not depend."""
    gradient = subject.gradient
    made = subject.made(2)
    with gradient.values.at(gradient.parameters()) as (leaves, given):
        loss = subject.loss_of(given, made).sum()
        if loss.requires_grad:
            refuse_foreign(loss, leaves)
            found: Sequence[torch.Tensor | None] = torch.autograd.grad(loss, leaves, allow_unused=True)
        else:
            found = (None,) * len(leaves)
    names = [name for name, value in zip(gradient.names, found, strict=True) if value is None]
    if len(names) == len(gradient.names):
        yield fault(
            "unused parameters",
            "the loss depends on no trained parameter: every gradient is 0.",
            "do not detach the output or take its argmax on the way to the loss",
        )
    elif names:
        told = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        yield remark(
            "unused parameters",
            f"the loss does not depend on {told}: noise alone would move them.",
            "call requires_grad_(False) on them",
        )
    else:
        yield ok("unused parameters", f"the loss depends on all {len(leaves)} trained tensors.")


def mode(subject: Subject) -> Iterator[Finding]:
    """Whether dropout is as the mode of the model says."""
    model = subject.model
    drops = [name for name, module in model.named_modules() if isinstance(module, _DropoutNd) and module.p > 0]
    off = [name for name in drops if not model.get_submodule(name).training]
    if drops and not model.training:
        yield fault(
            "mode",
            f"the model is in eval mode: dropout ({drops[0]!r}) would be off all through training.",
            "call model.train() before make_private",
        )
    elif off:
        yield remark(
            "mode",
            f"dropout {off[0]!r} is in eval mode, and the model in training mode.",
            "call model.train() if it shall drop",
        )
    else:
        yield ok(
            "mode",
            f"the model is in {'training' if model.training else 'eval'} mode"
            + ("." if model.training else ", and has no dropout."),
        )


def optimizer(subject: Subject) -> Iterator[Finding]:
    """Whether a torch optimizer and the model share parameters."""
    given = subject.optimizer
    if given is None:
        return
    if not isinstance(given, torch.optim.Optimizer):
        raise ArgumentError(f"optimizer={type(given).__name__!r}: must be a torch.optim.Optimizer, or left out")
    named = {name: p for name, p in subject.model.named_parameters() if p.requires_grad}
    complaints = list(mismatches(given.param_groups, list(named), list(named.values())))
    shared = len(named) - sum(complaint.startswith("parameter ") for complaint in complaints)
    if complaints and not shared:
        yield fault(
            "optimizer",
            "the optimizer and the model share no parameter: a step moves other tensors.",
            "make the optimizer of model.parameters() after the model is moved, wrapped or loaded",
        )
        return
    for complaint in complaints:
        yield of_error("optimizer", ArgumentError(complaint))
    if not complaints:
        yield remark(
            "optimizer",
            f"{type(given).__name__} has the model's parameters, but a private run steps "
            "by its method: learning rate, momentum and decay are those of the method, or of params=.",
            "use private.optimizer for schedulers",
        )


_OF_DRAWING = ("max_batch_size", "groups")


def plan(subject: Subject) -> Iterator[Finding]:
    """Whether method, sampling and steps fit, and what they cost."""
    given = subject.options
    if subject.private is None:
        drawn = {name: given.get(name) for name in _OF_DRAWING}
        sampler = sampler_of(subject.method, subject.source.length, given.get("sampling", "poisson"), **drawn)
        names = tuple(name for name, p in subject.model.named_parameters() if p.requires_grad) or ("none",)
        found = plan_of(subject.method, sampler, given.get("epochs"), given.get("steps"), names)
        with_noise(found, given.get("target_epsilon"), given.get("target_delta"), given.get("accountant"))
        yield ok("plan", f"{found.steps} steps of about {found.batch_size:g} examples.")
        return
    run = subject.private.plan
    delta = subject.delta
    epsilon = run.epsilon(delta)
    yield ok(
        "plan",
        f"{run.steps} steps of about {run.batch_size:g} of {subject.source.length:,} examples at noise "
        f"multiplier {run.noise_multiplier:.4g}: epsilon = {epsilon:.4g} at delta = {delta:.3g}.",
        details={"epsilon": epsilon, "delta": delta, "steps": run.steps},
    )
    for told in subject.warned:
        if isinstance(told, DeltaWarning):
            yield remark("plan", of_error("plan", told).sentence, "take a delta well below 1/n")
        if isinstance(told, TrainingWarning):
            yield replace(of_error("values of the data", told, private=True), status="remark")


def cost(subject: Subject) -> Iterator[Finding]:
    """Memory and time of a step, and the rule of each layer, on made-up examples."""
    found = subject.run.explain()
    rules = Counter(layer.rule for layer in found.layers if layer.rule and layer.rule != "frozen")
    told = ", ".join(f"{count} by {rule!r}" for rule, count in rules.items())
    yield ok(
        "cost",
        f"a step takes about {found.seconds:.3g} s and {words(found.peak_bytes)}, in micro-batches of "
        f"{found.microbatch_size}; norms: {told}.",
        details=found.as_dict(),
    )


Check = Callable[[Subject], Iterator[Finding]]

# Those that run nothing come first; those that need a run that make_private accepts come last.
_CHECKS: tuple[tuple[str, Check], ...] = (
    ("layers", layers),
    ("frozen parameters", parameters),
    ("dtypes", dtypes),
    ("mode", mode),
    ("optimizer", optimizer),
    ("data", reading.data),
    ("reading", reading.reading),
    ("finite values", reading.values),
    ("plan", plan),
    ("forward", trials.trials),
    ("gradients", trials.gradients),
    ("unused parameters", unused),
    ("loss", trials.loss),
    ("real examples", reading.clipping),
    ("isolation", steps.neighbours),
    ("odd batches", steps.odd_batches),
    ("checkpoint", steps.checkpoint),
    ("cost", cost),
)


_OF_VALUES = ("reading", "finite values", "real examples", "isolation")  # what these say may show values of the data


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
        Whether to put canaries through the run's own step, see `dpcore.torch.doctor.canaries.audit`.
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
    if method is not None and not isinstance(method, Method):
        raise ArgumentTypeError(f"method={method!r}: must be a dpcore.Method, as dpcore.methods.disk(...) returns")
    validate.open_unit(confidence=confidence)
    validate.positive(seconds=seconds)
    chosen = method or methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=_batch_size(data))
    subject = Subject(model, data, chosen, loss, optimizer, options)
    subject.check_options()
    subject.deadline = time.monotonic() + seconds
    found = Findings()
    with unchanged({"model": model, "loss": loss}, data, subject.device):
        found += examined(subject, lambda: _examine(subject, audit, confidence))
    if method is None:
        found.append(
            remark(
                "plan",
                "no method was given: plain DP-SGD was tried, at noise multiplier 1.",
                "give method= to examine the run that you plan",
            )
        )
    return found


def _examine(subject: Subject, with_audit: bool, confidence: float) -> Findings:
    found = Findings()
    checks = [*_CHECKS, *([("audit", lambda s: audited(s, confidence))] if with_audit else [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.build()
        for name, check in checks:
            for finding in _checked(subject, name, check):
                told = [known.name for known in found.faults if known.sentence == finding.sentence]
                if finding.status == "fault" and told:
                    again = f"mend the fault {told[0]!r} first"
                    finding = not_tried(finding.name, "it fails by a fault that was named above.", again)
                found.append(finding)
                subject.faults |= {finding.name} if finding.status == "fault" else set()
    if subject.refused is not None and found.ok:
        found.append(of_error("make_private", subject.refused))
    return found


def _checked(subject: Subject, name: str, check: Check) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a finding, too."""
    try:
        yield from check(subject)
    except NotTried as cause:
        yield not_tried(name, cause.sentence, cause.remedy)
    except DpcoreError as error:
        in_trial = name in ("forward", "loss", "unused parameters")
        yield trials.fault_of(subject, error, name) if in_trial else of_error(name, error, name in _OF_VALUES)
    except Exception as error:  # noqa: BLE001 - a user's own objects may raise anything
        told = str(error).splitlines()[0][:200] if str(error) else "no message"
        yield fault(name, f"fails with {type(error).__name__} ({told}).", "mend it, and examine again")


def _batch_size(data: Any) -> int:
    first = data[0] if isinstance(data, tuple) and data else data
    try:
        return max(1, min(32, len(first)))
    except TypeError:
        raise ArgumentError("method=None: must be given for data without a length") from None


def examined(subject: Subject, examine: Callable[[], Findings]) -> Findings:
    """Let each process examine its own objects alone, then all together whether they agree.

    All processes must call it, as they must call `make_private`. The checks of one process send nothing to others: one
    that fails in a rank keeps no other waiting.
    """
    if is_sharded(subject.model):
        return Findings(
            [
                not_tried(
                    "model",
                    "this process has parts of the model's parameters alone.",
                    "examine the whole model in one process, before fully_shard",
                )
            ]
        )
    if not _several(subject):
        found = examine()
        found.append(
            not_tried("processes", "this is one process alone.", "start the script by torchrun to compare its ranks")
        )
        return found
    group = subject.options.pop("process_group", None)
    ranks = list(range(dist.get_world_size()))
    alone = [dist.new_group([rank]) for rank in ranks]
    subject.options["process_group"] = alone[dist.get_rank()]
    found = examine()
    subject.options["process_group"] = group
    failed = peers_of(group, subject.model).added([float(subject.private is None)])[0]
    if failed:
        found.append(
            not_tried(
                "processes",
                f"make_private refuses the objects of {failed:.0f} of {len(ranks)} processes.",
                "mend the faults that these name",
            )
        )
        return found
    subject.private = None
    subject.build()
    if subject.refused is not None:
        found.append(of_error("processes", subject.refused))
    else:
        found.append(ok("processes", f"{len(ranks)} processes have the same plan, model and data."))
    return found


def _several(subject: Subject) -> bool:
    given = subject.options.get("process_group")
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(given) > 1
