"""The audit of a method: runs with canaries, scores and guesses, and direct checks of noise and batches.

Basis of the result
-------------------
**A flag** says that the run is not the planned one. Its false-alarm rate is at most 1 - confidence, and that needs
nothing but the plan: under the planned mechanism, with vectors that do not depend on earlier releases, canaries on
orthogonal coordinates meet independent noise, and each has a fair coin of its own; so, given public batches or under
Poisson sampling, their scores are independent of each other. Given all earlier guesses the next one is therefore right
as seldom as the claim allows, which is what its bet needs (`dpcore.audit.verdict`). Sampling of a fixed size draws
canaries without replacement: given the coins, right guesses grow with a canary's own draws, which are negatively
associated, and so the expectation of the product of their bets is at most that of independent ones (Joag-Dev, Proschan
1983) under a threshold that is fixed. ``canaries=1`` makes every canary a run of its own.

**The lower bound** as a number holds for any mechanism that really ran, if guesses about different canaries are
independent of each other given the coins. Privacy does not imply that, and a broken mechanism may lack it.
``canaries=1`` with many runs needs no such assumption. (For what one run with many canaries can show of any mechanism,
see Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", 2023.) If the event is Gaussian as a whole,
the bound also assumes that the real mechanism is Gaussian.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dpcore import accounting
from dpcore.accounting import Adjacency, Event
from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.accounting.phases import phases
from dpcore.audit.canaries import CanaryRun, MakeMechanism, Records, Step, joined, noisy_bits, records, secret_batches
from dpcore.audit.checks import direct_checks, sample_rate
from dpcore.audit.verdict import AuditResult, RatioBound, judged, level_of
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

Floats = NDArray[np.float64]

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
        Steps of the audited run.
    delta : float
        The delta at which epsilons are compared; 0 < delta < 1.
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
    names = tuple(tensors if tensors is not None else ()) or (FLAT if method.clip.groups == "flat" else GROUPED)
    plan = Plan(method, sampler, steps, names)
    delta, confidence = open_unit(delta=delta), open_unit(confidence=confidence)
    canaries = min(integer(1, canaries=canaries), sampler.dataset_size)
    runs = integer(1, runs=runs)
    choice(("float32", "float64"), dtype=dtype)
    check_dtype(load_backend(), dtype, "audit")
    draws = sampler.example_count * steps * runs
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

    recorded = []
    for run in range(runs):
        one = canary_run(run)
        recorded.append(records(one))
        if run == 0 and not ends_as(one, canary_run(run)):
            recorded[0] = replace(recorded[0], surprises=(*recorded[0].surprises, UNSEEN))
        if run == 0 and not follows_from_releases(one, canary_run(run)):
            recorded[0] = replace(recorded[0], surprises=(*recorded[0].surprises, MORE))
    return _judged(plan, joined(recorded), claimed, delta, confidence, dtype)


def coins(key: bytes, run: int, size: int) -> NDArray[np.bool_]:
    """Return fair coins that follow from a key and a number."""
    words = load_backend("numpy").words(derive_key(key, "dpcore audit coins"), run, Stream.SAMPLING, 0, size)
    return np.asarray(words % 2 == 1)


def _judged(plan: Plan, records: Records, claimed: float, delta: float, confidence: float, dtype: str) -> AuditResult:
    p_values = direct_checks(plan, records, dtype)
    scores = _scores(plan, records, p_values, level_of(confidence, p_values))
    (mu, gaussian), bound = claimed_mu(plan.event, claimed, delta), RatioBound((1 - confidence) / 2)
    bound.add(guesses(scores, records.coins), mu)
    lower, assumes = bound.epsilon(delta), ANY
    if gaussian and gaussian_epsilon(bound.lower * mu, delta) > lower:
        lower, assumes = gaussian_epsilon(bound.lower * mu, delta), GAUSSIAN
    return judged(
        plan,
        bound,
        p_values,
        records.surprises,
        delta=delta,
        confidence=confidence,
        claimed_epsilon=claimed,
        lower_bound=lower,
        canaries=scores.size,
        steps=plan.steps,
        noise_ratio=float(np.sqrt((records.nulls**2).mean())),
        assumes=assumes,
    )


def claimed_mu(event: Event, epsilon: float, delta: float) -> tuple[float, bool]:
    """Return the mu of the Gaussian mechanism that an event is as a whole, or of one that allows as many right guesses.

    The second value says which. If batches are drawn in secret, the accountants' delta at epsilon 0 bounds the share of
    right guesses, and so does the claim itself: ``(e^epsilon + delta) / (1 + e^epsilon)`` (`dpcore.audit.verdict`).
    """
    parts = phases(event)
    if parts is not None and not parts.steps:
        return parts.mu, True
    apart = min(accounting.delta(event, 0.0, name) for name in accounting.accountants_for(event))
    right = min((1 + apart) / 2, 1 - (1 - delta) / (1 + math.exp(min(epsilon, 700.0))))
    return 2 * float(ndtri(min(right, 1 - 1e-15))), False


def guesses(scores: Floats, coins: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which guesses are right, in the canaries' order. A guess is "in" if the score is above a threshold.

    The threshold is 0, which is best under the plan. After 64, 128, 256, ... canaries another one is taken if it would
    have made more guesses right among those seen, by more than the square root of their number.
    """
    right = np.empty(scores.size, bool)
    start, stop, threshold = 0, 64, 0.0
    while start < scores.size:
        right[start:stop] = (scores[start:stop] > threshold) == coins[start:stop]
        start, stop = stop, 2 * stop
        order = np.argsort(scores[:start])
        seen, ins = scores[order], coins[order]
        # Of those up to each score the outs are right, and of those above it the ins.
        counts = np.cumsum(~ins) - np.cumsum(ins) + ins.sum()
        best = np.flatnonzero(counts[:-1] == counts[:-1].max())
        place = best[best.size // 2]
        clearly = counts[place] - ((seen > 0) == ins).sum() > np.sqrt(seen.size)
        threshold = float(seen[place] + seen[place + 1]) / 2 if clearly else 0.0
    return right


def _scores(plan: Plan, records: Records, p_values: dict[str, float], level: float) -> Floats:
    correlated = p_values["repeated"] <= level
    if correlated or p_values["noise"] <= level:
        records = whitened(records, correlated)
    replaced = plan.event.adjacency is Adjacency.REPLACE_ONE
    if not secret_batches(plan):
        return matched_filter(records, records.participation, replaced)
    if correlated:
        return matched_filter(records, records.possible, replaced)
    return secret_participation(records, sample_rate(plan), replaced)


MORE = "The parameters are no function of the releases: something else of the data moves them."
UNSEEN = "Steps that nobody observes move the parameters elsewhere than steps that are recorded."


def ends_as(run: CanaryRun, other: CanaryRun) -> bool:
    """Whether another run of the same keys and coins, taken now with nobody observing, ends at the same parameters.

    An observed step runs as separate operations. In training one fused operation takes the step, and anything that it
    adds does not show in the releases.
    """
    for _ in range(run.plan.steps):
        other.step()
    tolerance = 1e-6 if run.dtype == np.float64 else 1e-2
    return all(
        np.allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(a[np.isfinite(a)]).max(initial=0), equal_nan=True)
        for a, b in zip(run.values(), other.values(), strict=True)
    )


