"""An audit of a torch run: canaries through its own step, until the claim or half of its noise is refuted.

In every step each canary is in or out by a fair coin, from a fresh key. The batch of those that are in goes through
the run's own sum and release: its way of finding gradients, its clip, micro-batches, noise, filter and update, on a run
of the same plan with its own keys. The parameters are then restored, as by loading weights.
(`dpcore.audit.audit` gives each canary one coin for a whole run, which also tests the sampler and the composition, and
takes a run for each. A torch run is too slow for that: here each step has its own coins.)

**Canaries** are chosen among some of the user's examples, and synthetic ones. Each one's vector is found by one-by-one
autograd and clipped by the reference's formulas in float64: it does not depend on the run's own way to find and clip
gradients. A part of each vector as long as possible is orthogonal to all the others: one that adds more than planned
then does not affect the guesses of others. If users are the unit of privacy, a canary is a user whose examples are all
the same one: clipped one by one instead of in sum, they would add up to several clip norms.

**Observations.** c_i is canary i's addend to the step's sum if it is in: the clipped vector, whatever its inputs
(`clipped_vectors`: gradients at several points, a scale, a user's examples).
The sum of clipped vectors gets noise of the plan's standard deviation s in each coordinate; if gradients were
scaled, the released average is divided by the scale again, which is public, and is multiplied by it here. So in units
of s the release is

    y_t = sum_i b_i c_i / s + N_t,    N = C^{-1} Z,

with standard normals Z, and C the strategy's matrix, or the identity. Filter, projection (GaLore) and update follow
after it, and lose nothing for the adversary. He knows all c_i, which depend only on earlier releases, and the coins of
earlier steps. So he knows N_0 .. N_{t-1}, and observes

    w_t = C_tt y_t + sum_{u<t} C_tu N_u = C_tt sum_i b_i c_i / s + Z_t,

where Z_t is independent of all that came before: for each canary the step is Gaussian private with mu at most C_tt
times the largest |c_i| / s that the clip allows. This is the plan's claim on this row, given the rows before.

**Guesses.** As in the definition of privacy, he who guesses b_i knows the other coins of the step. He subtracts their
addends; ``C_tt b_i c_i / s + Z_t`` is left, and by its product with c_i the guess is "in" above half of
``C_tt |c_i|^2 / s``. The share of right guesses of a step is one bet: guesses of one step share Z_t, and the test of
`dpcore.audit.verdict` allows that.

This tests each release *given* its batch. `dpcore.audit.audit` tests, on the same samplers, that batches are drawn as
planned. The epsilon of an r is that of the plan with 1/r of its noise on the gradients. Bits of an adaptive clip and
squares that are released with them were not looked at, and count as planned.
"""

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy.special import ndtr
from torch import nn

from dpcore.accounting import epsilon_interval
from dpcore.audit import checks
from dpcore.audit.auditing import coins
from dpcore.audit.verdict import AuditResult, RatioBound, judged, log_wealth
from dpcore.errors import ArgumentError, DpcoreError
from dpcore.mechanism.recorder import Recorder
from dpcore.plan.plan import Plan
from dpcore.sampling.base import Shard
from dpcore.spec import validate
from dpcore.spec.backends import load_backend
from dpcore.spec.stream import new_key
from dpcore.stages.clipping.blocks import as_blocks
from dpcore.stages.clipping.clipped_sum import norms_of
from dpcore.stages.method import Method
from dpcore.stages.queries import Plain
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.doctor.finding import Finding, NotTried, fault, ok, remark
from dpcore.torch.doctor.subject import Subject, kept_values, unchanged
from dpcore.torch.gradients.per_example import Loss
from dpcore.torch.model.functional import in_mode
from dpcore.torch.randomness import OTHER, TRIAL
from dpcore.torch.run import PrivateRun

Floats = NDArray[np.float64]

