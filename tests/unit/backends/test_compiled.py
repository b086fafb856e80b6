"""Sums and noise by torch.compile: the bits of the operations that they replace."""

import shutil
from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

import dpcore_torch
from dpcore.errors import SpeedWarning
from dpcore.spec.ops import NoiseRow, Slot, UpdateSettings
from dpcore.spec.pair_ops import LinearPairs
from dpcore_numpy.denormals import denormals_are_zero
from dpcore_torch.compiled import Compiled, weighted

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),  # torch's own
]
KEY = bytes(range(32))


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    return Compiled(dpcore_torch)


def rows_and_weights(count: int, width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, the first of denormal numbers; the second is not finite and has weight 0."""
    draw = torch.Generator().manual_seed(count)
    rows = torch.randn(count, width, generator=draw)
    rows[0] *= 1e-39
    weights = torch.rand(count, generator=draw, dtype=torch.float64) * 2.0**30
    weights[0] = 2.0**160
    weights[1], rows[1, ::2], rows[1, 1] = 0.0, float("nan"), float("inf")
    return rows.to(dtype), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("count", "width"), [(2, 9001), (33, 1000), (33, 4096), (140, 140)])
def test_a_compiled_sum_has_the_same_bits(compiled: Compiled, count: int, width: int, dtype: torch.dtype) -> None:
    rows, weights = rows_and_weights(count, width, dtype)
    totals = torch.full((2, width), 5.0, dtype=torch.float64)
    for backend, total in zip((dpcore_torch, compiled), totals, strict=True):
        backend.weighted_sum([rows], [weights], [total])
    assert (totals[0] != 5).any()
    assert torch.equal(*totals)
    assert totals.isfinite().all()
    assert not denormals_are_zero()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_sums_of_layers_have_the_same_bits(compiled: Compiled, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(7)
    a, e = (torch.randn(5, 30, size, generator=draw).to(dtype) for size in (300, 170))
    weights = torch.tensor([1e6, 0.0, 3e7, 1.5, 1e7], dtype=torch.float64)
    totals = torch.zeros(2, 170 * 300, dtype=torch.float64)
    for backend, total in zip((dpcore_torch, compiled), totals, strict=True):
        backend.linear_sums([LinearPairs([a], [e], [1.0])], [weights], [total])
    assert totals[0].count_nonzero() > 50_000
    assert torch.equal(*totals)


@pytest.mark.parametrize("bits", [36, 20])
def test_compiled_noise_has_the_same_bits(compiled: Compiled, bits: int) -> None:
    for start, size in ((0, 300_000), (5000, 1000)):
        drawn = [backend.normal(KEY, 5, 1, start, size, bits=bits) for backend in (dpcore_torch, compiled)]
        assert torch.equal(*drawn)


def test_a_compiled_step_moves_to_the_same_bits(compiled: Compiled) -> None:
    moved = []
    for backend in (dpcore_torch, compiled):
        total = torch.arange(9000, dtype=torch.float64) * 2.0**20
        slot: Any = Slot(torch.ones(9000), total, 100, moments=(torch.zeros(9000), torch.zeros(9000)))
        settings = [UpdateSettings(learning_rate=0.1)]
        backend.step([slot], NoiseRow(KEY, 3, 0, 1.0, bits=30), 4.0, [], "adam", settings, 1, unit=2.0**-30)
        moved.append(slot.parameter)
    assert torch.equal(*moved)
    assert (moved[0] != 1).all()


def test_what_cannot_be_compiled_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise TorchDynamoException("no compiler\nand more")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    backend, (rows, weights) = Compiled(dpcore_torch), rows_and_weights(33, 1000, torch.float32)
    total = torch.zeros(1000, dtype=torch.float64)
    with pytest.warns(SpeedWarning, match=r"^compile: weighted runs as written \(no compiler\)$"):
        backend.weighted_sum([rows], [weights], [total])
    backend.weighted_sum([rows], [weights], [total])  # told once
    assert torch.equal(total, 2 * weighted(rows, weights))
