"""When a replay's gradients count as the model's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dpcore.stages.clipping.blocks import Embedding, Linear, Rows
from dpcore.torch.gradients.repeated import ROUNDING, alike


def made(change: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, t: t) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    values = [change(k, torch.randn(4, 5, generator=draw)) for k in range(6)]
    return [*map(Rows, values[:4]), Linear((values[4][:, None],), (values[5][:, None],), (1.0,))]


def only(number: int, factor: float) -> list[Any]:
    return made(lambda k, t: t * factor if k == number else t)


@pytest.mark.parametrize("number", range(6))
def test_alike_allows_for_rounding_and_for_what_the_model_varies_by_itself(number: int) -> None:
    wanted = made()
    assert alike(only(number, 1 + 1e-6), wanted, wanted, ROUNDING)
    assert not alike(only(number, 1.01), wanted, wanted, ROUNDING)
    assert alike(only(number, 1.01), wanted, only(number, 0.995), ROUNDING)
    assert not alike(only(number, 1.1), wanted, only(number, 0.995), ROUNDING)
    assert not alike(only(number, 1.01), wanted, only((number + 1) % 6, 0.9), ROUNDING)


def test_alike_sees_other_kinds_and_values_that_are_not_finite() -> None:
    wanted = made()
    assert not alike(made(lambda _, t: t.double()), wanted, wanted, ROUNDING)
    assert not alike(wanted[1:], wanted, wanted, ROUNDING)
    missing = made(lambda k, t: torch.full_like(t, torch.nan) if k % 2 else t)
    assert alike(missing, missing, missing, ROUNDING)
    assert not alike(missing, wanted, wanted, ROUNDING)
    half = made(lambda _, t: t.bfloat16())
    assert alike(made(lambda _, t: (t * 1.002).bfloat16()), half, half, ROUNDING)
    assert not alike(made(lambda _, t: (t * 1.5).bfloat16()), half, half, ROUNDING)
    tokens = [Embedding((torch.tensor([[1, 2]]),), (torch.ones(1, 2, 3),), (1.0,), 5)]
    others = [Embedding((torch.tensor([[1, 3]]),), (torch.ones(1, 2, 3),), (1.0,), 5)]
    assert alike(tokens, tokens, tokens, ROUNDING)
    assert not alike(tokens, others, others, ROUNDING)


def test_one_large_example_does_not_hide_the_others() -> None:
    large = made(lambda _, t: t * torch.tensor([1e6, 1.0, 1.0, 1.0])[:, None])
    stale = made(lambda _, t: t * torch.tensor([1e6, 2.0, 1.0, 1.0])[:, None])
    assert alike(large, large, large, ROUNDING)
    assert not alike(stale, large, large, ROUNDING)
