"""Norms on tensor cores bound whatever a tensor core makes of the sum, on examples that are built to round it up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.depth import chosen
from tests.unit.backends.tensor_core import A100, H100, LEFT_OUT, Array, exact, multiplied, narrow, summed, truncating

pytest.importorskip("triton")

from dpcore_triton.cores import RAISED, SPLIT, gram_bound, most_rounding, rounding, tiles_bound
from dpcore_triton.pairs import Bound

EXAMPLES = chosen(100, 8400)  # of each of the fourteen tests: 1,400, or 100,000
DOTS = {"A100": truncating(A100), "H100": truncating(H100), "exact": exact}
SHAPES = {"short": (40, 5, 3), "long": (66, 2, 2), "longest": (250, 2, 1), "wide": (3, 130, 40)}
CASES = [
    *(
        (shape, way, split, False)
        for shape in ("short", "long", "wide")
        for way in ("tiles", "gram")
        for split in (False, True)
    ),
    ("longest", "tiles", False, True),
    ("long", "gram", False, True),
]


def pairs(seed: int, count: int, shape: tuple[int, int, int], split: bool) -> tuple[Array, Array]:
    """Activations (B, T, p) and output gradients (B, T, q), of which most cancel but for what truncation drops."""
    time, p, q = shape
    rng = np.random.default_rng(seed)
    a, e = rng.normal(size=(count, time, p)), rng.normal(size=(count, time, q))
    kind = np.arange(count) % (6 if split else 5)
    # Mantissas of ones, of one sign: each truncation drops as much as it can.
    a[kind == 1], e[kind == 1] = (1 - 2.0**-8) * 2.0 ** rng.integers(0, 2, 1), 1 - 2.0**-8
    # Neighbors that cancel, or nearly, around terms whose last digits lie below their quantum.
    for some, near in ((kind == 2, 0.0), (kind == 3, 2.0**-7)):
        a[some, 1::3] = -a[some, : a[some, 1::3].shape[1] * 3 : 3]
        e[some, 1::3] = e[some, : e[some, 1::3].shape[1] * 3 : 3] * (1 + near)
        a[some, 2::3] *= 2.0**-5
        e[some, 2::3] = np.abs(e[some, 2::3]) * 2.0**-6
    # Two that cancel, and between them what is below a tensor core's last digit.
    a[kind == 4], e[kind == 4] = (1 - 2.0**-8) * 2.0**-12, (1 - 2.0**-8) * 2.0**-12
    last = min(15 if split else 63, time - 1)
    a[kind == 4, 0], e[kind == 4, 0], a[kind == 4, last], e[kind == 4, last] = 1, 1, 1, -1
    a[kind == 5], e[kind == 5] = LEFT_OUT
    a, e = (np.float32(x).astype(np.float64) for x in (a, e))
    return (a, e) if split else (narrow(a), narrow(e))


def norms(a: Array, e: Array, way: str, dot: Any, split: bool, chained: bool, **without: float) -> Array:
    """Return N as the kernels make it, or without a term of the bound."""
    time, p, q = a.shape[1], a.shape[2], e.shape[2]
    rho = rounding([time], split=split, chained=chained)
    lengths = [np.linalg.norm(np.abs(x) + RAISED.value, axis=2) for x in (a, e)]
    terms = (lengths[0] * lengths[1]).sum(axis=1)
    if way == "tiles":
        v = summed(e.swapaxes(1, 2), a, dot, split)
        square = np.float32(v * v).sum(axis=(1, 2), dtype=np.float32).astype(np.float64)
        bound = tiles_bound(rho + rounding([time], split=split))
    else:
        x, y = (summed(side, side.swapaxes(1, 2), dot, split) for side in (a, e))
        bound = gram_bound(rho, p, q, -(-time // 64), split=split)
        square = np.float32(np.float32(x * y).sum(axis=1, dtype=np.float32)).sum(axis=1, dtype=np.float64)
    bound = bound._replace(**without)
    assert isinstance(bound, Bound)
    return bound.raising * np.sqrt(np.maximum(square, 0) + bound.inner * terms**2) + bound.outer * terms + bound.under


@pytest.mark.parametrize(("shape", "way", "split", "chained"), CASES)
def test_no_contribution_is_longer_than_its_norm(shape: str, way: str, split: bool, chained: bool) -> None:
    for first in range(0, EXAMPLES, 250):
        a, e = pairs(first, min(250, EXAMPLES - first), SHAPES[shape], split)
        sums = [summed(e.swapaxes(1, 2), a, dot, split, chained) for dot in DOTS.values()]
        longest = np.max([np.linalg.norm(v, axis=(1, 2)) for v in sums], axis=0)
        for core in ("A100", "H100"):
            found = norms(a, e, way, DOTS[core], split, chained)
            assert (longest <= found).all(), (first, core, (longest / found).max())
            # And not far from it, for most where nothing is made to cancel.
            assert np.median(found[::5] / longest[::5]) <= 1.01


@pytest.mark.parametrize(("way", "shape", "term"), [("tiles", "short", "outer"), ("gram", "wide", "inner")])
def test_without_its_terms_the_norm_is_too_small(way: str, shape: str, term: str) -> None:
    a, e = pairs(0, 250, SHAPES[shape], False)
    longest = np.linalg.norm(exact(e.swapaxes(1, 2), a, np.zeros(1)), axis=(1, 2))
    assert (norms(a, e, way, DOTS["A100"], False, False, **{term: 0.0}) < longest).any()


@pytest.mark.parametrize("core", ["A100", "H100"])
def test_a_block_rounds_by_no_more_than_is_assumed(core: str) -> None:
    """The assumption itself, relative to the sum of all sizes; and it is of the right order."""
    worst = 0.0
    for seed in range(chosen(4, 100)):
        a, e = pairs(seed, 250, (16, 8, 8), False)
        true, sizes = e.swapaxes(1, 2) @ a, np.abs(e.swapaxes(1, 2)) @ np.abs(a)
        error = np.abs(DOTS[core](e.swapaxes(1, 2), a, np.zeros(true.shape)) - true)
        worst = max(worst, float((error / sizes).max()))
    assert 0.05 * 2.0**-19 < worst < 0.7 * 2.0**-19


def test_splitting_leaves_out_what_is_assumed_and_no_more() -> None:
    x, y = np.random.default_rng(0).uniform(1, 2, (2, 100_000)).astype(np.float32).astype(np.float64)
    x[0], y[0] = LEFT_OUT
    found = multiplied(x[:, None, None], y[:, None, None], exact, split=True).ravel()
    left_out = np.abs(x * y - found) / (x * y)
    assert 0.98 * SPLIT < left_out[0] == left_out.max() < SPLIT


def test_a_chain_rounds_by_more_than_chunks_and_by_what_is_assumed() -> None:
    """What is below the tensor core's last digit is lost in each block after a large product."""
    a = np.full((1, 250, 1), (1 - 2.0**-8) * 2.0**-12)
    a[:, 0] = 1
    true, v = (a * a).sum(), summed(a.swapaxes(1, 2), a, DOTS["A100"], False, True).item()
    assert rounding([250], split=False) < (true - v) / true <= rounding([250], split=False, chained=True)


def test_a_tied_head_has_room_for_the_sum_that_rounds_most() -> None:
    assert most_rounding([8] * 30) == rounding([8] * 30, split=False, chained=True) > rounding([8] * 30, split=True)
    assert most_rounding([257]) == rounding([257], split=True) > rounding([257], split=False)
