"""Normals of the random stream against the normal law: all of them, counted, and those drawn by rejection alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from dieharder import KEY, ROW
from numpy.typing import NDArray
from scipy import stats
from study import rounded

import dpcore_numpy.noise
import dpcore_torch.noise
from dpcore.spec import rounded_normal
from dpcore.spec.rounded_normal import FRACTION_BITS, LARGEST
from dpcore.spec.stream import Stream

BEYOND = (3.0, 4.0, 5.0, 5.5, 6.0, 6.5)
# Bins are 2^-16 wide, whole steps of the grid: none holds more than 6.1e-6 of the law.
BIN_BITS = 16
HALF = LARGEST << BIN_BITS
BINS = 2 * HALF
GROUPS = 10_000
LOW_BITS = 20
# What one draw is set beside: neighboring words of a block lie 256 lanes apart, and the next tile 4096.
LAGS = {"next element": 1, "next word of a block": 256, "next tile": 4096}


class Counts:
    """What is kept of the numbers: counts in bins and beyond bounds, sums of powers and of products."""

    def __init__(self) -> None:
        self.size = 0
        self.bins = np.zeros(BINS, dtype=np.int64)
        self.low = np.zeros(1 << LOW_BITS, dtype=np.int64)
        self.beyond = np.zeros(len(BEYOND), dtype=np.int64)
        self.largest = 0.0
        self.powers = np.zeros(4)
        self.products: dict[str, list[float]] = {}

    def add(self, z: torch.Tensor) -> torch.Tensor:
        """Count the numbers, and return them."""
        self.size += z.numel()
        k = np.rint(z.numpy() * 2.0**FRACTION_BITS).astype(np.int64)
        self.bins += np.bincount((k >> (FRACTION_BITS - BIN_BITS)) + HALF, minlength=BINS)
        self.low += np.bincount(k & ((1 << LOW_BITS) - 1), minlength=1 << LOW_BITS)
        size = z.abs()
        far = size[size > BEYOND[0]].numpy()
        self.beyond += [int((far > bound).sum()) for bound in BEYOND]
        self.largest = max(self.largest, float(far.max(initial=0.0)))
        square = z * z
        self.powers += [float(x) for x in (z.sum(), square.sum(), z @ square, square @ square)]
        return z

    def add_product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add up products of neighbors."""
        kept = self.products.setdefault(name, [0.0, 0])
        kept[0] += float(a.reshape(-1) @ b.reshape(-1))
        kept[1] += a.numel()


def count(rng: str, rounds: int, size: int) -> Counts:
    """Draw normals of backend "torch": of two neighboring rows, and of two streams of one of them."""
    counts = Counts()
    for i in range(rounds):
        places = [(ROW + 2 * i, Stream.GRADIENT), (ROW + 2 * i + 1, Stream.GRADIENT)]
        places.append((ROW + 2 * i, Stream.SECOND_MOMENT))
        draws = [dpcore_torch.noise.normal(KEY, *place, i * size, size, rng=rng) for place in places]
        here, next_row, other_stream = map(counts.add, draws)
        for name, lag in LAGS.items():
            counts.add_product(name, here[:-lag], here[lag:])
        # z^2 - 1 has variance 2: halved, the products have variance 1 like the others.
        square = here**2 - 1
        counts.add_product("squares of neighbors in a block", square[:-256] / 2, square[256:])
        counts.add_product("next row", here, next_row)
        counts.add_product("other stream", here, other_stream)
    return counts


def edges() -> NDArray[np.float64]:
    """Return the edges of the bins."""
    return np.arange(-HALF, HALF + 1) * 2.0**-BIN_BITS


def law(bins: NDArray[np.int64]) -> dict[str, Any]:
    """Return the Kolmogorov-Smirnov distance at the edges of all bins, and chi-square of groups of them."""
    n, expected = int(bins.sum()), stats.norm.cdf(edges()[1:])
    distance = float(np.abs(np.cumsum(bins) / n - expected).max())
    mass = np.diff(expected, prepend=0.0)
    group = np.minimum((expected * GROUPS).astype(np.int64), GROUPS - 1)
    likely, found = (np.bincount(group, weights=x, minlength=GROUPS) for x in (n * mass, bins))
    return {
        "kolmogorov_smirnov": rounded(distance),
        "kolmogorov_smirnov_p": rounded(stats.kstwobign.sf(distance * math.sqrt(n))),
        **chi_square(found, likely),
    }


