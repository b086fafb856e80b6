"""An audit of a torch run: canaries through its own step, until the claim or half of its noise is refuted.

In every step each canary is in or out by a fair coin, from a fresh key. The batch of those that are in goes through
the run's own sum and release: its way of finding gradients, its clip, micro-batches, noise, filter and update, on a run
of the same plan with keys of its own. The parameters are then set back to where they were, as loading weights does, so
that each step meets the same gradients. The adversary knows the clipped vector c_i of each canary, and solves the least
squares of the release for all coins at once: with K the canaries' inner products, ``K^{-1} <c_j, release>`` is
``b_i + noise`` for canary i, with noise of standard deviation ``s (K^{-1})_ii^{1/2}`` where s is that of the plan. The
guess is "in" above 1/2.

Under correlated noise, releases of all steps so far are multiplied by the strategy's C first, which makes the planned
noise white, and what earlier coins added is subtracted: they are known by then.

What is tested is each release *given* its batch. That batches are drawn as planned is tested by `dpcore.audit.audit`,
on the same samplers; the epsilon that a larger r stands for is that of the plan with its noise multiplier divided by r.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.special import ndtr

from dpcore.accounting import epsilon_interval
from dpcore.audit import checks
from dpcore.audit.auditing import coins
from dpcore.audit.betting import Bets, RatioBound
from dpcore.audit.direct_checks import MEANING
from dpcore.errors import DpcoreError
from dpcore.mechanism.recorder import Recorder
from dpcore.plan.plan import Plan
from dpcore.spec.stream import new_key
from dpcore.torch.doctor.canaries import Canaries, Floats, check_alike
from dpcore.torch.doctor.finding import Finding, NotTried
from dpcore.torch.doctor.run_audit import RunAudit
from dpcore.torch.doctor.steps import take
from dpcore.torch.doctor.subject import Subject
from dpcore.torch.doctor.unchanged import kept_values
from dpcore.torch.model.functional import local
from dpcore.torch.run import PrivateRun

_DIRECT = 8  # the first steps, whose noise is looked at directly: a number that no outcome changes
_LOOKED_AT = 100_000  # coordinates of these
_MOST_STEPS = 20_000
_LARGEST_MATRIX = 2048
_BEYOND = 1.05  # r shown, from which on the bound is clearly above the claim, which is refuted at 1
_ENOUGH = 0.6  # where half the noise is refuted: r shown, from which on the lower bound says something


def audited(subject: Subject, confidence: float) -> Iterator[Finding]:
    """Audit the run in half of the time that is left, and say what was found."""
    result = audit_run(subject, confidence, seconds=max(subject.left / 2, 0.5))
    details = result.to_dict()
    if result.flagged:
        yield Finding(
            "fault",
            "audit",
            " ".join([result.told, *result.findings]),
            "the run is not what its plan says: look for what replaces or wraps its step",
            details=details,
        )
    elif not result.decided:
        yield Finding(
            "remark",
            "audit",
            f"{result.told} Too few steps to tell planned noise from half of it.",
            "give more seconds",
            details=details,
        )
    else:
        yield Finding("ok", "audit", result.told, details=details)


def audit_run(subject: Subject, confidence: float, *, seconds: float) -> RunAudit:
    """Audit a run of the subject's plan; it ends where it is decided, or after so many seconds."""
    plan = subject.run.plan
    _check(plan)
    training = [module.training for module in subject.model.modules()]
    subject.model.eval()  # masks would make vectors that nobody knows
    try:
        with kept_values(subject.model):
            return _Audit(subject, confidence).whole(seconds)
    finally:
        for module, before in zip(subject.model.modules(), training, strict=True):
            module.training = before


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
        strategy = self.plan.method.noise.strategy
        self.matrix = None if strategy is None else strategy.matrix(self.plan.steps)
        if self.matrix is not None and not self.canaries.fixed:
            raise NotTried("correlated noise with a query of several points.", "dpcore audit examines it on vectors")

    def _begin(self) -> None:
        """Begin a run with fresh keys."""
        self.run: PrivateRun = self.subject.another()
        engine = self.run._engine
        engine.recorder = Recorder(engine.mechanism.layout, engine.mechanism.layout.dimension, "float64")
        self.past: list[tuple[Floats, Floats]] = []

    def whole(self, seconds: float) -> RunAudit:
        """Take steps until it is decided."""
        end = time.monotonic() + seconds
        parameters = [local(p).clone() for p in self.run._engine.working.parameters]
        while self.steps < _MOST_STEPS and (self.steps < _DIRECT or time.monotonic() < end):
            if self.run.steps_taken >= self.plan.steps:
                self._begin()
            self._step()
            with torch.no_grad():
                for parameter, before in zip(self.run._engine.working.parameters, parameters, strict=True):
                    local(parameter).copy_(before)
            decided = self.claim.lower >= _BEYOND or (self._half_refuted() and _ENOUGH <= self.claim.lower < 1)
            if decided and self.steps >= _DIRECT:  # or the direct checks would see a number that outcomes change
                break
        return self._result()

    def _half_refuted(self) -> bool:
        self.half_refuted = self.half_refuted or self.half.refuted
        return self.half_refuted

    def _step(self) -> None:
        run, plan = self.run, self.plan
        mechanism, t = run._engine.mechanism, run.steps_taken
        self.canaries.renew(run)
        vectors, m = self.canaries.vectors, self.canaries.count
        ins = coins(self.key, self.steps, m)
        norm = mechanism.clip_norm
        deviation = plan.noise_standard_deviation(t, norm)
        contribution = plan.sensitivity_at(t, norm).contribution
        take(run, self.canaries.batch(ins, run._engine.views))
        assert run._engine.recorder is not None
        released = run._engine.recorder.released.pop() * plan.batch_size / deviation
        run._engine.recorder.filtered.pop()
        known = vectors / deviation
        inner = known @ known.T
        row = np.array([1.0]) if self.matrix is None else self.matrix[t, : t + 1]
        seen = known @ released
        # C makes the planned noise white; what earlier coins added is known by now.
        white = row[-1] * seen + sum(
            (c * (y - inner @ b) for c, (y, b) in zip(row, self.past, strict=False)), start=0.0
        )
        if self.matrix is not None:
            self.past.append((seen, ins.astype(np.float64)))
        inverse = np.linalg.inv(inner)
        own = row[-1] / np.sqrt(np.diag(inverse))  # of each canary: the part of its vector that is its own
        guesses = inverse @ white / row[-1] > 0.5
        share = float((guesses == ins).mean())
        self.steps += 1
        self.claim.add(share, row[-1] * contribution / deviation)
        # With half the noise, a Gaussian step would be guessed right with this probability: bets on less.
        self.half.add(1 - share, float(1 - ndtr(own).mean()))
        if self.steps <= _DIRECT and self.matrix is None:
            rest = released - ins.astype(np.float64) @ known
            self.sums.append(np.linalg.solve(np.linalg.cholesky(inner), known @ rest))
            self.rest.append(rest[:: max(1, len(rest) // _LOOKED_AT)])

    def _direct(self) -> dict[str, float]:
        """Return the probabilities of the direct checks, after a number of steps that no outcome changes."""
        if not self.rest:
            return {}
        rest = np.stack(self.rest)[:, None, :]
        found = {"sums": checks.wrong_sums(np.stack(self.sums))}
        if rest.shape[2] >= 4:
            found |= {"noise": checks.too_little_noise(rest), "repeated": checks.repeated_noise(rest)}
        return found

    def _result(self) -> RunAudit:
        plan, delta, alpha = self.plan, self.subject.delta, 1 - self.confidence
        direct = self._direct()
        failed = [f"{MEANING[name]} (p = {p:.2g})." for name, p in direct.items() if p <= alpha / 2 / len(direct)]
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
    """Say what canaries cannot show here."""
    told = {
        "batches of users": plan.sampler.unit_of_privacy != "example",
        "scaled gradients": plan.method.preconditioning is not None,
        "GaLore": plan.method.galore is not None,
        "correlated noise of so many steps": plan.method.noise.strategy is not None and plan.steps > _LARGEST_MATRIX,
    }
    for name in (name for name, found in told.items() if found):
        raise NotTried(f"{name}: canaries of this audit do not fit.", "dpcore audit examines the method on vectors")
    if not plan.noise_standard_deviation():
        raise NotTried("the plan has no noise, and claims nothing.", "give the method a noise multiplier")
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
