"""The audit: runs with canaries, scores, a test of the claim, and direct checks of noise and batches.

What the result rests on
------------------------
**A flag** says that the run is not the planned one. Its false-alarm rate is at most 1 - confidence, and that needs
nothing but the plan: under the planned mechanism, with vectors that do not depend on earlier releases, canaries on
orthogonal coordinates meet independent noise, and each has a fair coin of its own; so, given public batches or under
Poisson sampling, their scores are independent of each other. Half of 1 - confidence belongs to the canaries, half is
shared equally by the direct checks. Sampling of a fixed size draws canaries without replacement: they repel each other,
and counts spread slightly less than the binomials that bound them; ``canaries=1`` makes every canary a run of its own.

**The lower bound** as a number holds for whatever mechanism really ran, if guesses about different canaries are
independent of each other given the coins. Privacy does not imply that, and a broken mechanism may lack it.
``canaries=1`` with many runs needs no such assumption. (What one run with many canaries can show of any mechanism at
all: Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", 2023.) Where the event is Gaussian as a
whole, the bound also assumes that what ran is Gaussian. The threshold is chosen on every other canary and the errors
are counted on the rest, so that nothing is tested twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri

from dpcore import accounting
from dpcore.accounting import Adjacency, Event
from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.accounting.phases import phases
from dpcore.audit.canaries import (
    CanaryRun,
    MakeMechanism,
    Records,
    Releases,
    Step,
    joined,
    noisy_bits,
    records,
    secret_batches,
    take_all,
)
from dpcore.audit.checks import direct_checks, failed, sample_rate
from dpcore.audit.result import AuditResult
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.mechanism.loop import private_step
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import Sampler
from dpcore.spec.backends import load_backend
from dpcore.spec.check import check_dtype
from dpcore.spec.keys import RunKeys
from dpcore.spec.stream import Stream, check_key, derive_key, new_key
from dpcore.spec.validate import choice, integer, open_unit
from dpcore.stages.method import Method

# A lower bound on epsilon from counts of right and wrong guesses.
#
# An adversary guesses "in" where a canary's score exceeds a threshold. Let FPR be the probability of that for a canary
# that is out, FNR the probability of "out" for one that is in. A mechanism that is (epsilon, delta)-private allows
#
#     1 - FNR <= e^epsilon FPR + delta    and, with the two data sets exchanged,    1 - FPR <= e^epsilon FNR + delta
#
# (Kairouz, Oh, Viswanath 2015, Theorem 2.1), so that upper bounds on FPR and FNR give a lower bound on epsilon,
#
#     epsilon >= max(log((1 - delta - FNR) / FPR), log((1 - delta - FPR) / FNR)).
#
# The bounds are those of Clopper and Pearson: for k errors among n independent guesses, the p at which k or fewer
# errors have probability alpha, ``Pr[Bin(n, p) <= k] = I_{1-p}(n - k, k + 1) = alpha``.
#
# What a claim allows is its trade-off function: the largest power 1 - FNR at each FPR. A Gaussian mechanism with
# parameter mu allows exactly ``Phi(Phi^{-1}(FPR) + mu)`` (Dong, Roth, Su 2022, eq. 6); read backwards, counts bound the
# mu of a mechanism known to be Gaussian from below by ``Phi^{-1}(1 - FNR) - Phi^{-1}(FPR)`` (Nasr et al., "Tight
# Auditing of Differentially Private Machine Learning", 2023, section 4). Any other event allows at most what its
# delta(epsilon) does, at every epsilon at once:
#
#     power <= min over epsilon of  min(e^epsilon FPR + delta(epsilon), 1 - e^-epsilon (1 - delta(epsilon) - FPR)).


Floats = NDArray[np.float64]

# Probabilities are kept this far from 0 and 1, where the normal quantile is infinite.
_EDGE = 1e-15


@dataclass(frozen=True)
class Errors:
    """Guesses about canaries at one threshold, or at several.

    The upper bounds on both error rates hold together, but with probability `alpha`.
    """

    false_positives: Any
    outs: int
    false_negatives: Any
    ins: int
    alpha: float

    @property
    def fpr(self) -> Any:
        """Upper bound on the false positive rate."""
        return clopper_pearson_upper(self.false_positives, self.outs, self.alpha / 2)

    @property
    def fnr(self) -> Any:
        """Upper bound on the false negative rate."""
        return clopper_pearson_upper(self.false_negatives, self.ins, self.alpha / 2)

    @property
    def mu(self) -> Any:
        """Lower bound on mu of a Gaussian mechanism, 0 or more."""
        return np.maximum(0.0, -_quantile(self.fnr) - _quantile(self.fpr))

    def epsilon(self, delta: float) -> float:
        """Lower bound on the epsilon at `delta` of any mechanism, 0 or more."""
        fpr, fnr = float(self.fpr), float(self.fnr)
        ratios = [(1 - delta - fnr) / fpr, (1 - delta - fpr) / fnr]
        return max([0.0, *(math.log(ratio) for ratio in ratios if ratio > 0)])


@dataclass(frozen=True)
class Claim:
    """What an event says an adversary can do.

    `mu` is that of the Gaussian mechanism that the event is as a whole; where batches are drawn in secret there are
    points of its privacy curve instead, certified upper bounds.
    """

    event: Event
    mu: float | None
    epsilons: Floats
    deltas: Floats

    @classmethod
    def of(cls, event: Event, largest_epsilon: float, points: int = 16) -> Claim:
        """Evaluate the claim of an event at `points` epsilons up to `largest_epsilon`."""
        found = phases(event)
        if found is not None and not found.steps:
            return cls(event, found.mu, np.empty(0), np.empty(0))
        epsilons = np.linspace(0, max(largest_epsilon, 0.1), points)
        return cls(event, None, epsilons, np.array(_deltas(event, tuple(epsilons.tolist()))))

    def power(self, fpr: Any) -> Any:
        """Return the largest true positive rate that the claim allows at these false positive rates."""
        fpr = np.asarray(fpr, dtype=np.float64)
        if self.mu is not None:
            return ndtr(_quantile(fpr) + self.mu)
        grown, shrunk = np.exp(self.epsilons), np.exp(-self.epsilons)
        alpha = fpr[..., None]
        bounds = np.minimum(alpha * grown + self.deltas, 1 - shrunk * (1 - self.deltas - alpha))
        return np.clip(bounds.min(axis=-1), 0.0, 1.0)

    def excess(self, errors: Errors) -> Any:
        """Return by how much the errors' certified power exceeds the claim's, in normal quantiles; positive refutes."""
        return -_quantile(errors.fnr) - _quantile(self.power(errors.fpr))


@lru_cache(maxsize=16)
def _deltas(event: Event, epsilons: tuple[float, ...]) -> tuple[float, ...]:
    names = accounting.accountants_for(event)
    return tuple(min(accounting.delta(event, epsilon, name) for name in names) for epsilon in epsilons)


def clopper_pearson_upper(count: Any, total: int, alpha: float) -> Any:
    """Return the upper end of a one-sided confidence interval for a probability; 1 where nothing was counted."""
    count = np.asarray(count)
    # I_p(k + 1, n - k) = Pr[Bin(n, p) > k] = 1 - alpha.
    inside = np.minimum(count, max(total - 1, 0))
    bound = betaincinv(inside + 1.0, np.maximum(total - inside, 1.0), 1 - alpha)
    return np.where(count >= total, 1.0, bound)


def best_threshold(ins: Floats, outs: Floats, claim: Claim, alpha: float) -> float:
    """Return the threshold at which scores exceed a claim the most; these scores are not to be counted again."""
    scores = np.sort(np.concatenate([ins, outs]))
    middles = np.unique((scores[1:] + scores[:-1]) / 2) if scores.size > 1 else np.zeros(1)
    errors = count_errors(ins, outs, middles, alpha)
    excess = np.asarray(claim.excess(errors))
    best = np.flatnonzero(excess >= excess.max() - 1e-12)
    return float(middles[best[best.size // 2]])


def count_errors(ins: Floats, outs: Floats, threshold: Any, alpha: float) -> Errors:
    """Return the errors of guessing "in" above a threshold, or above each of several."""
    positives = outs.size - np.searchsorted(np.sort(outs), threshold, side="right")
    negatives = np.searchsorted(np.sort(ins), threshold, side="right")
    return Errors(positives, outs.size, negatives, ins.size, alpha)


def _quantile(probability: Any) -> Any:
    return ndtri(np.clip(probability, _EDGE, 1 - _EDGE))


FLAT = ("first.weight", "second.weight")
GROUPED = ("first.weight", "first.bias", "second.weight", "second.bias")

# Values of all runs together on untouched coordinates, for each row of noise.
_UNTOUCHED = 2048

_MOST_DRAWS = 1e11  # some minutes of coins

GAUSSIAN = "guesses about different canaries are independent, and what ran is a Gaussian mechanism, as the plan's is"
ANY = "guesses about different canaries are independent"


def audit(
    method: Method,
    sampler: Sampler,
    steps: int,
    *,
    delta: float,
    canaries: int = 128,
    runs: int = 32,
    confidence: float = 0.99,
    tensors: Sequence[str] | None = None,
    key: bytes | None = None,
    dtype: str = "float64",
    make_mechanism: MakeMechanism = Mechanism,
    step: Step = private_step,
) -> AuditResult:
    """Put canaries through real runs of a method, and bound its epsilon from below.

    Parameters
    ----------
    method : Method
        With a noise multiplier above 0.
    sampler, steps : Sampler, int
        Of the run that is audited.
    delta : float
        Where epsilon is compared; 0 < delta < 1.
    canaries, runs : int
        Canaries in each run (at most dataset_size), and runs of fresh keys; at least 64 canaries in all together.
    confidence : float
        1 minus the probability of a false alarm.
    tensors : sequence of str, optional
        Names of tensors, for clipping groups given by name.
    key : bytes, optional
        32 bytes from which coins, noise and batches of all runs follow, for a repeatable audit; otherwise the operating
        system's.
    dtype : str
        "float64" or "float32", of the parameters.
    make_mechanism, step : callable
        Called as `dpcore.mechanism.mechanism.Mechanism` and `private_step` are: mechanism and loop that are audited.

    Returns
    -------
    AuditResult

    Raises
    ------
    ArgumentError
        For numbers that do not fit, and for a plan that claims nothing (no noise, a noiseless second moment).
    PrivacyError
        If no accountant covers the plan.
    """
    if not isinstance(method, Method):
        raise ArgumentTypeError(f"method={method!r}: must be a dpcore.Method, as dpcore.methods.dp_sgd(...) returns")
    if isinstance(tensors, str):
        raise ArgumentTypeError(f"tensors={tensors!r}: must be a sequence of names, such as ('layer.weight',)")
    names = tuple(tensors or (FLAT if method.clip.groups == "flat" else GROUPED))
    plan = Plan(method, sampler, steps, names)
    delta, confidence = open_unit(delta=delta), open_unit(confidence=confidence)
    canaries = min(integer(1, canaries=canaries), sampler.dataset_size)
    runs = integer(1, runs=runs)
    choice(("float32", "float64"), dtype=dtype)
    check_dtype(load_backend(), dtype, "audit")
    draws = getattr(sampler, "example_count", sampler.dataset_size) * steps * runs
    if draws > _MOST_DRAWS:
        raise ArgumentError(
            f"dataset_size * steps * runs = {draws:.3g}: must be at most {_MOST_DRAWS:.0e}, or the audit "
            "takes hours; a smaller data set at the same sample rate has the same claim"
        )
    if canaries * runs < 64:
        raise ArgumentError(
            f"runs={runs}: {canaries} canaries in each give {canaries * runs} in all; must be at least 64 in all"
        )
    plan.check_covered()
    claimed = plan.epsilon(delta)
    if not math.isfinite(claimed):
        raise ArgumentError("method: its plan claims nothing (epsilon is infinite), so there is nothing to audit")
    if key is not None:
        check_key(key)
    secret = new_key() if key is None else key
    rows = steps * (2 if plan.square_noise_standard_deviation() else 1)
    untouched = max(16, -(-max(_UNTOUCHED, 4 * rows) // (runs * len(names))))

    def canary_run(run: int) -> CanaryRun:
        return CanaryRun(
            plan,
            RunKeys.new(derive_key(secret, f"dpcore audit run {run}"), exact_key=True),
            coins(secret, run, canaries),
            untouched=untouched,
            dtype=dtype,
            make_mechanism=make_mechanism,
            step=step,
        )

    found = []
    for run in range(runs):
        one = canary_run(run)
        releases = take_all(one)
        found.append(records(one, releases))
        if run == 0 and not ends_as(one, canary_run(run)):
            found[0] = replace(found[0], surprises=(*found[0].surprises, UNSEEN))
        if run == 0 and not follows_from_releases(one, releases, canary_run(run)):
            found[0] = replace(found[0], surprises=(*found[0].surprises, MORE))
    return _judged(plan, joined(found), claimed, delta, confidence, dtype)


def coins(key: bytes, run: int, size: int) -> NDArray[np.bool_]:
    """Return fair coins that follow from a key and a number."""
    words = load_backend("numpy").words(derive_key(key, "dpcore audit coins"), run, Stream.SAMPLING, 0, size)
    return np.asarray(words % 2 == 1)


def _judged(plan: Plan, records: Records, claimed: float, delta: float, confidence: float, dtype: str) -> AuditResult:
    alpha = 1 - confidence
    p_values = direct_checks(plan, records, dtype)
    level = alpha / 2 / len(p_values)
    findings = [*failed(p_values, level), *records.surprises]
    values = _scores(plan, records, p_values, level)
    claim = Claim.of(plan.event, claimed)
    chosen = np.arange(values.size) % 2 == 0
    ins = records.coins
    threshold = best_threshold(values[chosen & ins], values[chosen & ~ins], claim, alpha / 2)
    errors = count_errors(values[~chosen & ins], values[~chosen & ~ins], threshold, alpha / 2)
    any_mechanism = errors.epsilon(delta)
    bound, assumes = any_mechanism, ANY
    if claim.mu is not None and gaussian_epsilon(float(errors.mu), delta) > any_mechanism:
        bound, assumes = gaussian_epsilon(float(errors.mu), delta), GAUSSIAN
    allowed = float(claim.power(errors.fpr))
    if float(claim.excess(errors)) > 0:
        findings.insert(
            0,
            f"Canaries were told apart with a power of at least {1 - float(errors.fnr):.3g} at a false positive rate "
            f"of at most {float(errors.fpr):.3g}, where the claim allows {allowed:.3g}.",
        )
    elif bound > claimed:
        findings.insert(0, "The lower bound exceeds the claim.")
    return AuditResult(
        claimed_epsilon=claimed,
        lower_bound=bound,
        lower_bound_any=any_mechanism,
        delta=delta,
        confidence=confidence,
        flagged=bool(findings),
        findings=tuple(findings),
        assumes=assumes,
        canaries_in=errors.ins,
        canaries_out=errors.outs,
        false_positive_rate=float(errors.fpr),
        false_negative_rate=float(errors.fnr),
        power=1 - float(errors.fnr),
        claimed_power=allowed,
        noise_ratio=float(np.sqrt((records.nulls**2).mean())),
        p_values=p_values,
        method=plan.method.name,
    )


def _scores(plan: Plan, records: Records, p_values: dict[str, float], level: float) -> NDArray[np.float64]:
    correlated = p_values["repeated"] <= level
    if correlated or p_values["noise"] <= level:
        records = whitened(records, correlated)
    if not secret_batches(plan):
        return known_participation(records)
    if correlated:
        return any_participation(records)
    return secret_participation(records, sample_rate(plan), plan.event.adjacency is Adjacency.REPLACE_ONE)


MORE = "The parameters are no function of the releases: something else of the data moves them."
UNSEEN = "Steps that nobody observes move the parameters elsewhere than steps that are recorded."


def ends_as(run: CanaryRun, unseen: CanaryRun) -> bool:
    """Whether a run of the same keys and coins, taken now with nobody observing, ends at the same parameters.

    What is observed runs as separate operations; in training one fused operation takes the step, and what it adds is
    not seen in the releases.
    """
    for _ in range(run.plan.steps):
        unseen.step()
    return _same(run, unseen)


def follows_from_releases(run: CanaryRun, releases: Releases, empty: CanaryRun) -> bool:
    """Whether a run with no data, whose noise is the releases of `run`, ends at the same parameters.

    Its steps release the very same vectors, so what is a function of the releases is the same. A filter, a second
    moment or a loop that has the clean sum from elsewhere is not.
    """
    mechanism, backend = empty.mechanism, empty.mechanism.backend
    norms, plan = run.mechanism.clip_norms, run.plan

    def normals(row: int, stream: int) -> list[Any]:
        if stream == Stream.CLIP_BOUND:
            assert norms is not None
            return [np.array([noisy_bits(plan, norms[row], norms[row + 1]) / plan.bit_noise_standard_deviation])]
        white = releases.white[int(stream == Stream.SECOND_MOMENT), row]
        return [backend.from_numpy(vector.astype(run.dtype)) for vector in white]

    release = mechanism.release

    def released(*arguments: Any, **named: Any) -> None:
        release(*arguments, **{**named, "normals": normals})

    mechanism.release = released  # type: ignore[method-assign]
    empty.amount[:] = 0
    for _ in range(plan.steps):
        empty.step()
    return _same(run, empty)


def _same(run: CanaryRun, other: CanaryRun) -> bool:
    tolerance = 1e-6 if run.dtype == np.float64 else 1e-2
    return all(
        np.allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(a[np.isfinite(a)]).max(initial=0), equal_nan=True)
        for a, b in zip(run.values(), other.values(), strict=True)
    )


# Scores: how much a canary's releases speak for "in".
#
# In units of the planned noise the releases x of one canary are N(s, I) with s = A p: column A_t is what it adds if it
# takes part in step t, p_t says whether it does. Any score gives a valid lower bound; the likelihood ratio the
# best one.
#
# - Batches are public: p is known, ``log N(x; s)/N(x; 0)`` grows with s.x, and s.x/|s| is normal with variance 1 and
#   mean |s| or 0: the matched filter.
# - Each of some steps draws it with probability q, and their columns are orthogonal:
#   ``sum_t log(1 - q + q exp(A_t.x - |A_t|^2/2))``.
# - Replace-one: "out" has -s instead of 0, and the ratio to it is taken.
#
# An adversary who sees on untouched coordinates that the noise is not as planned uses the noise that there is: releases
# are then first multiplied by the inverse root of its measured covariance (steps by steps). Untouched coordinates do
# not depend on the coins, so neither does this choice.


# Noise below this, relative to the planned variance, is none.
_NO_NOISE = 1e-12


def known_participation(records: Records) -> Floats:
    """Return the matched filter's outputs, (m,); 0 for a canary that never takes part."""
    added = records.signal @ records.participation
    norms = np.linalg.norm(added, axis=0)
    return np.asarray((added * records.canaries).sum(axis=0) / np.where(norms > 0, norms, 1.0))