MOST = 5
"""Number of canaries. With more, the orthogonal parts are shorter, and one that adds more than planned spoils the
others' guesses: users whose examples are clipped one by one were refuted in 1 of 8 audits with 12, in 8 with 5."""
_CANDIDATES = 24  # of the user's examples, and as many made up
_NUMBERS = 3e7  # that candidates' vectors may have together, or the noise of a run
_SHORTEST = 0.6  # of the longest one: the part of a canary's vector that is its own
_OF_A_USER = 3  # examples, if a user may have that many
_DIRECT = 8  # the first steps, whose noise is tested directly: a number that no outcome changes
_LOOKED_AT = 100_000  # coordinates of these
_MOST_STEPS = 20_000
_MOST_ROWS = 2048  # of correlated noise, after which a new run begins: all N_u so far are kept
_LEAST_NOISE = 1e-3  # below it, rounding of 16-bit models may look like a wrong sum
_BEYOND = 1.05  # r shown, from which on the bound is clearly above the claim, which is refuted at 1
_ENOUGH = 0.6  # if half the noise is refuted: r shown, from which on the lower bound is informative
_ASSUMES = "batches are drawn as planned, and what ran is Gaussian and alike in all steps"


def audit(
    model: nn.Module,
    data: Any,
    method: Method,
    *,
    loss: Loss = F.cross_entropy,
    confidence: float = 0.99,
    seconds: float = 60.0,
    **options: Any,
) -> AuditResult:
    """Put canaries through the step of the run that `make_private` makes of these objects.

    It ends if the claim is refuted, or if half of its noise is and the lower bound is informative, or when time is
    over: the test may stop at any time (`dpcore.audit.verdict`). Nothing of a real run is spent, and all objects are
    left as they were found.

    Parameters
    ----------
    model, data, method, loss
        As for `dpcore.torch.make_private`.
    confidence : float
        1 minus the probability that a true claim is flagged.
    seconds : float
        Approximate limit; more steps give a bound nearer to the real mechanism.
    **options
        Other keywords of `make_private`; those of a real run (`ledger`, `key`, ...) are left aside.

    Returns
    -------
    AuditResult

    Raises
    ------
    ArgumentError
        As `make_private`, or for a run that these canaries do not fit, with the reason.
    """
    validate.open_unit(confidence=confidence)
    validate.positive(seconds=seconds)
    subject = Subject(model, data, method, loss, options)
    begin = time.monotonic()
    with unchanged({"model": model, "loss": loss}, data, subject.device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject.build()
        if subject.refused is not None:
            raise subject.refused
        try:
            return audit_run(subject, confidence, seconds=max(begin + seconds - time.monotonic(), 0.5))
        except NotTried as cause:
            reason = f"audit: {cause.sentence.rstrip('.')}"
            raise ArgumentError(f"{reason}; {cause.remedy}" if cause.remedy else reason) from None


def audited(subject: Subject, confidence: float) -> Iterator[Finding]:
    """Audit the run in half of the remaining time, and yield the findings.

    Some canaries are the user's examples, chosen by their gradients: every number depends on the data.
    """
    result = audit_run(subject, confidence, seconds=max((subject.deadline - time.monotonic()) / 2, 0.5))
    if result.flagged:
        remedy = "the run differs from its plan: look for code that replaces or wraps its step"
        yield fault(" ".join([result.sentence, *result.findings]), remedy, details=result.to_dict())
    else:
        remedy = "" if result.decided else "give more seconds, to distinguish the planned noise from half of it"
        yield (ok if result.decided else remark)(result.sentence, remedy, details=result.to_dict())


def audit_run(subject: Subject, confidence: float, *, seconds: float) -> AuditResult:
    """Audit a run of the subject's plan until it is decided, or for `seconds`."""
    _check(subject.run.plan, subject.delta)
    with in_mode(subject.model, False):  # with dropout masks, the vectors would be unknown
        return _Audit(subject, confidence).whole(seconds)


class _Audit:
    """The steps of an audit."""

    def __init__(self, subject: Subject, confidence: float) -> None:
        self.subject, self.confidence, self.plan = subject, confidence, subject.run.plan
        self.claim = RatioBound((1 - confidence) / 2)
        # The shares of wrong guesses, and the expected ones under a Gaussian mechanism with half the noise.
        self.wrong, self.left = np.empty(0), np.empty(0)
        # Of the first steps: the releases less the canaries, in units of noise.
        self.rest: list[Floats] = []
        self.sums: list[Floats] = []
        self.steps, self.half_refuted, self.key = 0, False, new_key()
        self._begin()
        self.canaries = Canaries(subject, self.run)
        strategy, dimension = self.plan.method.noise.strategy, self.run.engine.mechanism.layout.dimension
        self.rows = self.plan.steps
        self.matrix: Floats | None = None
        if strategy is not None:
            self.rows = min(self.rows, _MOST_ROWS, max(int(_NUMBERS // dimension), 1))
            self.matrix = strategy.matrix(self.rows)
            self.noise = np.empty((self.rows, dimension))  # N_0 .. N_t of the present run

    def _begin(self) -> None:
        """Begin a run with fresh keys."""
        self.run: PrivateRun = self.subject.another()
        layout = self.run.engine.mechanism.layout
        self.run.engine.recorder = self.recorder = Recorder(layout, layout.dimension, "float64")

    def whole(self, seconds: float) -> AuditResult:
        """Take steps until it is decided."""
        end = time.monotonic() + seconds
        while self.steps < _MOST_STEPS and (self.steps < _DIRECT or time.monotonic() < end):
            if self.run.steps_taken >= self.rows:
                self._begin()
            with kept_values(self.subject.model):
                self._step()
            decided = self.claim.lower >= _BEYOND or (self.half_refuted and _ENOUGH <= self.claim.lower < 1)
            if decided and self.steps >= _DIRECT:  # never before `_DIRECT` steps, see `_result`
                break
        return self._result()

    def _step(self) -> None:
        run, plan, mechanism, t = self.run, self.plan, self.run.engine.mechanism, self.run.steps_taken
        self.canaries.renew(run)
        ins = coins(self.key, self.steps, self.canaries.count)
        scale, contribution = scale_of(run), mechanism.contribution
        deviation = plan.noise_standard_deviation(t, mechanism.clip_norm)
        take(run, self.canaries.batch(ins, run.engine.views), self.canaries.each)
        self.recorder.filtered.clear()
        released = self.recorder.released.pop() * scale * plan.batch_size / deviation
        known = self.canaries.vectors / deviation
        noise = released - ins @ known
        diagonal, white = 1.0, noise  # C_tt, and Z_t: the observation less all that canaries added
        if self.matrix is not None:
            self.noise[t] = noise
            diagonal, white = float(self.matrix[t, t]), self.matrix[t, : t + 1] @ self.noise[: t + 1]
        lengths = np.linalg.norm(known, axis=1)
        # Each one's own vector is added again: the guess knows the other coins, but not this one.
        seen = known @ white + diagonal * ins * lengths**2
        share = float(((seen > diagonal * lengths**2 / 2) == ins).mean())
        self.steps += 1
        self.claim.add(share, diagonal * contribution / deviation)
        # With half the noise, a Gaussian step would be guessed right with probability Phi(length): bets on less.
        self.wrong = np.append(self.wrong, 1 - share)
        self.left = np.append(self.left, ndtr(-diagonal * lengths).mean())
        self.half_refuted |= log_wealth(self.wrong, self.left) >= -math.log((1 - self.confidence) / 10)
        if self.steps <= _DIRECT:
            self.sums.append(np.linalg.qr(known.T)[0].T @ white)
            self.rest.append(white[:: max(1, len(white) // _LOOKED_AT)])

    def _result(self) -> AuditResult:
        # The direct checks use the first `_DIRECT` steps, a number fixed in advance: if the results decided how many
        # steps are tested, the test's error rate would not hold.
        plan, delta, rest = self.plan, self.subject.delta, np.stack(self.rest)[:, None, :]
        chances = {"sums": checks.wrong_sums(np.stack(self.sums))}
        if rest.shape[2] >= 4:
            chances |= {"noise": checks.too_little_noise(rest), "repeated": checks.repeated_noise(rest)}
        return judged(
            plan,
            self.claim,
            chances,
            delta=delta,
            confidence=self.confidence,
            claimed_epsilon=plan.epsilon(delta),
            lower_bound=_epsilon_at(plan, self.claim.lower, delta),
            canaries=self.canaries.count,
            steps=self.steps,
            noise_ratio=float(np.sqrt((rest**2).mean())),
            assumes=_ASSUMES,
            half_refuted=self.half_refuted and not self.claim.refuted,
        )


def _check(plan: Plan, delta: float) -> None:
    """Refuse a plan that claims nothing."""
    if 0 < plan.noise_multiplier < _LEAST_NOISE:
        raise NotTried(
            f"the noise multiplier {plan.noise_multiplier:.3g} claims next to nothing, and rounding is not small "
            "compared with its noise.",
            f"audit with {_LEAST_NOISE} at least",
        )
    if not math.isfinite(plan.epsilon(delta)):
        raise NotTried("the plan claims nothing: there is no noise, or none on a part.", "give a noise multiplier")


def _epsilon_at(plan: Plan, ratio: float, delta: float) -> float | None:
    """Return the certified lower end of the epsilon of the plan with its noise on gradients divided by `ratio`."""
    if ratio <= 0:
        return 0.0
    gradients = (plan.sensitivity_at().contribution / plan.noise_standard_deviation()) ** 2
    others = max(0.0, plan.noise_multiplier**-2 - gradients)  # what bits and squares add to 1 / sigma^2
    try:
        sigma = (ratio**2 * gradients + others) ** -0.5
        louder: Any = replace(plan, method=plan.method.with_noise_multiplier(sigma))
        return float(epsilon_interval(louder.event, delta).lower)
    except DpcoreError:
        return None


class Canaries:
    """Canaries of a run, each with `each` equal examples.

    `rows` is the batch of one example of each, and `vectors` each canary's addend to a step's sum, (m, d).
    """

    def __init__(self, subject: Subject, run: PrivateRun) -> None:
        dimension = run.engine.mechanism.layout.dimension
        each = int(min(_CANDIDATES, _NUMBERS // (2 * dimension)))
        if each < 1:
            raise NotTried(
                f"{dimension:,} trained numbers are too many for canaries of known vectors.",
                "audit the run with a smaller model of the same kind",
            )
        self.each = min(getattr(run.plan.sampler, "max_examples_per_user", 1), _OF_A_USER)
        made, own = batches.named(subject.made(each)), subject.examples(subject.source.spread(each))
        candidates = batches.named_map(lambda name, t: torch.cat([t, made[name].to(t.dtype)]), own)
        vectors, other = (clipped_vectors(run, candidates, self.each, seed) for seed in (TRIAL, OTHER))
        if not np.allclose(vectors, other, equal_nan=True):
            raise NotTried(
                "model or loss draw random numbers in eval mode, too, so that no canary's vector is known.",
                "examine it without them",
            )
        chosen = apart(vectors @ vectors.T, MOST)
        if not len(chosen):
            raise NotTried("no example has a gradient to recognize it by.", "check the loss and the labels")
        index = torch.from_numpy(chosen).to(subject.device)
        self.rows: Tree = batches.tree_map(lambda t: t[index], candidates)
        self.count = len(chosen)
        self.vectors: Floats = vectors[chosen]

    def renew(self, run: PrivateRun) -> None:
        """Compute the vectors of the run's next step, if they differ from those of the first."""
        if type(run.plan.method.query) is not Plain or run.plan.adaptive_clip is not None:
            self.vectors = clipped_vectors(run, self.rows, self.each)

    def batch(self, coins: NDArray[np.bool_], views: int) -> Tree:
        """Return the batch of those that are in."""
        index = torch.from_numpy(np.flatnonzero(coins).repeat(views * self.each))
        return batches.tree_map(lambda t: t[index.to(t.device)], self.rows)


@dataclass(frozen=True)
class _Given(Shard):
    """The share of a batch that was not drawn: of users with `each` examples, if users are drawn."""

    users: int
    each: int

    def units(self, key: bytes, step: int) -> NDArray[np.int64] | None:
        return None if self.sampler.unit_of_privacy == "example" else np.full(self.users, self.each)


def add_up(run: PrivateRun, batch: Tree, each: int = 1) -> None:
    """Sum a batch that nobody drew, as ``private.step`` does; see `take`."""
    engine = run.engine
    users = batches.size(batch) // (engine.views * each)
    engine.mechanism.share = _Given(run.plan.sampler, 0, 1, users, each)
    engine.accumulate(batch, batch if run.plan.method.update.second_moment == "public" else None)


def take(run: PrivateRun, batch: Tree, each: int = 1) -> None:
    """Take one step on a batch that nobody drew: the sum and the release of ``private.step``.

    If the method takes public data, they are the batch. If users are drawn, each `each` neighbors are one user's
    examples.
    """
    add_up(run, batch, each)
    run.engine.release(run.optimizer.settings())


def scale_of(run: PrivateRun) -> Floats | float:
    """Return the query's factors on gradients in the run's next step, (d,), or 1: a function of releases."""
    mechanism = run.engine.mechanism
    scales = mechanism.vectors.scales
    if scales is None or not run.plan.scaled(mechanism.step):
        return 1.0
    return np.concatenate([mechanism.backend.to_numpy(scale).astype(np.float64).reshape(-1) for scale in scales])


def clipped_vectors(run: PrivateRun, batch: Tree, each: int = 1, seed: bytes = TRIAL) -> Floats:
    """Return the addend of each row of a batch, `each` times, to the sum of the run's next step, (B, d), by autograd.

    Row by row: the combination of gradients at the query's points, scaled if the query scales, times `each` (the sum
    over a user's examples), clipped by the method's rule in float64.
    """
    engine = run.engine
    mechanism, gradient = engine.mechanism, engine.gradient
    total: Any = 0.0
    for point in mechanism.points():
        values = engine.tensors_at(mechanism.at(engine.working.arrays(), point))
        rows = gradient.guarded(lambda: list(gradient.one_by_one.each(values, batch)), seed, synthetic=False)  # noqa: B023
        gradients = np.stack([np.concatenate([g.reshape(-1).double().cpu().numpy() for g in row]) for row in rows])
        total = total + float(point.weight) * gradients
    total = total * scale_of(run) * each
    reference = load_backend("numpy")
    now = mechanism.step, mechanism.clip_norm
    clip, grouping = run.plan.clip_at(*now), run.plan.grouping_at(*now)
    sizes = [entry.size for entry in mechanism.layout.entries]
    ends = np.cumsum(sizes)
    columns = [np.ascontiguousarray(total[:, end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    norms = norms_of(reference, as_blocks(columns, sizes), grouping.members, [None] * len(columns))
    of_groups = [sum(sizes[i] for i in members) for members in grouping.members]
    factors = reference.clip_factors(norms, clip.rule, grouping.bounds, of_groups, [0.0] * len(norms), 1.0)
    for members, factor in zip(grouping.members, factors, strict=True):
        for i in members:
            columns[i] *= np.asarray(factor)[:, None]
    return np.concatenate(columns, axis=1)


def apart(products: Floats, most: int) -> NDArray[np.int64]:
    """Return indices of nearly independent vectors, the longest first, by inner products (P, P): pivoted Cholesky.

    In each round the vector with the longest part orthogonal to those chosen before is taken, as long as that part is
    at least `_SHORTEST` of the first one's.
    """
    left, first = products.copy(), 0.0
    chosen: list[int] = []
    while len(chosen) < min(most, len(products)):
        sizes = np.diag(left)
        best = int(np.argmax(np.where(np.isfinite(sizes), sizes, 0.0)))
        size = float(sizes[best])
        first = first or size
        if not size > _SHORTEST**2 * first:
            break
        chosen.append(best)
        left = left - np.outer(left[:, best], left[best]) / size
    return np.array(chosen, dtype=np.int64)
