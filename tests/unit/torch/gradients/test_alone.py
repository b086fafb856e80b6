"""Gradients of models without a proof: each example's own, with a dropout mask of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from dpcore.torch.gradients.per_example import PerExampleGradient


def test_every_example_is_differentiated_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    gradient, x, y = PerExampleGradient(model, F.cross_entropy, "one-by-one"), torch.randn(4, 5), torch.arange(4) % 3
    blocks = [block.rows() for block in gradient(gradient.parameters(), (x, y))]
    for i in range(4):
        own = torch.autograd.grad(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        for block, wanted in zip(blocks, own, strict=True):
            torch.testing.assert_close(block[i], wanted.flatten())


def test_equal_examples_have_masks_of_their_own() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 3))
    gradient = PerExampleGradient(model, F.cross_entropy, "one-by-one")
    rows = gradient(gradient.parameters(), (torch.ones(2, 50), torch.zeros(2, dtype=torch.int64)))[0].rows()
    assert ((rows[0] != 0) != (rows[1] != 0)).any()
