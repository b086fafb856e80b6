"""Direct checks besides the canaries: the noise on coordinates that nobody touches, and who took part in which step.

Each check returns a probability: how likely the planned mechanism shows something at least as unusual. In units of the
planned noise, untouched coordinates are independent standard normals.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betainc, chdtr, chdtrc, gammaln, logsumexp, ndtr

from dpcore.accounting import (
    CyclicPoissonSampledGaussian,
    Event,
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    TruncatedPoissonSampledGaussian,
)
from dpcore.accounting.phases import at_most, more_than
from dpcore.audit.canaries import Records, secret_batches
from dpcore.plan.plan import Plan

Floats = NDArray[np.float64]

# Values of independent noise this close are the same value.
_COPY = 1e-10


MEANING = {
    "noise": "There is less noise than planned",
    "repeated": "Noise of different steps or tensors is correlated, and should not be",
    "copied": "The same noise occurs in several places",
    "sums": "Sums of examples that are not canaries differ from the sums of their clipped vectors",
    "bits": "The bits of the adaptive clip are not released as planned",
    "once": "Examples take part more than once in an epoch",
    "rate": "Examples do not take part at the planned rate",
    "examples": "How often examples take part does not spread as independent coins do",
    "batches": "Batch sizes do not spread as independent coins do",
    "halves": "Batches prefer one half of the data set",
    "keys": "Runs of different keys have the same batches",
}


def failed(p_values: dict[str, float], level: float) -> list[str]:
    """Return a sentence for each check whose probability is at most `level`."""
    return [f"{MEANING[name]} (p = {p:.2g})." for name, p in p_values.items() if p <= level]


def too_little_noise(nulls: Floats) -> float:
    """Return the probability of noise as small as this at some step, or in all: chi-square, Bonferroni."""
    squares = (nulls**2).sum(axis=(1, 2))
    each = nulls.shape[1] * nulls.shape[2]
    smallest = min(float(chdtr(each, squares.min())), float(chdtr(squares.size * each, squares.sum())))
    return float(min(1.0, (squares.size + 1) * smallest))


def repeated_noise(nulls: Floats) -> float:
    """Return the probability of so large a correlation between two steps or two tensors, Bonferroni over all pairs.

    For independent standard normal vectors of D entries the squared cosine of their angle is Beta(1/2, (D - 1)/2).
    Noise that is absent counts as no correlation; `too_little_noise` sees it.
    """
    rows = nulls.reshape(-1, nulls.shape[2])
    if rows.shape[0] < 2:
        return 1.0
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = (rows @ rows.T) / np.maximum(norms * norms.T, 1e-300)
    largest = min(1.0, float(np.abs(cosines[np.triu_indices(rows.shape[0], 1)]).max()))
    pairs = rows.shape[0] * (rows.shape[0] - 1) / 2
    # Pr[cosine^2 >= c^2] from its complement, which does not cancel near 1.
    tail = float(betainc((rows.shape[1] - 1) / 2, 0.5, 1 - largest**2))
    return min(1.0, pairs * tail)


def copied_noise(silent: Floats) -> float:
    """Return the probability of as many values that occur twice, at any two places, in any two runs.

    Noise that is drawn again with a shift, or from a key that runs share, is no correlation of two rows. Two of N
    independent standard normals are within h of each other with probability at most h / sqrt(pi), so N values have at
    most N^2 h / (2 sqrt(pi)) such pairs on average; k of them or more have at most 1/k times that probability (Markov).
    Noise that is absent counts as none.
    """
    values = np.sort(silent[np.abs(silent) > _COPY])
    pairs = int(np.count_nonzero(np.diff(values) <= _COPY))
    return min(1.0, values.size**2 * _COPY / (2 * math.sqrt(math.pi)) / pairs) if pairs else 1.0


def wrong_sums(rest: Floats) -> float:
    """Return the probability that sums are as near to the clean ones, or as far from them, or as far to one side.

    `rest` (T, r) are the released sums of r runs less the clean ones: independent standard normals under the plan.
    Values that are not finite are left out.
    """
    values = rest[np.isfinite(rest)]
    if values.size == 0:
        return 1.0
    squares = float((values**2).sum())
    aside = 2 * float(ndtr(-abs(values.sum()) / math.sqrt(values.size)))
    whole = rest[np.isfinite(rest).all(axis=1)]
    again = repeated_noise(whole[:, None, :]) if rest.shape[1] > 2 else 1.0
    return min(1.0, 4 * min(float(chdtr(values.size, squares)), float(chdtrc(values.size, squares)), aside, again))


def wrong_rate(used: int, trials: int, sample_rate: float) -> float:
    """Return the two-sided probability of `used` heads, or a more extreme number, in `trials` equal coins."""
    return min(1.0, 2 * min(at_most(used, trials, sample_rate), more_than(used - 1, trials, sample_rate)))


def wrong_spread(counts: NDArray[np.int64], tosses: Any, sample_rate: float, *, low_only: bool = False) -> float:
    """Return the probability, at most, that heads in `tosses` coins each spread so little, or so much, two-sided.

    With `low_only` too small a spread only: valid for counts that repel each other, too.

    S is the sum of (count - k q)^2, each cut at w^2, so that no rare large term rules its expectation. By Chernoff,
    Pr[S >= s] <= E exp(h S - h s) for each h > 0, and Pr[S <= s] is at most the same for each h < 0. The expectation
    is that of independent binomials, exactly.
    """
    coins, times = np.unique(np.broadcast_to(tosses, counts.shape), return_counts=True)
    mean = float(times @ coins) * sample_rate * (1 - sample_rate)
    if mean == 0:
        return 1.0
    laws, total = [_squares(int(k), sample_rate) for k in coins], 0.0
    for k, (squares, _) in zip(coins, laws, strict=True):
        off = (counts[tosses == k] if np.ndim(tosses) else counts) - k * sample_rate
        total += float(np.minimum(off**2, squares[-1]).sum())

    def tail(sign: int) -> float:
        # From far wider than S spreads by chance to the width of one term.
        h = sign * np.geomspace(0.1, 10 * counts.size, 60)[:, None] / mean
        grown = [
            n * logsumexp(chances + h * squares, axis=1) for n, (squares, chances) in zip(times, laws, strict=True)
        ]
        return math.exp(min(0.0, float((sum(grown) - h[:, 0] * total).min())))

    return tail(-1) if low_only else min(1.0, 2 * min(tail(-1), tail(1)))


def _squares(coins: int, rate: float) -> tuple[Floats, Floats]:
    """Return the squares that a term of `wrong_spread` may be, w^2 last, and the logarithms of their probabilities."""
    mean = coins * rate
    width = 2 + 4 * math.sqrt(mean * (1 - rate))
    first, last = max(0, math.ceil(mean - width)), min(coins, math.floor(mean + width))
    heads = np.arange(first, last + 1)
    chosen = gammaln(coins + 1) - gammaln(heads + 1) - gammaln(coins - heads + 1)
    near = chosen + heads * math.log(rate) + (coins - heads) * math.log1p(-rate)
    far = at_most(first - 1, coins, rate) + more_than(last, coins, rate)
    return np.append((heads - mean) ** 2, width**2), np.append(near, math.log(far) if far else -math.inf)


def uneven_halves(early: NDArray[np.int64], sizes: NDArray[np.int64], populations: NDArray[np.int64]) -> float:
    """Return the probability that batches prefer one half of the data set so much, two-sided.

    Under sampling that treats all examples alike, a batch of a given size is a uniformly random subset: those of it
    that are of the first half are hypergeometric, and steps are independent. For them Hoeffding's bound for independent
    draws holds as well: a sum over batches is d or more from its mean with probability at most 2 exp(-2 d^2 / sum of
    the sizes) (Hoeffding 1963, section 6).
    """
    drawn = int(sizes.sum())
    if drawn == 0:
        return 1.0
    expected = float((sizes * (populations // 2) / np.maximum(populations, 1)).sum())
    return min(1.0, 2 * math.exp(-2 * (int(early.sum()) - expected) ** 2 / drawn))


def same_batches(batches: Sequence[str], log_chance: float) -> float:
    """Return the probability that as many pairs of runs have the same batches in all steps (Markov).

    `log_chance` is the logarithm of the probability of that, at most, for two runs of independent keys.
    """
    pairs = sum(count * (count - 1) // 2 for count in Counter(batches).values())
    every = len(batches) * (len(batches) - 1) / 2
    return min(1.0, every * math.exp(log_chance) / pairs) if pairs else 1.0


def direct_checks(plan: Plan, records: Records, dtype: str) -> dict[str, float]:
    """Return the probabilities of the observations under the plan."""
    chances = {"noise": too_little_noise(records.nulls), "repeated": repeated_noise(records.nulls)}
    if dtype == "float64":  # many float32 numbers are equal by chance
        chances["copied"] = copied_noise(records.silent)
    chances["sums"] = wrong_sums(records.sums)
    if plan.adaptive_clip is not None:
        chances["bits"] = wrong_sums(records.bits)
    event = plan.event
    if isinstance(event, RandomAllocationGaussian) and secret_batches(plan):
        examples = int(records.populations[0])
        chances["once"] = float((records.counts <= event.epochs).all())
        chances["halves"] = uneven_halves(records.early, records.sizes, records.populations)
        alike = -examples * (plan.steps // event.batches) * float(np.log(event.batches))
        chances["keys"] = same_batches(records.batches, alike)
        return chances
    coins = isinstance(event, PoissonSampledGaussian | CyclicPoissonSampledGaussian)
    if not secret_batches(plan) or not (
        coins or isinstance(event, FixedSizeSampledGaussian | TruncatedPoissonSampledGaussian)
    ):
        return chances
    rate = participation_rate(event, sample_rate(plan))
    chances["examples"] = wrong_spread(records.counts, records.tosses, rate, low_only=not coins)
    chances["halves"] = uneven_halves(records.early, records.sizes, records.populations)
    chances["keys"] = same_batches(records.batches, _log_chance(event, rate, records.populations[: plan.steps]))
    if coins:
        chances["rate"] = wrong_rate(int(records.counts.sum()), int(records.tosses.sum()), rate)
        chances["batches"] = wrong_spread(records.sizes, records.populations, rate)
    return chances


def participation_rate(event: Event, sample_rate: float) -> float:
    """Return the probability that an example is in a step in which it may be: less than the coin's if some are cut.

    A batch of min(Bin(n, q), B) is a uniformly random subset of its size, hence ``E min(Bin(n, q), B) / n``.
    """
    if not isinstance(event, TruncatedPoissonSampledGaussian):
        return sample_rate
    sizes = np.arange(event.max_batch_size)
    # E min(X, B) is the sum over k < B of Pr[X > k].
    return float(betainc(sizes + 1, event.dataset_size - sizes, event.sample_rate).sum()) / event.dataset_size


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
