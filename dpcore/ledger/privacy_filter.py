"""Privacy filters: the composition of runs whose settings follow from earlier results.

Ordinary composition theorems fix every mechanism beforehand. Here a user looks at run 1, then chooses the noise and
the number of steps of run 2. A **privacy filter** covers that: fix a limit beforehand, and refuse whatever would carry
the sum of the charges over it.

Renyi filter. Fix an order alpha. If, whatever was seen before, the divergences of order alpha of all steps add up to
at most R with certainty, the whole transcript has Renyi divergence at most R (Feldman and Zrnic 2021, Theorem 3.1).
The reason: E[prod_t l_t^(alpha-1)] of the likelihood ratios l_t, taken from the last step backwards, gains at most a
factor exp((alpha-1) rho_t) at each step, and the sum of the rho_t never exceeds R. A run's charge here bounds the sum
over its steps, for each pair of neighbors: steps with fresh noise add up one by one, and those of a matrix mechanism
are rows of C S + Z, whose squared moves add up to at most the squared sensitivity. So runs may also be interleaved.

The limit is the R that converts to the budget exactly, by the improved bound of dpcore.accounting.renyi at this one
order:

    R = epsilon - log(1 - 1/alpha) + (log delta + log alpha) / (alpha - 1).

The order. At order alpha a plan with the divergence rho(alpha) takes the share rho(alpha) / R(alpha) of the limit. What
is best differs much: for a Gaussian mechanism the share is flat in the order; for a sampled step with little noise
there is a cliff, since it costs about alpha / (2 sigma^2) + alpha log(q) / (alpha - 1) as soon as that is positive. At
(3, 1e-5), rate 0.001 and sigma 0.7 the best order for a Gaussian, 7.5, affords 90 steps, and 6.3 affords 33,000. So the
order is fixed by the first plan, before anything of it is released (`order_for`). Until then, and for events without
a divergence, it is the smallest order that leaves a Gaussian 95% of the most that any order does (`best_order`).

GDP filter. If all steps are Gaussian, mu^2 takes the place of the divergence, and the conversion is exact (Smith and
Thakurta 2022, Theorem 1; Koskela, Tobaben, Honkela 2022).

Odometer. A filter bounds a limit fixed beforehand, not the present sum, which itself depends on results. So let limits
B_j = 2^(j/2), for all whole j, be fixed beforehand, and give each the share w_j delta with sum w_j <= 1. Let J be the
first limit that the sum has not passed when one stops. If J = j, the transcript is that of the filter at B_j, which is
(epsilon_j, w_j delta)-private. Hence sum_j max_S (P[S, J=j] - exp(epsilon_j) Q[S, J=j]) <= delta: epsilon_J, read off a
ledger at any time, chosen in any way, is a true statement (after Feldman and Zrnic 2021, section 5, and Rogers, Roth,
Ullman, Vadhan 2016). It costs up to sqrt 2 in the sum, and log(1/w_j).

References
----------
Feldman, Zrnic, "Individual Privacy Accounting via a Renyi Filter", 2021.
Rogers, Roth, Ullman, Vadhan, "Privacy Odometers and Filters: Pay-as-you-Go Composition", 2016.
Smith, Thakurta, "Fully Adaptive Composition for Gaussian Differential Privacy", 2022.
Koskela, Tobaben, Honkela, "Individual Privacy Accounting with Gaussian Differential Privacy", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting import Event, analytic_noise_multiplier
from dpcore.accounting.gaussian import gaussian_epsilon
from dpcore.accounting.phases import phases
from dpcore.accounting.renyi import DEFAULT_ORDERS, RdpAccountant, epsilon_from_rdp, event_rdp
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.spec import validate

# That for budgets about (3, 1e-5), for ledgers that have none.
DEFAULT_ORDER = 6.0

# The chosen order leaves a Gaussian mechanism this share of the most that any order does.
_KEPT = 0.95

# Small budgets want large orders: (0.01, 1e-5) wants about 2300, each tenth of epsilon ten times as much.
_ORDERS = np.array([*DEFAULT_ORDERS, *(float(2**k) for k in range(14, 21))])

# Of a plan with thousands of distinct steps, each order takes time.
_GRID = np.array([*DEFAULT_ORDERS[::6], *_ORDERS[len(DEFAULT_ORDERS) :]])

# The delta at which orders are compared if there is no budget.
_USUAL_DELTA = 1e-5

# Sum over all whole j of 1 / (1 + |j|)^2.
_SHARES = math.pi**2 / 3.0 - 1.0


@dataclass(frozen=True)
class PrivacyFilter:
    """The sum of a ledger: Renyi divergences at one order ("rdp"), or mu^2 of Gaussian mechanisms ("gdp")."""

    kind: str = "rdp"
    order: float = DEFAULT_ORDER

    def __post_init__(self) -> None:
        validate.choice(["rdp", "gdp"], composition=self.kind)
        object.__setattr__(self, "order", validate.number(order=self.order))
        if self.order <= 1.0:
            raise ArgumentError(f"order={self.order!r}: must be greater than 1")

    @classmethod
    def of(cls, kind: str, order: float | None, budget: tuple[float, float] | None) -> PrivacyFilter:
        """Return the filter of a ledger without a plan: the requested order, or a good one for the budget."""
        if order is not None and kind == "gdp":
            raise ArgumentError(f"order={order!r}: only composition='rdp' has an order")
        if order is None:
            order = DEFAULT_ORDER if budget is None or kind == "gdp" else best_order(*budget)
        return cls(kind, order)

    def charge(self, event: Event) -> float:
        """Return the event's addend to the sum: 0 or more, possibly infinity. `PrivacyError` if it is not covered."""
        if self.kind == "gdp":
            parts = phases(event)
            if parts is None or (parts.steps and math.isfinite(parts.mu)):
                raise PrivacyError(
                    f"event={type(event).__name__}: this ledger composes by Gaussian differential privacy, which does "
                    "not cover secretly sampled batches; use a fixed order, or a ledger with composition='rdp'"
                )
            return parts.mu * parts.mu
        if not RdpAccountant().supports(event):
            raise PrivacyError(f"event={type(event).__name__}: no Renyi divergence is known for it")
        return float(event_rdp(event, np.array([self.order]))[0])

    def epsilon(self, total: float, delta: float) -> float:
        """Return the epsilon at `delta` of a sum that was fixed beforehand as the limit."""
        if self.kind == "gdp":
            return gaussian_epsilon(math.sqrt(total), delta)
        return epsilon_from_rdp(np.array([self.order]), np.array([total]), delta)

    def limit(self, epsilon: float, delta: float) -> float:
        """Return the largest sum that is (epsilon, delta)-private."""
        epsilon, delta = validate.positive(epsilon=epsilon), validate.open_unit(delta=delta)
        if self.kind == "gdp":
            return self._rounded(float(analytic_noise_multiplier(epsilon, delta) ** -2), epsilon, delta)
        most = float(_limits(np.array([self.order]), epsilon, delta)[0])
        if not most > 0.0:
            raise ArgumentError(
                f"order={self.order:g}: leaves nothing to spend of epsilon={epsilon:g} at delta={delta:g}; it must be "
                f"larger, and the best is {best_order(epsilon, delta):g}"
            )
        return self._rounded(most, epsilon, delta)

    def _rounded(self, limit: float, epsilon: float, delta: float) -> float:
        """Return the limit, made smaller by as much as rounding carries its epsilon above the budget."""
        step = 2.0**-53
        while self.epsilon(limit, delta) > epsilon:
            limit, step = limit * (1.0 - step), 2.0 * step
        return limit

    def odometer(self, total: float, delta: float) -> float:
        """Return an epsilon that holds at `delta` whenever one looks and however runs were chosen; see above."""
        if total == 0.0:
            return 0.0
        if total > 1e300:  # the powers below leave float64
            return math.inf
        j = math.ceil(2.0 * math.log2(total))
        while 2.0 ** (j / 2.0) < total:  # only by rounding
            j += 1
        return self.epsilon(2.0 ** (j / 2.0), delta / (_SHARES * (1 + abs(j)) ** 2))


