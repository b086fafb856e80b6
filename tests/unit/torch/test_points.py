"""Gradients at several points, and those of public data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.errors import ArgumentError
from tests.unit.torch_runs import DATA, METHODS, model, public_batch, start, values


@pytest.mark.parametrize("name", ["disk", "pmlf", "srg_memf", "accelerated_srgd"])
def test_all_points_of_an_example_see_the_same_dropout_masks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(model(), METHODS[name](8), sampling="fixed_order", microbatch_size=4)
    seeds: list[bytes] = []
    call = type(run._engine.gradient).__call__

    def told(self: Any, point: Any, batch: Any, seed: bytes, **more: Any) -> list[torch.Tensor]:
        seeds.append(seed)
        return call(self, point, batch, seed, **more)

    monkeypatch.setattr(type(run._engine.gradient), "__call__", told)
    for batch in run.loader:
        seeds.clear()
        points = len(run._engine.mechanism.points())
        run.step(batch)
        micro = -(-len(batch[0]) // 4)
        assert len(seeds) == points * micro
        assert len(set(seeds)) == micro
        assert seeds == [seed for seed in dict.fromkeys(seeds) for _ in range(points)]


def test_the_public_gradient_is_the_mean_by_autograd_without_a_clip() -> None:
    method = dpcore.methods.dp_adam(
        lr=0.1, betas=(0.0, 0.0), eps=1e-3, variant="side_information", noise_multiplier=0.0, batch_size=8,
        max_grad_norm=1e6
    )  # fmt: skip
    run = start(model().double(), method, data=(DATA[0].double(), DATA[1]), sampling="fixed_order", microbatch_size=3)
    batch = next(iter(run.loader))
    before = values(run.model)
    inputs, targets = 100 * torch.ones(7, 5, dtype=torch.float64), torch.arange(7) % 3

    def mean(x: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(run.model(x), y, reduction="sum") / count
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(run.model.parameters()))])

    public, private = mean(inputs, targets, 7), mean(*batch, 8)
    run.step(batch, public=(inputs, targets))
    torch.testing.assert_close(values(run.model), before - 0.1 * private / (public.abs() + 1e-3), rtol=1e-3, atol=1e-5)
    assert any("declares public" in caveat for caveat in run.statement().caveats)


PUBLIC_REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "missing": ("adam public", lambda: None, "public=None: must be a batch of public data"),
    "not wanted": ("adam", lambda: DATA, "public: must be None for this method"),
    "empty": ("adam public", lambda: (DATA[0][:0], DATA[1][:0]), "at least one example"),
    "the private data": ("adam public", lambda: (DATA[0][:2], DATA[1][:2]), "lies in the memory of the private data"),
    "uneven": ("adam public", lambda: (DATA[0][:2], DATA[1][:3]), "disagree about the number"),
}


@pytest.mark.parametrize("name", PUBLIC_REFUSED)
def test_public_batches_refused(name: str) -> None:
    method, public, words = PUBLIC_REFUSED[name]
    run = start(model(), METHODS[method](8))
    batch = next(iter(run.loader))
    with pytest.raises(ArgumentError, match=words):
        run.step(batch, public())
    assert run.steps_taken == 0
    run.step(batch, public_batch(run))