def secret_participation(records: Records, sample_rate: float, replaced: bool) -> Floats:
    """Return log-likelihood ratios where each possible step draws a canary with one probability, (m,)."""
    along = records.signal.T @ records.canaries
    size = (records.signal**2).sum(axis=0)[:, None]
    step = _log_ratio(along, size, sample_rate)
    if replaced:
        step = step - _log_ratio(-along, size, sample_rate)
    return np.asarray((step * records.possible).sum(axis=0))


def _log_ratio(along: Floats, size: Floats, q: float) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-q), np.log(q) + along - size / 2))


def any_participation(records: Records) -> Floats:
    """Return the matched filter's outputs as if a canary took part in every possible step, (m,)."""
    return np.asarray(((records.signal @ records.possible) * records.canaries).sum(axis=0))


def whitened(records: Records, correlated: bool) -> Records:
    """Return the records in units of the noise on untouched coordinates, `correlated` between steps or not."""
    rows = records.nulls.reshape(records.nulls.shape[0], -1)
    covariance = rows @ rows.T / rows.shape[1]
    if not correlated:
        covariance = np.diag(np.diag(covariance))
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors / np.sqrt(np.maximum(values, _NO_NOISE))) @ vectors.T
    return replace(
        records,
        canaries=root @ records.canaries,
        nulls=np.tensordot(root, records.nulls, 1),
        signal=root @ records.signal,
    )