def best_order(epsilon: float, delta: float) -> float:
    """Return the smallest order at which a Gaussian mechanism can spend nearly the most of (epsilon, delta)."""
    epsilon, delta = validate.positive(epsilon=epsilon), validate.open_unit(delta=delta)
    per_unit = _limits(_ORDERS, epsilon, delta) / _ORDERS
    best = int(np.argmax(per_unit))
    if not per_unit[best] > 0.0:
        raise ArgumentError(
            f"epsilon={epsilon:g}: is too small for a ledger at delta={delta:g}, whatever the order; "
            "composition='gdp' has no such floor"
        )
    return float(_ORDERS[per_unit >= _KEPT * per_unit[best]].min())


def order_for(event: Event, budget: tuple[float, float] | None) -> float:
    """Return the order at which the event takes the smallest share of the limit.

    Without a budget: the order at which the odometer's epsilon is smallest, at delta = 1e-5. The event is a plan before
    its first release, so the order is fixed beforehand. (Any order is valid; the grid is coarse, and the optimum flat
    on its lower side.)
    """
    nothing = DEFAULT_ORDER if budget is None else best_order(*budget)
    charges = event_rdp(event, _GRID)
    if not np.all(np.isfinite(charges)) or not np.any(charges > 0.0):
        return nothing
    if budget is None:
        both = zip(_GRID.tolist(), charges.tolist(), strict=True)
        costs = [PrivacyFilter("rdp", order).odometer(charge, _USUAL_DELTA) for order, charge in both]
        return float(_GRID[int(np.argmin(costs))])
    limits = _limits(_GRID, *budget)
    shares = np.divide(charges, limits, out=np.full_like(charges, np.inf), where=limits > 0.0)
    return float(_GRID[int(np.argmin(shares))])


def _limits(orders: NDArray[np.float64], epsilon: float, delta: float) -> NDArray[np.float64]:
    return epsilon - np.log1p(-1.0 / orders) + (math.log(delta) + np.log(orders)) / (orders - 1.0)


def add(charges: Iterable[float]) -> float:
    """Return the sum, rounded once: the same whatever the order of the runs."""
    values = list(charges)
    return math.inf if math.inf in values else math.fsum(values)
