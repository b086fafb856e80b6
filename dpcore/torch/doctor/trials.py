"""What `make_private` asks of model and loss, where it refused them; and the loss of a batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dpcore.torch.data import batches
from dpcore.torch.doctor.finding import Finding, NotTried, fault, of_error, ok, remark
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.gradients.per_example import WAYS, try_out, try_state
from dpcore.torch.model.check_module import check_module
from dpcore.torch.model.functional import refuse_foreign, slots

_DTYPES = r"dtype|scalar type|not implemented for|indices.*(Long|Int|int)|result type|[Tt]ype \("
_KINDS = (
    ("state", r"changes its|changes while|first from later"),
    ("mixing", r"are mixed|number of examples"),
    ("loss", r"^loss|of the loss"),
    ("unregistered tensors", r"not registered|is no parameter of the model"),
    ("forward", r"failed on synthetic|cannot be differentiated"),
)
_TOLERANCE = 1e-3


def fault_of(subject: Subject, error: BaseException) -> Finding:
    """Return the fault of a trial's error, by the name of the check that it belongs to.

    Where dtypes do not fit, the fault has those that there are.
    """
    texts = [str(error.__cause__ or ""), str(error)]  # ours say "dtype" of many things
    if not re.search(_DTYPES, texts[0]):
        return of_error(error, next((name for name, pattern in _KINDS if re.search(pattern, texts[1])), ""))
    data = {
        name.removeprefix("batch"): str(tensor.dtype).removeprefix("torch.")
        for name, tensor in batches.named(subject.source.template()).items()
    }
    model = sorted({str(p.dtype).removeprefix("torch.") for p in subject.model.parameters()})
    told = ", ".join(f"data{name} is {dtype}" for name, dtype in data.items())
    return fault(
        f"{of_error(error).sentence} {told}; the model is {', '.join(model)}.",
        "convert the data to what model and loss take: inputs to the model's dtype, class labels to int64",
        "dtypes",
    )


def gradients(subject: Subject) -> Iterator[Finding]:
    """Tensors that are not registered, mixing, how gradients are found and what is proved, if they are found at all."""
    found = subject.gradient
    if subject.private is None:
        frozen = check_module(subject.model)
        try_out(found, subject.example, frozen, subject.options.get("gradients", "auto"))
    yield ok(
        "all trained tensors that the model reaches are registered as its parameters.", name="unregistered tensors"
    )
    yield ok("no operation combines examples of a batch, or each example is run by itself.", name="mixing")
    if found.way == WAYS[0]:
        graph = list(found.proved.programs.values())[-1]
        sums = Counter(source.operation for each in graph.sources for source in each)
        yield ok(
            f"it is proved that the examples stay apart: all {graph.operations} operations of the graph were followed, "
            f"and examples are added up in {', '.join(f'{n} {name}' for name, n in sums.items())} alone."
        )
    elif WAYS[0] in found.reasons:
        yield remark(
            f"gradients are found by {found.way!r}, which is slower: {found.reasons[WAYS[0]]}.",
            "see docs/engine.md for what the fast way follows",
        )
    else:
        yield ok(f"gradients are found by {found.way!r}, as asked for.")


def state(subject: Subject) -> Iterator[Finding]:
    """Whether model and loss keep anything, by the way that every model bears and that says best what is wrong."""
    if subject.private is None:
        subject.gradient.way = WAYS[-1]
        with subject.restored():
            try_state(subject.gradient, subject.example)
    yield ok("model and loss keep nothing from one call to the next.")


def unused(subject: Subject) -> Iterator[Finding]:
    """Parameters on which the loss does not depend."""
    gradient, made = subject.gradient, subject.made(2)
    leaves, given = gradient.values.at(gradient.parameters())
    loss = subject.loss_of(given, made).sum()
    found: Sequence[torch.Tensor | None] = [None] * len(leaves)
    if loss.requires_grad:
        refuse_foreign(loss, leaves)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    names = [name for name, value in zip(gradient.names, found, strict=True) if value is None]
    if len(names) == len(gradient.names):
        yield fault(
            "the loss depends on no trained parameter: every gradient is 0.",
            "do not detach the output or take its argmax on the way to the loss",
        )
    elif names:
        told = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        yield remark(
            f"the loss does not depend on {told}: noise alone would move them.", "call requires_grad_(False) on them"
        )
    else:
        yield ok(f"the loss depends on all {len(leaves)} trained tensors.")


def loss(subject: Subject) -> Iterator[Finding]:
    """Whether the loss of a batch is made of the losses of its examples."""
    made = subject.made(3)
    rows = [batches.tree_map(lambda t: t[i : i + 1], made) for i in range(3)]  # noqa: B023
    with subject.restored():
        subject.model.train(False)
        values = {name: tensor.detach().clone() for name, tensor in slots(subject.model)}
        whole, *alone = [_value(subject, values, batch) for batch in (made, *rows)]
    if whole is None or any(value is None or value.numel() != 1 for value in alone):
        raise NotTried("the loss does not take a batch of several examples; training gives it one at a time.")
    each = torch.cat([value.reshape(1) for value in alone if value is not None])
    wanted = {"list": each} if whole.numel() == len(each) else {"mean": each.mean(), "sum": each.sum()}
    # A model in bfloat16 rounds each loss to three digits.
    tolerance = max(
        _TOLERANCE, *(4 * torch.finfo(p.dtype).eps for p in subject.model.parameters() if p.is_floating_point())
    )
    scale = tolerance * float(each.abs().max())
    near = [n for n, value in wanted.items() if torch.allclose(whole.reshape(-1), value, rtol=tolerance, atol=scale)]
    if near:
        yield ok(f"the loss of a batch is the {near[0]} of its examples' losses.")
        return
    yield fault(
        f"the loss of three examples together is {float(whole.reshape(-1)[0]):.4g}, neither the mean "
        f"({float(each.mean()):.4g}) nor the sum of their losses one by one: it mixes examples, and a private run, "
        "which gives it one example at a time, would minimize another function.",
        "give a loss that is a mean or a sum over examples, each of its own output and target",
    )


def _value(subject: Subject, values: dict[str, torch.Tensor], batch: Any) -> torch.Tensor | None:
    try:
        return subject.loss_of(values, batch).detach().double()
    except Exception:  # noqa: BLE001 - a loss for one example may raise anything where there are three
        return None
