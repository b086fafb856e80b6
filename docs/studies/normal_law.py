"""Normals of the random stream against the normal law: all of them, counted, and the far tail by itself."""

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
from dpcore.spec.stream import Stream

BEYOND = (3.0, 4.0, 5.0, 5.5, 6.0, 6.5)
# Bins of the numbers' own bits without the last twelve: edges are floats, and no bin holds more than 1.2e-4 of the law.
SHIFT = 12
BINS = 1 << (32 - SHIFT)
GROUPS = 10_000
# What one draw is set beside: z0 and z1 of a pair lie a word of 256 lanes apart, the next pair two, the next tile 4096.
LAGS = {"next element": 1, "next word: z0 and z1, or two pairs": 256, "next pair": 512, "next tile": 4096}


class Counts:
    """What is kept of the numbers: counts in bins and beyond bounds, sums of powers and of products."""

    def __init__(self) -> None:
        self.size = 0
        self.bins = np.zeros(BINS, dtype=np.int64)
        self.beyond = np.zeros(len(BEYOND), dtype=np.int64)
        self.largest = 0.0
        self.powers = np.zeros(4)
        self.products: dict[str, list[float]] = {}

    def add(self, z: torch.Tensor) -> torch.Tensor:
        """Count the numbers, and return them in float64."""
        self.size += z.numel()
        self.bins += np.bincount(z.numpy().view(np.uint32) >> SHIFT, minlength=BINS)
        size = z.abs()
        far = size[size > BEYOND[0]].numpy().astype(np.float64)
        self.beyond += [int((far > bound).sum()) for bound in BEYOND]
        self.largest = max(self.largest, float(far.max(initial=0.0)))
        wide = z.double()
        square = wide * wide
        self.powers += [float(x) for x in (wide.sum(), square.sum(), wide @ square, square @ square)]
        return wide

    def add_product(self, name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add up products of neighbors."""
        kept = self.products.setdefault(name, [0.0, 0])
        kept[0] += float(a.reshape(-1) @ b.reshape(-1))
        kept[1] += a.numel()


def count(rng: str, rounds: int, size: int) -> Counts:
    """Draw float32 normals of backend "torch": of two neighboring rows, and of two streams of one of them."""
    counts = Counts()
    for i in range(rounds):
        places = [(ROW + 2 * i, Stream.GRADIENT), (ROW + 2 * i + 1, Stream.GRADIENT)]
        places.append((ROW + 2 * i, Stream.SECOND_MOMENT))
        draws = [dpcore_torch.noise.normal(KEY, *place, i * size, size, rng=rng) for place in places]
        here, next_row, other_stream = map(counts.add, draws)
        for name, lag in LAGS.items():
            counts.add_product(name, here[:-lag], here[lag:])
        pairs = here[: size // 4096 * 4096].reshape(-1, 8, 2, 256)
        z0, z1 = pairs[:, :, 0], pairs[:, :, 1]
        counts.add_product("z0 and z1 of a pair", z0, z1)
        # z^2 - 1 has variance 2: halved, the products have variance 1 like the others.
        counts.add_product("squares of z0 and z1", (z0**2 - 1) / 2, z1**2 - 1)
        counts.add_product("next row", here, next_row)
        counts.add_product("other stream", here, other_stream)
    return counts


def edges() -> NDArray[np.float64]:
    """Return the lower edge in size of every bin: first those of positive numbers, then of negative ones."""
    bits = np.arange(BINS, dtype=np.uint32) << SHIFT
    with np.errstate(invalid="ignore"):  # the last bins of either sign are of no number
        return bits.view(np.float32).astype(np.float64)


def law(bins: NDArray[np.int64]) -> dict[str, Any]:
    """Return the Kolmogorov-Smirnov distance at the edges of all bins, and chi-square of groups of them."""
    lower, n = edges(), int(bins.sum())
    used = np.isfinite(lower)
    half = int(used[: BINS // 2].sum())
    positive, negative = lower[:half], lower[BINS // 2 :][:half]
    # From the least number to the largest: negative ones by falling size, then positive ones.
    counted = np.concatenate([bins[BINS // 2 :][:half][::-1], bins[:half]])
    if counted.sum() != n:
        raise RuntimeError("a normal number is not finite")
    expected = np.concatenate([stats.norm.cdf(negative[::-1]), stats.norm.cdf(np.append(positive[1:], np.inf))])
    distance = float(np.abs(np.cumsum(counted) / n - expected).max())
    mass = np.diff(expected, prepend=0.0)
    group = np.minimum((expected * GROUPS).astype(np.int64), GROUPS - 1)
    likely, found = (np.bincount(group, weights=x, minlength=GROUPS) for x in (n * mass, counted))
    kept = likely > 0
    square = float(((found - likely)[kept] ** 2 / likely[kept]).sum())
    degrees = int(kept.sum()) - 1
    return {
        "kolmogorov_smirnov": rounded(distance),
        "kolmogorov_smirnov_p": rounded(stats.kstwobign.sf(distance * math.sqrt(n))),
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
def cells_below(module: Any, cells: int) -> Iterator[None]:
    """Let each word that makes a radius be one of the lowest `cells`, a power of two: all else is the backend's own."""
    drawn = module.tile_blocks

    def lowest(*args: Any, tail: bool = False, **kwargs: Any) -> Any:
        blocks = drawn(*args, tail=tail, **kwargs)
        if not tail:
            blocks = blocks.copy()
            blocks[..., 0::2] &= np.uint32(cells - 1)
        return blocks

    with patch.object(module, "tile_blocks", lowest):
        yield


def tail(cells: int, tiles: int) -> dict[str, Any]:
    """Return how the numbers from the lowest `cells` of the 2^32 cells of u fit the law beyond their least size.

    u is uniform below ``h = cells 2^-32`` there: ``-ln(u / h)`` has the exponential law, and ``|z|`` exceeds
    ``t >= sqrt(-2 ln h)`` with probability ``2 Q(t) / h``.
    """
    share, found = cells * 2.0**-32, {}
    least = math.sqrt(-2 * math.log(share))
    for module, dtype in ((dpcore_numpy.noise, "float64"), (dpcore_torch.noise, "float32")):
        with cells_below(module, cells):
            z = np.asarray(module.normal(KEY, ROW, Stream.GRADIENT, 0, 4096 * tiles, dtype=dtype), dtype=np.float64)
        pairs = z.reshape(-1, 8, 2, 256)
        exponential = (pairs**2).sum(axis=2).reshape(-1) / 2 + math.log(share)
        far = np.abs(z)[np.abs(z) > least]
        exponential_test = stats.kstest(exponential, "expon")
        far_test = stats.kstest(far, lambda t: 1 - stats.norm.sf(t) / stats.norm.sf(least))
        found[dtype] = {
            "normals": z.size,
            "as_many_as": rounded(z.size / share),
            "least_size": rounded(least),
            "radius_kolmogorov_smirnov": rounded(exponential_test.statistic),
            "radius_p": rounded(exponential_test.pvalue),
            "sizes": len(far),
            "size_kolmogorov_smirnov": rounded(far_test.statistic),
            "size_p": rounded(far_test.pvalue),
            "beyond": {
                f"{bound:g}": poisson(int((far > bound).sum()), z.size * 2 * float(stats.norm.sf(bound)) / share)
                for bound in (5.5, 6.0, 6.5, 7.0, 7.5)
                if bound > least
            },
            "largest": rounded(far.max(initial=0.0)),
        }
    return found
