"""einsum: pairs where it is a product of matrices, rows elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dpcore.stages.clipping.blocks import Linear, Rows
from tests.unit.torch.gradients.one_by_one import Readout, compare, randomized

SIZES = {"t": 3, "d": 4, "h": 5, "n": 2, "k": 2}
EQUATIONS = {
    "btd,dh->bth": Linear,
    "btd,hd->bth": Linear,
    "btd,hd->htb": Linear,
    "btd,dh->bh": None,
    "btd,dnk->btnk": Rows,
    "btd,td->bt": Rows,
    "btd,tdh->bth": Rows,
    "btd,d->bt": Rows,
    "btd,dh->bt": None,
    "btd,t->btd": Rows,
    "btd,h->bthd": Rows,
    "... d, d h -> ... h": None,
}


class Einsum(nn.Module):
    def __init__(self, equation: str, turned: bool) -> None:
        super().__init__()
        self.equation, self.turned = equation, turned
        letters = equation.replace(" ", "").split("->")[0].split(",")[1]
        self.weight = nn.Parameter(torch.ones([SIZES[letter] for letter in letters]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.turned:
            (left, right), out = self.equation.split("->")[0].split(","), self.equation.split("->")[1]
            result = torch.einsum(f"{right},{left}->{out}", [self.weight, x])
        else:
            result = torch.einsum(self.equation, x, self.weight)
        return result.movedim(-1, 0) if self.equation.endswith("b") else result


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_einsum(equation, turned, dtype):
    block = compare(randomized(Readout(Einsum(equation, turned), nn.Linear(2, 4)), dtype), (3, 2), dtype)[2]
    kind = EQUATIONS[equation]
    assert kind is None or isinstance(block, kind)
