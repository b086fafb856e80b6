"""Normals: the definition by a scalar loop, the float32 accuracy, the tail, and the distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpcore.spec.agreement import AGREEMENT
from dpcore.spec.stream import Stream
from dpcore_numpy import normal, words

KEY = bytes(range(100, 132))


def normal_by_definition(key: bytes, row: int, element: int) -> float:
    """design.md section 4, for one element, with Python's own integers and math."""
    tile, r = divmod(element, 4096)
    word, lane = divmod(r, 256)
    even = tile * 4096 + (word - word % 2) * 256 + lane
    w0 = int(words(key, row, 0, even, 1)[0])
    w1 = int(words(key, row, 0, even + 256, 1)[0])
    if w0 < 4096:
        refined = int(words(key, row, 0, even, 1, tail=True)[0])
        log_u = math.log((w0 + (refined + 0.5) * 2.0**-32) * 2.0**-32)
    elif w0 < 2**31:
        log_u = math.log((w0 + 0.5) * 2.0**-32)
    else:
        log_u = math.log1p(-((2**32 - 1 - w0) + 0.5) * 2.0**-32)
    rho = math.sqrt(-2 * log_u)
    angle = 2 * math.pi * w1 * 2.0**-32
    return rho * (math.cos(angle) if word % 2 == 0 else math.sin(angle))


def tail_elements(row: int, size: int) -> np.ndarray:
    """Elements below `size` whose radius word lies in the tail."""
    drawn = words(KEY, row, Stream.GRADIENT, 0, size).reshape(-1, 16, 256)
    tile, pair, lane = np.nonzero(drawn[:, 0::2] < 4096)
    return tile * 4096 + pair * 512 + lane


def test_float64_is_the_definition() -> None:
    elements = [*range(40), *range(250, 262), *range(4090, 4100), 8191, 12345, 2**36 - 1]
    for element in elements:
        got = normal(KEY, 3, Stream.GRADIENT, element, 1, dtype="float64")[0]
        assert got == pytest.approx(normal_by_definition(KEY, 3, element), rel=1e-13, abs=1e-15)


def test_the_tail_is_refined() -> None:
    elements = tail_elements(11, 4096 * 1024)
    assert elements.size >= 1
    for element in elements:
        for partner in (int(element), int(element) + 256):
            expected = normal_by_definition(KEY, 11, partner)
            assert normal(KEY, 11, 0, partner, 1, dtype="float64")[0] == pytest.approx(expected, rel=1e-13, abs=1e-15)
            assert normal(KEY, 11, 0, partner, 1)[0] == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_float32_lies_within_8_ulps() -> None:
    exact = normal(KEY, 5, Stream.GRADIENT, 0, 2_000_000, dtype="float64")
    drawn = normal(KEY, 5, Stream.GRADIENT, 0, 2_000_000)
    ulp = np.spacing(np.maximum(np.abs(exact).astype(np.float32), np.finfo(np.float32).tiny))
    assert (np.abs(drawn - exact) / ulp).max() <= AGREEMENT["normal"].ulps / 2


@pytest.mark.parametrize("scale", [1.0, 0.9, 1.02])
def test_kolmogorov_smirnov_accepts_the_normal_and_rejects_other_scales(scale: float) -> None:
    drawn = scale * np.concatenate([normal(KEY, row, Stream.GRADIENT, 100, 100_000) for row in range(2)])
    p = stats.kstest(drawn, "norm").pvalue
    assert (p > 1e-3) == (scale == 1.0)


def test_moments_and_independence() -> None:
    size = 1_000_000
    here, next_row = (normal(KEY, row, Stream.GRADIENT, 0, size, dtype="float64") for row in (1, 2))
    other_stream = normal(KEY, 1, Stream.SECOND_MOMENT, 0, size, dtype="float64")
    bound = 5 / math.sqrt(size)
    assert abs(here.mean()) < bound
    assert abs(here.var() - 1) < bound * math.sqrt(2)
    assert abs((here**4).mean() - 3) < bound * math.sqrt(96)
    for shifted in (np.roll(here, 1), np.roll(here, 256), np.roll(here, 4096), next_row, other_stream):
        assert abs((here * shifted).mean()) < bound
    # Box-Muller's two halves share a radius: uncorrelated even in their squares, if the angle is right.
    pairs = here[: size // 8192 * 8192].reshape(-1, 8, 2, 256)
    squares = pairs[:, :, 0] ** 2, pairs[:, :, 1] ** 2
    assert abs(np.corrcoef(squares[0].ravel(), squares[1].ravel())[0, 1]) < 2 * bound
