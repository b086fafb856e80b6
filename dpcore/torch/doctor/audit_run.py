"""An audit of a torch run: canaries through its own step, until the claim or half of its noise is refuted.

In every step each canary is in or out by a fair coin, from a fresh key. The batch of those that are in goes through
the run's own sum and release: its way of finding gradients, its clip, micro-batches, noise, filter and update, on a run
of the same plan with keys of its own. The parameters are then set back to where they were, as loading weights does.

**What is seen.** c_i is what canary i adds to the step's sum where it is in: the vector that leaves the clip, whatever
went into it (`dpcore.torch.doctor.canaries.clipped_vectors`: gradients at several points, a scale, a user's examples).
The sum of clipped vectors gets noise of the plan's standard deviation s in each coordinate; where gradients were
scaled, the released average is divided by the scale again, which is public, and is multiplied by it here. So in units
of s the release is

    y_t = sum_i b_i c_i / s + N_t,    N = C^{-1} Z,

with standard normals Z, and C the strategy's matrix, or the identity. Filter, projection (GaLore) and update follow
after it, and lose nothing that the adversary sees. He knows all c_i, which depend on earlier releases at most, and the
coins of earlier steps. So he knows N_0 .. N_{t-1}, and sees

    w_t = C_tt y_t + sum_{u<t} C_tu N_u = C_tt sum_i b_i c_i / s + Z_t,

where Z_t is independent of all that came before: for each canary the step is Gaussian private with mu at most C_tt
times the largest |c_i| / s that the clip allows, which is what the plan claims of this row, given the rows before.

**Guesses.** As in the definition of privacy, he who guesses b_i knows the other coins of the step. He takes off what
they add; ``C_tt b_i c_i / s + Z_t`` is left, and by its product with c_i the guess is "in" above half of
``C_tt |c_i|^2 / s``.

What is tested is each release *given* its batch. That batches are drawn as planned is tested by `dpcore.audit.audit`,
on the same samplers; the epsilon that a larger r stands for is that of the plan with its noise multiplier divided by r.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch.nn.functional as F
from scipy.special import ndtr
from torch import nn

from dpcore.accounting import epsilon_interval
from dpcore.audit import checks
from dpcore.audit.auditing import coins
from dpcore.audit.betting import Bets, RatioBound
from dpcore.audit.result import RunAudit
from dpcore.errors import ArgumentError, DpcoreError
from dpcore.mechanism.recorder import Recorder
from dpcore.plan.plan import Plan
from dpcore.spec import validate
from dpcore.spec.stream import new_key
from dpcore.stages.method import Method
from dpcore.torch.doctor.canaries import Canaries, Floats, check_alike, scale_of
from dpcore.torch.doctor.finding import Finding, NotTried, fault, ok, remark
from dpcore.torch.doctor.steps import take
from dpcore.torch.doctor.subject import Subject, kept_values, unchanged
from dpcore.torch.gradients.per_example import Loss
from dpcore.torch.held_out import evaluating
from dpcore.torch.run import PrivateRun

_DIRECT = 8  # the first steps, whose noise is looked at directly: a number that no outcome changes
_LOOKED_AT = 100_000  # coordinates of these
_MOST_STEPS = 20_000
_MOST_ROWS = 2048  # of correlated noise, after which a run begins anew: all N_u so far are kept
_NUMBERS = 3e7  # that these may have together
_LEAST_NOISE = 1e-3  # below it, what 16-bit models round may look like a wrong sum
_BEYOND = 1.05  # r shown, from which on the bound is clearly above the claim, which is refuted at 1
_ENOUGH = 0.6  # where half the noise is refuted: r shown, from which on the lower bound says something


def audit(
    model: nn.Module,
    data: Any,
    method: Method,
    *,
    loss: Loss = F.cross_entropy,
    confidence: float = 0.99,
    seconds: float = 60.0,
    **options: Any,
) -> RunAudit:
    """Put canaries through the step of the run that `make_private` makes of these objects.

    It ends where the claim is refuted, or half of its noise is and the lower bound says something, or when time is
    over: the test may stop at any time (`dpcore.audit.betting`). Nothing of a real run is spent, and all objects are
    left as they were found.

    Parameters
    ----------
    model, data, method, loss
        As for `dpcore.torch.make_private`.
    confidence : float
        1 minus the probability that a true claim is flagged.
    seconds : float
        At most about so many; more steps give a bound that is nearer to what ran.
    **options
        Other keywords of `make_private`; those of a real run (`ledger`, `key`, ...) are left aside.

    Returns
    -------
    RunAudit

    Raises
    ------
    ArgumentError
        What `make_private` raises, or for a run that these canaries do not fit, with the reason.
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
            told = f"audit: {cause.sentence.rstrip('.')}"
            raise ArgumentError(f"{told}; {cause.remedy}" if cause.remedy else told) from None


