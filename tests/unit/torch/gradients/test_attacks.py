"""Models made to deceive the proof: each passed once, or is near one that did; all are refused or right."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcore.torch.gradients.capture import capture
from dpcore.torch.gradients.errors import NotProved
from dpcore.torch.gradients.proved import Program

CLASSES = 5
Tensor = torch.Tensor


def loss_of(output: Any, targets: Any) -> Tensor:
    return F.cross_entropy(output, *targets)


def program(model: nn.Module, batch: Any) -> Program:
    captured = capture(model, [name for name, _ in model.named_parameters()], loss_of, batch)
    found = Program(captured)
    captured.check_numbers()
    return found


class Two(nn.Module):
    def __init__(self, middle: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(8, 16), nn.Linear(16, CLASSES), middle
        self.scale, self.part, self.square = (
            nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(16, 16) / 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.middle(self.first(x), self)))


def places(h: Tensor) -> Tensor:
    return torch.arange(len(h))


def reseeded(draw: Callable[[], Tensor]) -> Tensor:
    torch.manual_seed(0)
    return draw()


def replayed(one: Callable[[], Tensor], two: Callable[[], Tensor]) -> Tensor:
    state = torch.get_rng_state()
    first = one()
    torch.set_rng_state(state)
    return first + two()


class Ones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        return h * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, torch.ones(())


REFUSED: dict[str, Callable[[Tensor, Any], Tensor]] = {
    # The number of examples.
    "sum of places": lambda h, _: h / (1 + places(h).sum()),
    "last place": lambda h, _: h / (1 + places(h)[-1]),
    "places from 1": lambda h, _: h * torch.arange(1, len(h) + 1).float().max(),
    "scalar_tensor": lambda h, _: h / torch.scalar_tensor(len(h)),
    "filled": lambda h, _: h / torch.full((), 2 * len(h)),
    "a bound": lambda h, _: h.clamp(max=2 * len(h)),
    "a parameter's bound": lambda h, m: h * m.scale.clamp(max=2 * len(h)),
    "a base": lambda h, _: (2 * len(h)) ** (h / 9),
    "rows of a parameter": lambda h, m: h + m.part[: len(h)].mean(0),
    "parts of features": lambda h, _: h.split(len(h), 1)[0],
    "identity matrix": lambda h, _: h / torch.eye(len(h)).sum(),
    "permutation": lambda h, _: h * torch.randperm(len(h)).sum(),
    "indices of a triangle": lambda h, _: h * torch.tril_indices(len(h), len(h)).float().mean(),
    "drawn": lambda h, _: h * torch.normal(0.0, 1.0, (len(h),)).sum(),
    "a tensor": lambda h, _: h / torch.tensor(float(len(h))),
    "2/B": lambda h, _: h * (2 / len(h)),
    "root": lambda h, _: h * len(h) ** 0.5,
    "B+1": lambda h, _: h / (len(h) + 1),
    "B//2": lambda h, _: h / (len(h) // 2),
    "log B": lambda h, _: h * math.log(len(h)),
    "a branch": lambda h, _: 2 * h if len(h) > 64 else h,
    # A part of the batch, at more examples than were captured.
    "the first 100": lambda h, _: h[:100],
    "the last 100": lambda h, _: h[-100:],
    "parts of 100": lambda h, _: h.split(100)[0],
    # Other examples.
    "places, viewed": lambda h, _: h[places(h)[:, None].expand(-1, 3).reshape(3, -1)].mean(0),
    "places, turned": lambda h, _: h[places(h)[:, None].expand(-1, 3).t()].mean(0),
    "places, wrapped": lambda h, _: h[places(h).to(torch.int8).long()],
    "is in": lambda h, _: h * (1 + torch.isin((h[:, 0] * 2).round(), (h[:, 1] * 2).round())[:, None]),
    "bucketize": lambda h, _: h * (1 + torch.bucketize(h[:, 0].detach(), h[:, 1].detach().contiguous())[:, None]),
    # What no program would do again.
    "seeded": lambda h, _: h * reseeded(lambda: torch.rand(16)),
    "unlike draws from one state": lambda h, _: h * replayed(
        lambda: torch.bernoulli(torch.full((16,), 0.1)), lambda: torch.bernoulli(torch.full((16,), 0.9))
    ),
    "a gradient without examples": lambda h, m: Ones.apply(h, m.scale),
    "no entries": lambda h, _: h + h[:, :0].reshape(len(h), 0).sum(1, keepdim=True),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str) -> None:
    with pytest.raises(NotProved):
        program(Two(REFUSED[name]), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))


class Frames(nn.Module):
    """Frames of all examples in one dimension, the first frames of all of them first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.group, self.fixed = nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.BatchNorm2d(4)
        self.layer, self.table, self.last = nn.LayerNorm(4), nn.Embedding(9, 4), nn.Linear(64, CLASSES)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fixed(self.group(self.conv(x.transpose(0, 1).flatten(0, 1))))
        y = self.layer(y.movedim(1, -1)).movedim(-1, 1)
        y = y + self.table((y[:, 0, 0] > 0).long()).movedim(-1, 1)[:, :, None]
        return self.last(y.view(3, -1, *y.shape[1:]).mean(0).flatten(1))


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def two(middle: Callable[[Tensor, Any], Tensor]) -> tuple[Callable[[], nn.Module], Callable[[int], Tensor]]:
    return lambda: Two(middle), rows(8)


