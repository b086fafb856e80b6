"""The doctor in several processes: ranks that agree pass, ranks that do not are named, and none waits for another."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dpcore import methods
from dpcore.torch import doctor
from tests.end_to_end.test_processes import in_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")


def examined(model: nn.Module, shift: float = 0.0, **options: object) -> object:
    inputs = torch.arange(48.0).view(24, 2).cos() + shift
    method = methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=6)
    return doctor(model, (inputs, torch.arange(24) % 3), method, steps=4, audit=False, **options)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def ranks(rank: int, folder: Path) -> None:
    """Agreeing ranks, ranks of other data, of other weights, and one with a fault of its own."""
    whole = examined(model())
    (same,) = whole.named("processes")
    assert (same.status, "2 processes have the same" in same.sentence) == ("ok", True), str(whole)
    (other,) = examined(model(), shift=0.5 * rank).named("processes")
    assert (other.status, "data" in other.sentence) == ("fault", True)
    moved = model()
    with torch.no_grad():
        moved[0].bias += rank
    (weights,) = examined(moved).named("processes")
    assert (weights.status, "0.bias" in weights.sentence) == ("fault", True)
    broken = model().insert(1, nn.BatchNorm1d(4)) if rank else model()
    found = examined(broken)
    assert found.ok == (rank == 0)
    (told,) = found.named("processes")
    assert (told.status, "1 of 2 processes" in told.sentence) == ("not tried", True)
    (folder / str(rank)).touch()


def test_ranks_are_compared(tmp_path: Path):
    in_processes(2, ranks, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
