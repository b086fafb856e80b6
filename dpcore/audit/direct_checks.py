"""The direct checks of a plan's runs, and the sentences of those that fail."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtrc, gammaln

from dpcore.accounting import (
    CyclicPoissonSampledGaussian,
    Event,
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    TruncatedPoissonSampledGaussian,
)
from dpcore.audit import checks
from dpcore.audit.exposure import secret_batches
from dpcore.audit.records import Records
from dpcore.plan.plan import Plan

MEANING = {
    "noise": "There is less noise than planned",
    "repeated": "Noise of different steps or tensors is correlated, and should not be",
    "copied": "The same noise occurs in several places",
    "sums": "Sums of examples that are not canaries are not what their clipped vectors add up to",
    "bits": "The bits of the adaptive clip are not released as planned",
    "once": "Examples take part more than once in an epoch",
    "rate": "Examples do not take part at the planned rate",
    "examples": "How often examples take part does not spread as independent coins do",
    "batches": "Batch sizes do not spread as independent coins do",
    "halves": "Batches prefer one half of the data set",
    "keys": "Runs of different keys have the same batches",
}


def direct_checks(plan: Plan, records: Records, dtype: str) -> dict[str, float]:
    """Probabilities of what was seen, under the plan."""
    found = {"noise": checks.too_little_noise(records.nulls), "repeated": checks.repeated_noise(records.nulls)}
    if dtype == "float64":  # of float32 numbers many are equal by chance
        found["copied"] = checks.copied_noise(records.silent)
    found["sums"] = checks.wrong_sums(records.sums)
    if plan.adaptive_clip is not None:
        found["bits"] = checks.wrong_sums(records.bits)
    event = plan.event
    if isinstance(event, RandomAllocationGaussian) and secret_batches(plan):
        examples = int(records.populations[0])
        found["once"] = float((records.counts <= event.epochs).all())
        found["halves"] = checks.uneven_halves(records.early, records.sizes, records.populations)
        alike = -examples * (plan.steps // event.batches) * float(np.log(event.batches))
        found["keys"] = checks.same_batches(records.batches, alike)
        return found
    coins = isinstance(event, PoissonSampledGaussian | CyclicPoissonSampledGaussian)
    if not secret_batches(plan) or not (
        coins or isinstance(event, FixedSizeSampledGaussian | TruncatedPoissonSampledGaussian)
    ):
        return found
    rate = participation_rate(event, sample_rate(plan))
    found["examples"] = checks.wrong_spread(records.counts, records.tosses, rate, low_only=not coins)
    found["halves"] = checks.uneven_halves(records.early, records.sizes, records.populations)
    found["keys"] = checks.same_batches(records.batches, _log_chance(event, rate, records.populations[: plan.steps]))
    if coins:
        found["rate"] = checks.wrong_rate(int(records.counts.sum()), int(records.tosses.sum()), rate)
        found["batches"] = checks.wrong_spread(records.sizes, records.populations, rate)
    return found


def participation_rate(event: Event, sample_rate: float) -> float:
    """Return the probability that an example is in a step in which it may be: less than the coin's where some are cut.

    A batch of min(Bin(n, q), B) is a uniformly random subset of its size, hence ``E min(Bin(n, q), B) / n``.
    """
    if not isinstance(event, TruncatedPoissonSampledGaussian):
        return sample_rate
    sizes = np.arange(event.max_batch_size)
    # E min(X, B) is the sum over k < B of Pr[X > k].
    return float(bdtrc(sizes, event.dataset_size, event.sample_rate).sum()) / event.dataset_size


def _log_chance(event: Event, rate: float, populations: NDArray[np.int64]) -> float:
    """Return the logarithm of the probability, at most, that two runs have the same batches in all steps."""
    if isinstance(event, FixedSizeSampledGaussian):
        each = -_log_choose(event.dataset_size, event.batch_size)
    elif isinstance(event, TruncatedPoissonSampledGaussian):
        # The same coins, or two cut batches, each a uniformly random subset, that happen to be the same.
        q, n = event.sample_rate, event.dataset_size
        each = np.logaddexp(n * np.log(q**2 + (1 - q) ** 2), -_log_choose(n, event.max_batch_size))
    else:
        return float(np.log(rate**2 + (1 - rate) ** 2) * populations.sum())
    return float(each * populations.size)


def _log_choose(n: int, k: int) -> float:
    return float(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def sample_rate(plan: Plan) -> float:
    """Return the probability with which a step draws an example that may be in it, before any are cut."""
    rate = getattr(plan.event, "sample_rate", plan.sampler.expected_batch_size / plan.sampler.dataset_size)
    return float(rate)