RIGHT = {
    "frames first": (Frames, rows(3, 2, 5, 5)),
    "a scalar": two(lambda h, m: h * m.scale),
    "the last rows of a matrix": two(lambda h, m: h @ m.part[-3:].t() @ m.part[:3]),
    "parts of parts": two(lambda h, m: h @ m.square[:, 2:][:, 1:-2] @ m.square[3:-2]),
    "turned twice": two(lambda h, m: h @ m.square.transpose(0, -2)),
    "permuted to itself": two(lambda h, m: h @ m.square.permute(-2, -1)),
    "its own row": two(lambda h, m: h[places(h), torch.full((len(h),), 3)][:, None] + h),
    "an own dimension": two(lambda h, m: h.unsqueeze(1).squeeze(1)),
    "all of the batch": two(lambda h, m: h.narrow(0, 0, len(h))),
}


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_right(name: str) -> None:
    make, inputs = RIGHT[name]
    model = make()
    found = program(model, (inputs(2), torch.zeros(2, dtype=torch.int64)))
    named, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    given = [p.detach() for p in named.values()], [buffers[key] for key in found.held_names]
    for n in (1, 2, 70):  # more than were captured, too
        x, y = inputs(n), torch.arange(n) % CLASSES
        blocks = [block.rows() for block in found(*given, [x, y])]
        for i in {0, n - 1}:
            model.zero_grad()
            loss_of(model(x[i : i + 1]), (y[i : i + 1],)).backward()
            for key, block in zip(named, blocks, strict=True):
                own = named[key].grad
                wanted = torch.zeros_like(block[i]) if own is None else own.flatten()
                torch.testing.assert_close(block[i], wanted, rtol=1e-4, atol=1e-5)


def test_memory_that_nothing_was_written_to_holds_nothing() -> None:
    model = Two(lambda h, _: h + torch.empty(len(h), 16))
    found = program(model, (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))
    assert any("zero" in str(node.target) for node in found._module.graph.nodes)


def test_squeezing_all_dimensions_leaves_the_one_of_one_example() -> None:
    model = Two(lambda h, _: h.unsqueeze(1).squeeze())
    found = program(model, (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))
    x, y, point = torch.randn(3, 8), torch.arange(3), [p.detach() for p in model.parameters()]
    several, one = found(point, [], [x, y]), found(point, [], [x[:1], y[:1]])
    for many, few in zip(several, one, strict=True):
        torch.testing.assert_close(many.rows()[:1], few.rows())
