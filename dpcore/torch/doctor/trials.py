"""What `make_private` asks of model and loss, each on its own, and the loss of a batch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dpcore.errors import ArgumentError
from dpcore.torch.data import batches
from dpcore.torch.doctor.finding import Finding, NotTried, fault, not_tried, of_error, ok, remark
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.gradients.errors import Mixes, NotProved
from dpcore.torch.gradients.per_example import WAYS, Unfit
from dpcore.torch.gradients.trial import check_registered, prove, try_out, try_state
from dpcore.torch.model.functional import slots
from dpcore.torch.model.state_probe import Snapshot

_DTYPES = r"dtype|scalar type|not implemented for|indices.*(Long|Int|int)|result type|[Tt]ype \("
_KINDS = (
    ("state", r"changes its|changes while|first from later"),
    ("mixing", r"are mixed|number of examples"),
    ("loss", r"^loss|of the loss"),
    ("unregistered tensors", r"not registered|is no parameter of the model"),
    ("forward", r"failed on synthetic|cannot be differentiated"),
)
_TOLERANCE = 1e-3

Frozen = tuple[torch.nn.Module, ...]


def kind_of(error: BaseException, otherwise: str) -> str:
    """Return the name of the check that an error of a trial belongs to."""
    texts = [str(error.__cause__ or ""), str(error)]  # ours say "dtype" of many things
    if re.search(_DTYPES, texts[0]):
        return "dtypes"
    return next((name for name, pattern in _KINDS if re.search(pattern, texts[1])), otherwise)


def fault_of(subject: Subject, error: BaseException, otherwise: str) -> Finding:
    """Return the fault of a trial's error; where dtypes do not fit, with the dtypes that there are."""
    found = of_error(kind_of(error, otherwise), error)
    if found.name != "dtypes":
        return found
    data = {
        name.removeprefix("batch"): str(tensor.dtype).removeprefix("torch.")
        for name, tensor in batches.named(subject.source.template()).items()
    }
    model = sorted({str(p.dtype).removeprefix("torch.") for p in subject.model.parameters()})
    told = ", ".join(f"data{name} is {dtype}" for name, dtype in data.items())
    return fault(
        "dtypes",
        f"{found.sentence} {told}; the model is {', '.join(model)}.",
        "convert the data to what model and loss take: inputs to the model's dtype, class labels to int64",
    )


def trials(subject: Subject) -> Iterator[Finding]:
    """Tensors that are not registered, mixing, state, and whether there is a way to find gradients."""
    told: list[str] = []
    for name, sentence, check in _CHECKS:
        if subject.private is not None:
            if name != "gradients":  # said below, with the way that was taken
                yield ok(name, sentence)
            continue
        start = Snapshot(subject.gradient.roots, subject.gradient.passed_over)
        try:
            check(subject, subject.frozen)
            yield ok(name, sentence)
        except NotTried as cause:
            yield not_tried(name, cause.sentence, cause.remedy)
        except Exception as error:  # noqa: BLE001 - a user's own objects may raise anything
            found = fault_of(subject, error, name)
            if found.sentence not in told:
                yield found
            told.append(found.sentence)
            if found.name in ("forward", "dtypes", "loss"):
                subject.fails = found.name
                return
            if found.name != name:
                yield not_tried(name, "the model fails before this can be seen.", f"mend {found.name!r} first")
        finally:
            start.restore()


def _registered(subject: Subject, _: Frozen) -> None:
    check_registered(subject.gradient.model, subject.gradient.passed_over)


def _mixing(subject: Subject, frozen: Frozen) -> None:
    try:
        prove(subject.gradient, subject.example, frozen)
    except Mixes as reason:
        raise ArgumentError(reason.sentence(subject.model)) from None
    except NotProved:
        raise NotTried(
            "the examples of a batch are not run together: there is no proof that they stay apart."
        ) from None
    except Unfit as refused:  # another way may take what this one does not
        raise NotTried("the model is not run on a batch.") from refused


