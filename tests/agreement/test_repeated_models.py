"""A model's passes that are replayed: the gradients of every batch are those of the model itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpcore.errors import SpeedWarning
from dpcore.torch.gradients.repeated import alike
from dpcore_triton import launch
from tests.agreement.repeated_models import DEVICE, EXAMPLES, Shifted, batch_of, rows_of, same, sides, told, vectors
from tests.unit.torch_runs import KEY


class Words(nn.Module):
    """Attention and a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.table(tokens)).mean(1))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3))


def tokens(draw: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 7, (EXAMPLES, 6), generator=draw)


def pictures(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(EXAMPLES, 1, 5, 5, generator=draw)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor], str]] = {
    "pairs": (Shifted, vectors, "pairs"),
    "vmap": (Shifted, vectors, "vmap"),
    "words": (Words, tokens, "pairs"),
    "images": (images, pictures, "pairs"),
}


@pytest.mark.parametrize("case", CASES)
def test_replays_follow_the_batch_the_parameters_the_buffers_and_the_masks(case: str) -> None:
    make, inputs, way = CASES[case]
    draw = torch.Generator().manual_seed(1)
    plain, repeating = sides(make, batch_of(inputs, draw), way)
    for number in range(12):
        batch = batch_of(inputs, draw)
        same(plain(batch, number), repeating(batch, number))
        with torch.no_grad():
            for tensor in (*plain.model.parameters(), *plain.model.buffers()):
                tensor += 0.1 * torch.randn(tensor.shape, generator=draw).to(DEVICE)
    assert repeating.refused is None
    # Not in calls 1, 2, 4, 8, where the model's state is looked at, nor in the first one beside them.
    assert repeating.replays == 7


def test_a_displaced_point_is_another_pass_and_its_values_are_handed_over() -> None:
    draw = torch.Generator().manual_seed(2)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    for _ in range(12):
        batch = batch_of(vectors, draw)
        here = plain.gradient.parameters()
        points = {"here": here} | {
            name: [v + torch.randn(v.shape, generator=draw).to(DEVICE) for v in here] for name in ("there", "elsewhere")
        }
        found = [repeating.gradient(values, batch, KEY, regular=name) for name, values in points.items()]
        for values, blocks in zip(points.values(), found, strict=True):  # both are there, as a query combines them
            same(rows_of(plain.gradient(values, batch, KEY)), rows_of(blocks))
    assert repeating.refused is None
    assert repeating.replays > 15


def test_another_form_mode_or_buffer_is_another_pass() -> None:
    draw = torch.Generator().manual_seed(3)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    whole = batch_of(vectors, draw)

    def changed(number: int) -> Any:
        if number == 20:
            plain.model.eval()
        if number == 40:
            plain.model.shift = torch.tensor([2.0], device=DEVICE)
        return tuple(t[:3] for t in whole) if number >= 60 else whole

    for number in range(80):
        batch = changed(number)
        same(plain(batch, number), repeating(batch, number))
    assert repeating.refused is None
    assert len(repeating.gradient.repeated.passes.kept.values()) == 4  # type: ignore[union-attr]


class Written(nn.Module):
    """It writes to its inputs, which may be given twice or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        x += 1.0
        return self.second(torch.tanh(self.first(x))) * (1.0 if more is None else 2.0)


def test_passes_differ_by_autocast_by_the_batch_and_by_what_is_displaced_and_write_to_no_batch() -> None:
    draw = torch.Generator().manual_seed(6)
    inputs, targets = batch_of(vectors, draw)
    plain, repeating = sides(Written, ({"x": inputs}, targets))
    kept, here = inputs.clone(), plain.gradient.parameters()
    there = [value + 1 for value in here]
    cases: list[tuple[Any, Any, bool]] = [
        ({"x": inputs}, here, False), ({"x": inputs, "more": None}, here, False), ({"x": inputs}, here, True),
        ({"x": inputs}, [here[0], there[1]], False), ({"x": inputs}, [there[0], here[1]], False),
    ]  # fmt: skip
    for _ in range(8):
        for given, point, cast in cases:
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=cast):
                found = [rows_of(s.gradient(point, (given, targets), KEY, regular="here")) for s in (plain, repeating)]
            same(*found)
            assert torch.equal(inputs, kept)
    assert repeating.refused is None
    assert len(repeating.gradient.repeated.passes.kept.values()) == len(cases)  # type: ignore[union-attr]
    assert repeating.replays > 4 * len(cases)


class Held(dict):
    """A container that may hold more than its items."""


class Weighted(nn.Module):
    """A loss that is a module with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3, device=DEVICE))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, self.weight, reduction="sum")


