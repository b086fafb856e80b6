"""Gradients of one model, with passes that are repeated or without, for the tests of both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dpcore_triton
from dpcore.errors import SpeedWarning
from dpcore.torch.gradients.per_example import PerExampleGradient, try_out
from dpcore.torch.gradients.repeated import RepeatedPasses
from dpcore_triton import launch
from dpcore_triton.graphs import Graphs

DEVICE = launch.default_device()

EXAMPLES = 4


class Shifted(nn.Module):
    """Dropout, a buffer, a frozen and a trained parameter; a sparse buffer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))
        self.layers[0].bias.requires_grad_(False)
        self.register_buffer("shift", torch.tensor([0.5]))
        self.register_buffer("edges", torch.eye(5).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x * self.shift.to(x.dtype))


def vectors(draw: torch.Generator) -> torch.Tensor:
    return torch.randn(EXAMPLES, 5, generator=draw)


class Side:
    """Gradients of one model, with passes that are repeated or without."""

    def __init__(self, model: nn.Module, example: Any, graphs: bool) -> None:
        self.model = model.to(DEVICE)
        self.gradient = PerExampleGradient(self.model, F.cross_entropy)
        try_out(self.gradient, example, way="pairs")
        if graphs:
            self.gradient.repeated = RepeatedPasses(self.gradient.values, Graphs(dpcore_triton))

    def __call__(self, batch: Any, number: int) -> list[torch.Tensor]:
        return rows_of(self.gradient(self.gradient.parameters(), batch, bytes([number]) * 32, regular="here"))

    @property
    def repeated(self) -> RepeatedPasses:
        assert self.gradient.repeated is not None
        return self.gradient.repeated

    @property
    def replays(self) -> int:
        return sum(one.replays for one in self.repeated.passes.kept.values())


def sides(make: Callable[[], nn.Module], example: Any) -> tuple[Side, Side]:
    """Return a model's gradients without graphs and with them."""
    model = make()
    return Side(model, example, False), Side(model, example, True)


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> None:
    for left, right in zip(one, other, strict=True):
        if launch.INTERPRETED:
            assert torch.equal(left, right)
        else:  # the order of a sum may be another
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-6)


def batch_of(inputs: Callable[[torch.Generator], torch.Tensor], draw: torch.Generator) -> tuple[torch.Tensor, ...]:
    return inputs(draw).to(DEVICE), torch.randint(0, 3, (EXAMPLES,), generator=draw).to(DEVICE)


def rows_of(blocks: Sequence[Any]) -> list[torch.Tensor]:
    return [block.rows().clone() for block in blocks]


def told(plain: Side, repeating: Side, batches: int, change: Callable[[int], None] = lambda _: None) -> list[str]:
    """Compare some batches; return what was warned of."""
    draw = torch.Generator().manual_seed(4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for number in range(batches):
            change(number)
            batch = batch_of(vectors, draw)
            same(plain(batch, number), repeating(batch, number))
    return [str(warning.message) for warning in found if warning.category is SpeedWarning]