def follows_from_releases(run: CanaryRun, empty: CanaryRun) -> bool:
    """Whether a run with no data, whose noise is the releases of `run`, ends at the same parameters.

    Its steps release the very same vectors, so any function of the releases is the same. A filter, a second moment or a
    loop that has the clean sum from elsewhere is not.
    """
    mechanism, backend = empty.mechanism, empty.mechanism.backend
    norms, plan = run.mechanism.clip_norms, run.plan

    def normals(row: int, stream: int) -> list[Any]:
        if stream == Stream.CLIP_BOUND:
            assert norms is not None
            return [np.array([noisy_bits(plan, norms[row], norms[row + 1]) / plan.bit_noise_standard_deviation])]
        white = run.white[int(stream == Stream.SECOND_MOMENT), row]
        return [backend.from_numpy(vector.astype(run.dtype)) for vector in white]

    release = mechanism.release

    def released(*arguments: Any, **named: Any) -> None:
        release(*arguments, **{**named, "normals": normals})

    mechanism.release = released  # type: ignore[method-assign]
    empty.amount[:] = 0
    return ends_as(run, empty)


# Scores: how strongly a canary's releases indicate "in".
#
# In units of the planned noise the releases x of one canary are N(s, I) with s = A p: column A_t is its addend if it
# takes part in step t, and p_t is 1 if it does. Any score gives a valid lower bound; the likelihood ratio gives the
# best one.
#
# - Batches are public: p is known, ``log N(x; s)/N(x; 0)`` grows with s.x, and s.x/|s| is normal with variance 1 and
#   mean |s| or 0: the matched filter. It is also used if sampling is secret and the noise is correlated.
# - Each of some steps draws it with probability q, and their columns are orthogonal:
#   ``sum_t log(1 - q + q exp(A_t.x - |A_t|^2/2))``.
# - Replace-one: "out" has -s instead of 0, and the ratio to it is taken.
#
# An adversary who sees on untouched coordinates that the noise is not as planned uses the noise that there is: releases
# are then first multiplied by the inverse root of its measured covariance (steps by steps). Untouched coordinates do
# not depend on the coins, so neither does this choice.


# Noise below this, relative to the planned variance, is none.
_NO_NOISE = 1e-12


def matched_filter(records: Records, taken: NDArray[Any], replaced: bool) -> Floats:
    """Return the matched filter's outputs, (m,), as if canaries took part as often as `taken` (T, m) says.

    They are counted from the middle between "in" and "out"; of a canary that never takes part the output is 0.
    """
    added = records.signal @ taken
    norms = np.linalg.norm(added, axis=0)
    along = (added * records.canaries).sum(axis=0) / np.where(norms > 0, norms, 1.0)
    return np.asarray(along if replaced else along - norms / 2)


def secret_participation(records: Records, sample_rate: float, replaced: bool) -> Floats:
    """Return log-likelihood ratios, (m,), if each possible step draws a canary with one probability."""
    along = records.signal.T @ records.canaries
    size = (records.signal**2).sum(axis=0)[:, None]
    step = _log_ratio(along, size, sample_rate)
    if replaced:
        step = step - _log_ratio(-along, size, sample_rate)
    return np.asarray((step * records.possible).sum(axis=0))


def _log_ratio(along: Floats, size: Floats, q: float) -> Floats:
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-q), np.log(q) + along - size / 2))


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
