"""The strategy for limited memory: it searches those that stream in it, and names the best one."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dpcore.spec import validate
from dpcore.stages.strategies import workloads
from dpcore.stages.strategies.base import LARGEST_GROWTH, Strategy, check_rows
from dpcore.stages.strategies.kinds import BLT, BandedInverseToeplitz, BandedToeplitz, Identity
from dpcore.stages.strategies.search.optimize import optimal, problem_of
from dpcore.stages.strategies.streaming import StreamingCost, in_blocks, streaming_cost
from dpcore.stages.strategies.workloads import Workload

VECTORS: Final = 4
"""Of the parameters' size, that a run's noise keeps by default."""

_ALIKE: Final = 0.01
_MANY: Final = 5000  # with fewer steps, more than two buffers gain less than `_ALIKE`
_DIGITS: Final = 5


@dataclass(frozen=True)
class Recommendation:
    """A strategy that fits, its cost, and how it was chosen.

    Attributes
    ----------
    kind : str
        "identity", or a kind of `dpcore.strategies.optimal`.
    strategy : Strategy
    error : float
        Root mean squared error of the workload at mu = 1, in clip norms.
    cost : StreamingCost
    """

    kind: str
    strategy: Strategy
    error: float
    cost: StreamingCost


def candidates(
    workload: Workload | int, *, epochs: int = 1, vectors: int = VECTORS, rows: int = 1, bands: int | None = None
) -> list[Recommendation]:
    """Return the best strategy of each kind that streams in so much memory, the recommended one first.

    Parameters
    ----------
    workload : Workload or int
        A number of steps means prefix sums. For a workload that changes from step to step the best strategies of
        prefix sums are compared.
    epochs : int
        As in `dpcore.strategies.optimal`.
    vectors : int
        Vectors of the parameters' size that may be kept, 0 or more.
    rows : int
        Rows of noise that may be drawn in a step; each is a pass of the generator over all parameters.
    bands : int, optional
        The most bands that the strategy's matrix may have: for sampling that amplifies banded ones.

    Returns
    -------
    list of Recommendation
        By error; but one that is at most 1 % above the least error and keeps fewer vectors comes first.
    """
    wanted, epochs = problem_of(workload, epochs)
    steps, vectors, rows = wanted.steps, validate.integer(0, vectors=vectors), validate.integer(1, rows=rows)
    period = -(-steps // epochs)
    most = period if bands is None else min(period, validate.integer(1, bands=bands))
    wanted_kinds: list[tuple[str, dict[str, Any]]] = []
    if min(vectors + 1, most) > 1:
        wanted_kinds.append(("banded-toeplitz", {"bands": min(vectors + 1, most)}))
    if bands is None and steps > 1:
        if vectors:
            few, more = min(2, vectors), min(4, vectors)
            buffers = {1, few, more} if steps > _MANY else {1, few}
            wanted_kinds += [("blt", {"buffers": count}) for count in sorted(buffers)]
            wanted_kinds.append(("banded-inverse", {"bands": min(vectors + 1, steps)}))
        if rows > 1:
            wanted_kinds.append(("banded-inverse", {"bands": min(rows, steps)}))
    fitting = [_one("identity", Identity(), wanted, epochs)]
    # Streaming kinds are searched for workloads that do not change: for one that does, they are only compared.
    searched = workloads.ones(steps) if wanted.series() is None else wanted
    for kind, settings in wanted_kinds:
        strategy = _rounded(optimal(kind, searched, epochs=epochs, certified=False, **settings).strategy)
        if kind == "banded-inverse" and strategy.order > vectors:
            strategy = in_blocks(strategy, 1)
        if np.sqrt(strategy.inverse_row_norms(steps).max()) <= LARGEST_GROWTH:
            fitting.append(_one(kind, strategy, wanted, epochs))
    fitting.sort(key=lambda one: one.error)
    near = [one for one in fitting if one.error <= (1.0 + _ALIKE) * fitting[0].error]
    first = min(near, key=lambda one: (one.cost.vectors, one.cost.rows_drawn, one.error))
    return [first, *(one for one in fitting if one is not first)]


def recommend(workload: Workload | int, **settings: Any) -> Recommendation:
    """Return the first of `candidates`, with its arguments."""
    return candidates(workload, **settings)[0]


@dataclass(frozen=True)
class Recommended:
    """A placeholder until a run is known; then the strategy that `recommend` names for its steps and participation.

    Parameters
    ----------
    vectors : int
        Vectors of the parameters' size that the noise may keep.
    momentum : float
        Momentum of the update: the workload is that of SGD with it.
    decay : float or sequence of float, optional
        Of recursive gradients (`dpcore.strategies.workloads.srg`).

    Notes
    -----
    In another environment its numbers may differ in their last digits: they are rounded to five, and listed in
    statements and saved states. To be sure of the same strategy, save it and give it.
    """

    vectors: int = VECTORS
    momentum: float = 0.0
    decay: float | tuple[float, ...] | None = None

    def of(self, steps: int, period: int | None = None, bands: int | None = None) -> Strategy:
        """Return the strategy for a run of `steps` steps, an example's `period` apart, of at most `bands` bands."""
        epochs = 1 if period is None else -(-steps // min(period, steps))
        return recommend(self.workload(steps), epochs=epochs, vectors=self.vectors, bands=bands).strategy

    def workload(self, steps: int) -> Workload:
        """Return the workload for which the strategy is chosen."""
        if self.decay is not None:
            decay: npt.ArrayLike = self.decay if isinstance(self.decay, float) else self.decay[:steps]
            return workloads.srg(steps, decay, self.momentum)
        return workloads.momentum(steps, self.momentum) if self.momentum else workloads.ones(steps)

    def describe(self) -> dict[str, Any]:
        """Return the settings."""
        return {"kind": "recommended", "vectors": self.vectors, "momentum": self.momentum, "decay": self.decay}


def for_run(strategy: Any, steps: int, period: int, bands: int | None) -> Any:
    """Return the strategy of a run; a `Recommended` is resolved, None stays None."""
    if strategy is not None:
        check_rows(strategy.describe()["kind"], steps)
    if isinstance(strategy, Recommended):
        return strategy.of(steps, period, bands)
    return None if strategy is None else strategy.of(steps)


def _one(kind: str, strategy: Strategy, workload: Workload, epochs: int) -> Recommendation:
    return Recommendation(
        kind, strategy, workloads.error_of(strategy, workload, epochs), streaming_cost(strategy, workload.steps)
    )


def _rounded(strategy: Any) -> Any:
    """Return the strategy with numbers of few digits: the last ones are noise of the search."""
    if isinstance(strategy, BLT):
        decays = [1.0 - _digits(1.0 - decay) for decay in strategy.decays]
        return BLT([_digits(scale) for scale in strategy.scales], decays, strategy.steps)
    first = strategy.series[0]
    series = tuple(_digits(value / first) for value in strategy.series)
    return (
        BandedInverseToeplitz(series, strategy.steps)
        if isinstance(strategy, BandedInverseToeplitz)
        else BandedToeplitz(series)
    )


def _digits(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