def _state(subject: Subject, _: Frozen) -> None:
    subject.gradient.way = WAYS[-1]  # every model that can be trained at all bears it, and says best what is wrong
    try_state(subject.gradient, subject.example)


def _ways(subject: Subject, frozen: Frozen) -> None:
    try_out(subject.gradient, subject.example, frozen)


def gradients(subject: Subject) -> Iterator[Finding]:
    """How gradients are found, and what is proved."""
    if subject.private is None:
        return
    found = subject.run._engine.gradient
    if found.way == WAYS[0]:
        graph = list(found.proved.programs.values())[-1]
        sums = Counter(source.operation for each in graph.sources for source in each)
        yield ok(
            "gradients",
            f"it is proved that the examples stay apart: all {graph.operations} operations of the graph were followed, "
            f"and examples are added up in {', '.join(f'{n} {name}' for name, n in sums.items())} alone.",
        )
    elif WAYS[0] in found.reasons:
        yield remark(
            "gradients",
            f"gradients are found by {found.way!r}, which is slower: {found.reasons[WAYS[0]]}.",
            "see docs/engine.md for what the fast way follows",
        )
    else:
        yield ok("gradients", f"gradients are found by {found.way!r}, as asked for.")


def loss(subject: Subject) -> Iterator[Finding]:
    """Whether the loss of a batch is made of the losses of its examples."""
    for name in ("mixing", "state", "layers"):
        if name in subject.faults:
            raise NotTried("the model does not treat each example alone.", f"mend the fault {name!r} first")
    made = subject.made(3)
    start = Snapshot(subject.gradient.roots, subject.gradient.passed_over)
    subject.model.train(False)
    state = {name: tensor.detach().clone() for name, tensor in slots(subject.model)}
    whole = _value(subject, state, made)
    rows = [batches.tree_map(lambda t: t[i : i + 1], made) for i in range(3)]  # noqa: B023
    alone = [_value(subject, state, row) for row in rows]
    start.restore()
    if whole is None or any(value is None or value.numel() != 1 for value in alone):
        raise NotTried("the loss does not take a batch of several examples; training gives it one at a time.")
    each = torch.cat([value.reshape(1) for value in alone if value is not None])
    wanted = {"each": each} if whole.numel() == len(each) else {"mean": each.mean(), "sum": each.sum()}
    # A model in bfloat16 rounds each loss to three digits.
    tolerance = max(
        _TOLERANCE, *(4 * torch.finfo(p.dtype).eps for p in subject.model.parameters() if p.is_floating_point())
    )
    near = [
        name
        for name, value in wanted.items()
        if torch.allclose(whole.reshape(-1), value, rtol=tolerance, atol=tolerance * float(each.abs().max()))
    ]
    if near:
        yield ok("loss", f"the loss of a batch is the {near[0].replace('each', 'list')} of its examples' losses.")
        return
    yield fault(
        "loss",
        f"the loss of three examples together is {float(whole.reshape(-1)[0]):.4g}, neither the mean "
        f"({float(each.mean()):.4g}) nor the sum of their losses one by one: it mixes examples, and a private run, "
        "which gives it one example at a time, would minimize another function.",
        "give a loss that is a mean or a sum over examples, each of its own output and target",
    )


def _value(subject: Subject, state: dict[str, torch.Tensor], batch: Any) -> torch.Tensor | None:
    try:
        return subject.loss_of(state, batch).detach().double()
    except Exception:  # noqa: BLE001 - a loss for one example may raise anything where there are three
        return None


_CHECKS: tuple[tuple[str, str, Callable[[Subject, Frozen], None]], ...] = (
    (
        "unregistered tensors",
        "all trained tensors that the model reaches are registered as its parameters.",
        _registered,
    ),
    ("mixing", "no operation combines examples of a batch, or each example is run by itself.", _mixing),
    ("state", "model and loss keep nothing from one call to the next.", _state),
    ("gradients", "there is a way to find each example's gradient.", _ways),
)
