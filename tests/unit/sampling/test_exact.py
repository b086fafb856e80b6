"""Samplers on tiny data sets, all batches with their exact probabilities: no step tells more than its event says."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dpcore import accounting, methods
from dpcore.accounting import Adjacency
from dpcore.plan.plan import Plan
from dpcore.sampling import CyclicPoissonSampler, FixedSizeSampler, PoissonSampler, TruncatedPoissonSampler, draw
from dpcore.stages.clipping import AdaptiveClip

KEY = bytes(range(32))
Law = dict[tuple[int, ...], Fraction]

SAMPLERS: dict[str, Callable[[int], Any]] = {
    "poisson": lambda n: PoissonSampler(dataset_size=n, sample_rate=0.3),
    "mostly everybody": lambda n: PoissonSampler(dataset_size=n, sample_rate=0.9),
    "cut to two": lambda n: TruncatedPoissonSampler(dataset_size=n, sample_rate=0.4, max_batch_size=2),
    "cut to one": lambda n: TruncatedPoissonSampler(dataset_size=n, sample_rate=0.2, max_batch_size=1),
    "fixed size": lambda n: FixedSizeSampler(dataset_size=n, batch_size=2),
    "cyclic": lambda n: CyclicPoissonSampler(dataset_size=n, batch_size=1, groups=2, shuffle=False),
}


def law(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> Law:
    """The exact law of step 0: all words next to the threshold, and all orders of the sort keys behind them."""
    n = sampler.dataset_size

    def batch(words: list[int]) -> tuple[int, ...]:
        padded = np.array([*words, *[0] * (3 * n)], np.uint32)
        monkeypatch.setattr(draw, "row_words", lambda key, row: lambda start, size: padded[start : start + size])
        return tuple(sampler.indices(KEY, 0).tolist())

    def cases() -> Iterator[tuple[list[int], Fraction]]:
        if isinstance(sampler, FixedSizeSampler):
            for keys in itertools.permutations(range(n)):
                yield list(keys), Fraction(1, math.factorial(n))
            return
        heads = Fraction(sampler.sample_rate)
        threshold = heads * 2**32
        assert threshold.denominator == 1
        tossed = sampler.group(0).size if isinstance(sampler, CyclicPoissonSampler) else n
        for coins in itertools.product((0, 1), repeat=tossed):
            words = [int(threshold) - coin for coin in coins]
            chance = heads ** sum(coins) * (1 - heads) ** (tossed - sum(coins))
            orders = [()]
            if isinstance(sampler, TruncatedPoissonSampler) and sum(coins) > sampler.max_batch_size:
                orders = list(itertools.permutations(range(sum(coins))))
            for keys in orders:
                yield [*words, *keys], chance / len(orders)

    found: Law = defaultdict(Fraction)
    for words, chance in cases():
        found[batch(words)] += chance
    assert sum(found.values()) == 1
    return found


def density(chances: Law, vectors: np.ndarray, scales: np.ndarray, grids: list[np.ndarray]) -> np.ndarray:
    """The density of sum + noise on a grid of two coordinates."""
    total: Any = 0.0
    for batch, chance in chances.items():
        center = vectors[list(batch)].sum(axis=0)
        first, second = (
            np.exp(-(((grid - c) / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi))
            for grid, c, s in zip(grids, center, scales, strict=True)
        )
        total = total + float(chance) * np.outer(first, second)
    return total


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("name", SAMPLERS)
def test_no_step_tells_more_than_its_event_says(name: str, adaptive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, sigma = 4, 0.8
    sampler = SAMPLERS[name](n)
    clip = AdaptiveClip(bit_noise_std=0.7) if adaptive else None
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=sigma, adaptive_clip=clip), sampler, 1)
    # Clipped vectors of one coordinate, and bits; example 0 is the one that the neighbors differ in.
    vectors = np.array([[1.0, 0.5], [1.0, -0.5], [-1.0, 0.5], [0.3, 0.5]]) * [1, adaptive]
    scales = np.array([plan.noise_standard_deviation(), plan.bit_noise_standard_deviation or 1.0])
    chances = law(sampler, monkeypatch)
    others, theirs = chances, vectors.copy()
    if sampler.adjacency is Adjacency.ADD_REMOVE:
        others, theirs = law(SAMPLERS[name](n - 1), monkeypatch), vectors[1:]
    else:
        theirs[0] = 0.0 if sampler.adjacency is Adjacency.ZERO_OUT else -vectors[0]
    # Without bits the second coordinate is one point, weighted as if it were integrated over.
    points = np.linspace(-3 - 8 * scales[1], 3 + 8 * scales[1], 601) if adaptive else np.zeros(1)
    grids = [np.linspace(-4 - 8 * scales[0], 4 + 8 * scales[0], 801 if adaptive else 20_001), points]
    cell = (grids[0][1] - grids[0][0]) * (points[1] - points[0] if adaptive else scales[1] * math.sqrt(2 * math.pi))
    one = density(chances, vectors, scales, grids)
    other = density(others, theirs, scales, grids)
    closest = 0.0
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        covering = accounting.accountants_for(plan.event)
        claimed = min(accounting.delta(plan.event, epsilon, accountant) for accountant in covering)
        for p, q in ((one, other), (other, one)):
            shown = float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * cell)
            assert shown <= claimed * (1 + 1e-3) + 1e-6
            closest = max(closest, shown / claimed)
    assert closest > 0.5  # the event is not merely huge