def audited(subject: Subject, confidence: float) -> Iterator[Finding]:
    """Audit the run in half of the time that is left, and say what was found.

    Some canaries are the user's examples, and which ones depends on their gradients: every number tells of the data.
    """
    result = audit_run(subject, confidence, seconds=max(subject.left / 2, 0.5))
    if result.flagged:
        remedy = "the run is not what its plan says: look for what replaces or wraps its step"
        yield fault(" ".join([result.told, *result.findings]), remedy, details=result.to_dict())
    elif not result.decided:
        told = f"{result.told} Too few steps to tell planned noise from half of it."
        yield remark(told, "give more seconds", details=result.to_dict())
    else:
        yield ok(result.told, details=result.to_dict())


def audit_run(subject: Subject, confidence: float, *, seconds: float) -> RunAudit:
    """Audit a run of the subject's plan; it ends where it is decided, or after so many seconds."""
    plan = subject.run.plan
    _check(plan)
    with evaluating(subject.model):  # masks would make vectors that nobody knows
        return _Audit(subject, confidence).whole(seconds)


class _Audit:
    """The steps of an audit."""

    def __init__(self, subject: Subject, confidence: float) -> None:
        self.subject, self.confidence, self.plan = subject, confidence, subject.run.plan
        alpha = 1 - confidence
        self.claim, self.half = RatioBound(alpha / 2), Bets(alpha / 10)
        # Of the first steps: what is left of releases without the canaries, in units of noise.
        self.rest: list[Floats] = []
        self.sums: list[Floats] = []
        self.steps, self.half_refuted, self.key = 0, False, new_key()
        self._begin()
        check_alike(self.run, subject.made(1))
        self.canaries = Canaries(subject, self.run)
        strategy, dimension = self.plan.method.noise.strategy, self.run._engine.mechanism.layout.dimension
        self.rows = self.plan.steps
        self.matrix: Floats | None = None
        if strategy is not None:
            self.rows = min(self.rows, _MOST_ROWS, max(int(_NUMBERS // dimension), 1))
            self.matrix = strategy.matrix(self.rows)
            self.noise = np.empty((self.rows, dimension))  # N_0 .. N_t of the present run

    def _begin(self) -> None:
        """Begin a run with fresh keys."""
        self.run: PrivateRun = self.subject.another()
        engine = self.run._engine
        engine.recorder = Recorder(engine.mechanism.layout, engine.mechanism.layout.dimension, "float64")

    def whole(self, seconds: float) -> RunAudit:
        """Take steps until it is decided."""
        end = time.monotonic() + seconds
        while self.steps < _MOST_STEPS and (self.steps < _DIRECT or time.monotonic() < end):
            if self.run.steps_taken >= self.rows:
                self._begin()
            with kept_values(self.subject.model):
                self._step()
            decided = self.claim.lower >= _BEYOND or (self.half_refuted and _ENOUGH <= self.claim.lower < 1)
            if decided and self.steps >= _DIRECT:  # or the direct checks would see a number that outcomes change
                break
        return self._result()

    def _step(self) -> None:
        run, plan = self.run, self.plan
        mechanism, t = run._engine.mechanism, run.steps_taken
        self.canaries.renew(run)
        ins = coins(self.key, self.steps, self.canaries.count)
        norm, scale = mechanism.clip_norm, scale_of(run)
        deviation = plan.noise_standard_deviation(t, norm)
        contribution = plan.sensitivity_at(t, norm).contribution
        take(run, self.canaries.batch(ins, run._engine.views), each=self.canaries.each)
        assert run._engine.recorder is not None
        released = run._engine.recorder.released.pop() * scale * plan.batch_size / deviation
        run._engine.recorder.filtered.pop()
        known = self.canaries.vectors / deviation
        noise = released - ins @ known
        diagonal, white = 1.0, noise  # C_tt, and Z_t: what was seen without all that canaries added
        if self.matrix is not None:
            self.noise[t] = noise
            diagonal, white = float(self.matrix[t, t]), self.matrix[t, : t + 1] @ self.noise[: t + 1]
        lengths = np.linalg.norm(known, axis=1)
        # Each one's own vector is put back: the guess knows the other coins, and not this one.
        seen = known @ white + diagonal * ins * lengths**2
        share = float(((seen > diagonal * lengths**2 / 2) == ins).mean())
        self.steps += 1
        self.claim.add(share, diagonal * contribution / deviation)
        # With half the noise, a Gaussian step would be guessed right with this probability: bets on less.
        self.half.add(1 - share, float(ndtr(-diagonal * lengths).mean()))
        self.half_refuted = self.half_refuted or self.half.refuted
        if self.steps <= _DIRECT:
            self.sums.append(np.linalg.qr(known.T)[0].T @ white)
            self.rest.append(white[:: max(1, len(white) // _LOOKED_AT)])

    def _direct(self) -> dict[str, float]:
        """Return the probabilities of the direct checks, after a number of steps that no outcome changes."""
        rest = np.stack(self.rest)[:, None, :]
        found = {"sums": checks.wrong_sums(np.stack(self.sums))}
        if rest.shape[2] >= 4:
            found |= {"noise": checks.too_little_noise(rest), "repeated": checks.repeated_noise(rest)}
        return found

    def _result(self) -> RunAudit:
        plan, delta, alpha = self.plan, self.subject.delta, 1 - self.confidence
        direct = self._direct()
        failed = checks.failed(direct, alpha / 2 / len(direct))
        if self.claim.refuted:
            failed.insert(
                0, f"Canaries were told apart as if the noise were at most 1/{self.claim.lower:.3g} of the planned."
            )
        return RunAudit(
            claimed_epsilon=plan.epsilon(delta),
            lower_bound=_epsilon_at(plan, self.claim.lower, delta),
            delta=delta,
            confidence=self.confidence,
            steps=self.steps,
            canaries=self.canaries.count,
            ratio=self.claim.lower,
            half_refuted=self.half_refuted and not self.claim.refuted,
            flagged=bool(failed),
            findings=tuple(failed),
            p_values=direct,
            method=plan.method.name,
        )


def _check(plan: Plan) -> None:
    """Say what claims nothing."""
    if not plan.noise_standard_deviation():
        raise NotTried("the plan has no noise, and claims nothing.", "give the method a noise multiplier")
    if plan.noise_multiplier < _LEAST_NOISE:
        raise NotTried(
            f"the noise multiplier {plan.noise_multiplier:.3g} claims next to nothing, and rounding is not small "
            "beside its noise.",
            f"audit with {_LEAST_NOISE} at least",
        )
    if not math.isfinite(plan.event.noise_multiplier if hasattr(plan.event, "noise_multiplier") else 1.0):
        raise NotTried("the plan claims nothing.")


def _epsilon_at(plan: Plan, ratio: float, delta: float) -> float | None:
    """Return the certified lower end of the epsilon of the plan with its noise divided by `ratio`."""
    if ratio <= 0:
        return 0.0
    louder: Any = replace(plan, method=plan.method.with_noise_multiplier(plan.noise_multiplier / ratio))
    try:
        return float(epsilon_interval(louder.event, delta).lower)
    except DpcoreError:
        return None
