"""Runs fixed before anything was released: their plans may use the whole budget, as the tightest accountant counts it.

A filter pays for freedom: later runs may be chosen by earlier results. What nobody has looked at yet needs no such
freedom. When the first row of a ledger is reserved, the runs that have been begun are *fixed*: noise, rates and numbers
of steps of their plans do not depend on any result. One entry, "fix", says which they are, what all of their plans
together cost, and at which Renyi order the ledger adds up from then on. Its transaction is that of the first
reservation, so all of it is a constant of what follows. Say F for the fixed runs, rho for the sum of the charges of
their plans, R for the filter's limit.

**F alone.** The rows of F's plans are together as private as the composition of the planned events, in whatever order
they are interleaved, wherever each run ends, and however parameters and learning rates follow the results. Take two
neighboring data sets. A step of an event with the pair (P_t, Q_t) that dominates it is, whatever came before, a random
function of one draw from P_t or Q_t (Blackwell). The rows of a matrix mechanism with sensitivity s and noise sigma,
whose squared moves add up to at most s^2 with certainty, are random functions of the increments of one Brownian motion
with drift, hence of one draw from N(0, 1) or N(s / sigma, 1) (Smith and Thakurta 2022 have the same). So make all draws
of F beforehand, independent of each other, and uncover them as they are asked for: the transcript is post-processing of
the product of the pairs, and what is never uncovered is ignored. (In general: Vadhan and Zhang 2023, for concurrent
composition of anything that has a trade-off curve.) PLD, or any accountant, may therefore decide on F as a whole.

**All others** (begun later; rows after a fork that are in no plan; steps beyond the plan) may depend on results.

* If rho <= R, the filter decides on every row, those of F included, and counts what was reserved. The charges add up to
  at most R with certainty, so the transcript is within the budget (`dpcore.ledger.privacy_filter`), however early the
  runs of F end. Rows of F's plans that a living process may still come to are kept free for it; that is a courtesy.
* If rho > R, every row of F's plans is granted, and nothing else, ever: the transcript is F's alone. Rows after a fork
  are granted as far as all that the run releases remains a part of its plan (`within`). The rest of a run
  that ends early is not given to others: where it ends may depend on results, and no theorem adds up a plan by PLD and
  what was chosen after it.

Which of the two holds is known before anything is released. F is found greedily: the run that asks for the first row,
then the others that living processes hold, in the order in which they were begun, as long as all fit the budget. Where
not even the first fits, F is empty, and the filter decides.

References
----------
Vadhan, Zhang, "Concurrent Composition Theorems for Differential Privacy", 2023.
Smith, Thakurta, "Fully Adaptive Composition for Gaussian Differential Privacy", 2022.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from dpcore.accounting import Composed, Event, smallest_epsilon
from dpcore.accounting.phases import phases


@dataclass(frozen=True)
class Fixed:
    """What the entry "fix" says; `order` and `limit` are the filter's from here on."""

    runs: tuple[str, ...]  # that the budget affords as planned; none in a ledger without a budget
    event: dict[str, object]  # all their plans, as JSON values
    charge: float  # of that, to the filter
    epsilon: float  # of that, by the tightest accountant at the budget's delta
    order: float
    limit: float | None

    @property
    def alone(self) -> bool:
        """Whether nothing but the plans of these runs will ever be granted."""
        return self.limit is not None and self.charge > self.limit


def affords(budget: tuple[float, float], event: Event) -> bool:
    """Whether an event that is fixed beforehand is (epsilon, delta)-private."""
    return smallest_epsilon(event, budget[1])[0] <= budget[0]


def within(planned: Event, event: Event) -> bool:
    """Whether what a run released is a part of its plan in spite of abandoned rows, as fixed beforehand as the rest.

    It is where it has the kind of step that was planned, no more often: each row draws its pair anew, whichever branch
    it belongs to. It is for Gaussian mechanisms where mu is at most that of the plan: whatever they were asked, their
    rows are increments of the one Brownian motion that the plan uncovers.
    """
    if event.adjacency != planned.adjacency:
        return False
    if type(event) is type(planned) and "steps" in {item.name for item in fields(planned)}:
        steps: int = event.steps  # type: ignore[attr-defined]
        if steps <= planned.steps and replace(planned, steps=steps) == event:  # type: ignore[attr-defined, call-arg]
            return True
    whole, part = phases(planned), phases(event)
    if whole is None or part is None or whole.steps or part.steps:
        return False
    return part.mu <= whole.mu


def choose(first: tuple[str, Event], others: Iterable[tuple[str, Event]], budget: tuple[float, float]) -> list[str]:
    """Return which runs are fixed beforehand: the first, and of the others as many as the budget affords; see above."""
    if not affords(budget, first[1]):
        return []
    runs, plans = [first[0]], [first[1]]
    for run_id, plan in others:
        if affords(budget, Composed((*plans, plan))):
            runs.append(run_id)
            plans.append(plan)
    return runs
