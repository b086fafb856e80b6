"""delta as a function of epsilon, as read from a composition."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dpcore.accounting.pld.loss import Array


@dataclass(frozen=True)
class Curve:
    """delta at ascending losses, certainly above or below the true one, linear in e^eps in between.

    `values` (n,) are delta at the `losses` (n,), which may begin below 0, without the mass `infinite` at loss infinity,
    in the unit e^`log_scale`. From a point to the next, `slack` (n,), which falls with the loss, has to be subtracted
    (lower bound) or added (upper bound). delta(eps) <= e^(chernoff - theta eps) + infinite is what an upper bound falls
    back on where the curve ends. `size` is the number of points of the transform.
    """

    losses: Array
    log_scale: float
    values: Array
    slack: Array
    infinite: float
    upper: bool
    theta: float
    chernoff: float
    size: int

    def delta(self, epsilon: float) -> float:
        """Return the bound on delta at epsilon: 1 or 0 where the curve ends before it."""
        at, losses = epsilon, self.losses
        if at < losses[0] or at >= losses[-1]:
            # Left of the curve nothing is known above, and its first value holds below; right of it the other way
            # round.
            if self.upper:
                value = math.inf if at < losses[0] else self.values[-1] + self.slack[-1]
            else:
                value = self.values[0] - self.slack[0] if at < losses[0] else 0.0
        else:
            k = int(np.searchsorted(losses, at, side="right")) - 1
            share = math.expm1(at - losses[k]) / math.expm1(losses[k + 1] - losses[k])
            value = self.values[k] + share * (self.values[k + 1] - self.values[k])
            value += self.slack[k] if self.upper else -self.slack[k]
        if math.isnan(value):
            value = math.inf if self.upper else 0.0
        if value <= 0.0:
            return self.infinite
        log_value = math.log(value) + self.log_scale
        if self.upper:
            log_value = min(log_value, self.chernoff - self.theta * epsilon)
        finite = math.exp(log_value) if log_value < 0.0 else 1.0
        return min(1.0, finite + self.infinite)

    def epsilon(self, delta: float) -> float:
        """Return the epsilon at which the bound reaches delta: infinity (upper) or 0 (lower) where it does not."""
        if self.upper and delta <= self.infinite:
            return math.inf
        log_delta = math.log(delta - self.infinite)
        if not self.upper and log_delta - self.log_scale > 700.0:
            return -math.inf
        wanted = math.exp(min(700.0, log_delta - self.log_scale))
        if self.upper:
            limit = max(0.0, self.chernoff - log_delta) / self.theta if self.theta > 0.0 else math.inf
            return min(limit, self._crossing(wanted, self.values + self.slack))
        return self._crossing(wanted, self.values - self.slack)

    def _crossing(self, wanted: float, net: Array) -> float:
        above = np.flatnonzero(net > wanted)
        if not len(above):
            return float(self.losses[0]) if self.upper else -math.inf
        k = int(above[-1])
        if k == len(net) - 1:
            return math.inf if self.upper else float(self.losses[k])
        wanted -= self.slack[k] if self.upper else -self.slack[k]
        drop = self.values[k] - self.values[k + 1]
        share = min(1.0, (self.values[k] - wanted) / drop) if drop > 0.0 else 1.0
        return float(self.losses[k] + math.log1p(share * math.expm1(self.losses[k + 1] - self.losses[k])))