def chi_square(found: NDArray[Any], likely: NDArray[Any]) -> dict[str, Any]:
    """Return Pearson's statistic of the cells that expect something, and its p-value."""
    kept = likely > 0
    square = float(((found - likely)[kept] ** 2 / likely[kept]).sum())
    degrees = int(kept.sum()) - 1
    return {
        "chi_square": rounded(square),
        "degrees_of_freedom": degrees,
        "chi_square_p": rounded(stats.chi2.sf(square, degrees)),
    }


def poisson(count: int, expected: float) -> dict[str, Any]:
    """Return the exact two-sided p-value of a count, and the counts that have 95 % of the probability."""
    p = 2 * min(float(stats.poisson.cdf(count, expected)), float(stats.poisson.sf(count - 1, expected)), 0.5)
    interval = [int(stats.poisson.ppf(q, expected)) for q in (0.025, 0.975)]
    return {"count": count, "expected": rounded(expected), "interval_95": interval, "p": rounded(p)}


def report(counts: Counts) -> dict[str, Any]:
    """Return what the counts say; moments and correlations in standard deviations of what the law gives them."""
    n = counts.size
    mean, deviation = (0, 1, 0, 3), np.sqrt([1, 2, 15, 96])
    moments = (counts.powers / n - mean) / (deviation / math.sqrt(n))
    return {
        "normals": n,
        **law(counts.bins),
        "lowest_20_bits": chi_square(counts.low, np.full(1 << LOW_BITS, n / (1 << LOW_BITS))),
        "beyond": {
            f"{bound:g}": poisson(int(seen), 2 * n * float(stats.norm.sf(bound)))
            for bound, seen in zip(BEYOND, counts.beyond, strict=True)
        },
        "largest": rounded(counts.largest),
        "moments": rounded(counts.powers / n),
        "moments_in_deviations": rounded(moments, 3),
        "correlations_in_deviations": {
            name: rounded(total / math.sqrt(terms), 3) for name, (total, terms) in counts.products.items()
        },
        "correlations_of": {name: int(terms) for name, (_, terms) in counts.products.items()},
    }


@contextmanager
def rest_alone() -> Iterator[float]:
    """Let every element be one of the few that are drawn by rejection; yield the mass that these have."""
    mass = 1 - sum(strip.box + strip.staircase for strip in rounded_normal.strips()) * 2.0**-24
    columns = np.full_like(rounded_normal.tables().columns, rounded_normal.REST)
    tables = rounded_normal.tables()._replace(columns=columns)
    with (
        patch.object(rounded_normal, "tables", lambda: tables),
        patch.object(dpcore_numpy.noise, "tables", lambda: tables),
    ):
        yield mass


def tail(tiles: int) -> dict[str, Any]:
    """Return how the numbers that are drawn by rejection fit the law beyond 5.5, where no others are.

    ``|z|`` exceeds t there with probability ``2 Q(t)`` over the mass of the rest.
    """
    with rest_alone() as mass:
        z = dpcore_numpy.noise.normal(KEY, ROW, Stream.GRADIENT, 0, 4096 * tiles)
    least = BEYOND[3]
    far = np.abs(z)[np.abs(z) > least]
    test = stats.kstest(far, lambda t: 1 - stats.norm.sf(t) / stats.norm.sf(least))
    return {
        "normals": z.size,
        "as_many_as": rounded(z.size / mass),
        "sizes": len(far),
        "size_kolmogorov_smirnov": rounded(test.statistic),
        "size_p": rounded(test.pvalue),
        "beyond": {
            f"{bound:g}": poisson(int((far > bound).sum()), z.size * 2 * float(stats.norm.sf(bound)) / mass)
            for bound in (5.5, 6.0, 6.5, 7.0)
        },
        "largest": rounded(far.max(initial=0.0)),
    }
