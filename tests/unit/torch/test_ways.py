"""One run by three ways and three micro-batch splits: the same sums to rounding, and the same noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpcore.sampling import FixedOrderSampler, UserSampler
from dpcore.torch.gradients.per_example import WAYS
from tests.unit.torch_runs import METHODS, finish, start, values

TOKENS = torch.arange(240).reshape(30, 8) * 7 % 13, torch.arange(30) % 13
SOME = ("dp_sgd", "adaptive clip", "per layer", "disk", "pmlf", "srg_memf", "accelerated_srgd", "adam scaled", "galore")


class Reader(nn.Module):
    """An embedding tied to the head, positions, attention, normalization and a layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Embedding(13, 6), nn.Parameter(0.1 * torch.randn(1, 8, 6))
        self.mix = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
        self.twice, self.head = nn.Linear(6, 6), nn.Linear(6, 13)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.mix(self.embed(tokens) + self.places)
        return self.head(self.twice(torch.tanh(self.twice(x))).mean(1))


def outcome(method: str, batch_size: int = 8, **options: Any) -> tuple[torch.Tensor, str]:
    net = Reader()
    run = start(net, METHODS[method](batch_size), data=TOKENS, loss=F.cross_entropy, epochs=None, steps=5, **options)
    finish(run)
    return values(net), run._engine.gradient.way


def options_of(method: str) -> dict[str, Any]:
    return {"sampling": "fixed_order"} if method == "srg_memf" else {"sampling": "shuffled"}


@pytest.mark.parametrize("method", SOME)
def test_ways_and_splits_agree(method: str) -> None:
    wanted, way = outcome(method, gradients="one-by-one", microbatch_size=8, **options_of(method))
    assert way == "one-by-one"
    assert not torch.allclose(wanted, values(Reader()), atol=1e-3)
    for kind, size in (("pairs", 1), ("pairs", 3), ("pairs", 8), ("one-by-one", 3)):
        found, way = outcome(method, gradients=kind, microbatch_size=size, **options_of(method))
        assert way == kind
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("size", [1, 3, 8])
def test_users_are_summed_before_the_clip_by_every_way(size: int) -> None:
    sampler = UserSampler(FixedOrderSampler(dataset_size=10, batch_size=4), [i // 3 for i in range(30)], 3)
    found = [outcome("disk", 4, gradients=way, microbatch_size=size, sampling=sampler)[0] for way in WAYS]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=2e-4, atol=2e-4)
