"""What can be told of a model without running it: layers, parameters, mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dpcore.errors import ArgumentError
from dpcore.torch.check_processes import check_plain
from dpcore.torch.doctor.finding import Finding, fault, of_error, ok, remark
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.groups import mismatches
from dpcore.torch.model.check_module import TRAINED, refusals
from dpcore.torch.model.functional import refuse_foreign
from dpcore.torch.parameter_views import Working, backend_for, check_place


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