def test_the_buffers_of_a_loss_are_read_where_they_are() -> None:
    draw, loss = torch.Generator().manual_seed(7), Weighted()
    plain, repeating = sides(Shifted, batch_of(vectors, draw), loss=loss)
    for number in range(40):
        if number > 10:
            loss.weight += 0.5
        if number == 25:
            loss.weight = torch.tensor([1.0, 0.0, 2.0], device=DEVICE)
        batch = batch_of(vectors, draw)
        same(plain(batch, number), repeating(batch, number))
    assert repeating.refused is None
    assert repeating.replays > 20


class Sparse(Shifted):
    """With a sparse buffer, which it does not even use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(5).to_sparse())


def test_sparse_buffers_are_told_once() -> None:
    plain, repeating = sides(Sparse, batch_of(vectors, torch.Generator().manual_seed(8)))
    (sentence,) = told(repeating, plain, 6, lambda _: None)
    assert "a tensor is sparse, or of a class of its own" in sentence


def test_containers_that_may_hold_more_are_told_once() -> None:
    inputs, targets = batch_of(vectors, torch.Generator().manual_seed(8))
    plain, repeating = sides(Written, ({"x": inputs}, targets))

    def steps() -> None:
        for number in range(6):
            batch = Held(x=inputs + number), targets
            same(plain(batch, 1), repeating(batch, 1))

    with pytest.warns(SpeedWarning, match="the batch is of a kind that may hold more than tensors") as found:
        steps()
    assert len(found) == 1


def test_replays_one_two_four_eight_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def noted(*blocks: Any) -> bool:
        compared.append(repeating.replays)
        return alike(*blocks)

    monkeypatch.setattr("dpcore.torch.gradients.repeated.alike", noted)
    draw = torch.Generator().manual_seed(9)
    _, repeating = sides(Shifted, batch_of(vectors, draw))
    for number in range(30):
        repeating(batch_of(vectors, draw), number)
    assert compared == [1, 2, 4, 8, 16]


def test_tensors_that_lie_elsewhere_in_every_step_are_not_captured_for_ever() -> None:
    draw = torch.Generator().manual_seed(10)
    plain, repeating = sides(Shifted, batch_of(vectors, draw))
    buffers = [torch.tensor([float(k)], device=DEVICE) for k in range(6)]

    def change(number: int) -> None:
        plain.model.shift = buffers[number // 2 % 5]
        if number % 10 == 9:  # so that each is captured anew
            repeating.gradient.repeated.passes.forget()  # type: ignore[union-attr]

    (sentence,) = told(repeating, plain, 80, change)
    assert "parameters or buffers lie elsewhere in nearly every step" in sentence


class Counting(nn.Module):
    """What it computes depends on a number that Python changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.temperature = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.temperature


def test_where_python_decides_something_else_graphs_are_given_up() -> None:
    plain, repeating = sides(Counting, batch_of(vectors, torch.Generator().manual_seed(4)))

    def change(number: int) -> None:
        plain.model.temperature = 1.0 if number < 10 else 0.5

    (sentence,) = told(repeating, plain, 40, change)
    assert "a replay's gradients are not the model's" in sentence
    assert repeating.replays == 0  # given back


class Outside(nn.Module):
    """It reads a tensor that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.held = [torch.ones(5, device=DEVICE)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.held[0])


class Checkpointed(nn.Module):
    """The backward pass draws the forward pass's mask again, from a state that the host has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def part(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(self.first(y)), 0.5)

        return self.last(checkpoint(part, x, use_reentrant=False))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Outside, "neither a parameter, a buffer nor the batch's"),
        (Checkpointed, "a replay's gradients are not the model's"),
    ],
)
def test_a_model_that_cannot_be_captured_runs_as_without(make: Callable[[], nn.Module], why: str) -> None:
    plain, repeating = sides(make, batch_of(vectors, torch.Generator().manual_seed(4)))
    (sentence,) = told(repeating, plain, 9, lambda _: None)
    assert sentence.startswith("cuda_graphs='model': the model's passes are not repeated (")
    assert why in sentence or not launch.INTERPRETED  # a device tells of other things first
