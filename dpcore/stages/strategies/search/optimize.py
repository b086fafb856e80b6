"""Optimal strategies of every kind, each with its error and the least error of any mechanism."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.stages.strategies.base import Strategy
from dpcore.stages.strategies.search import cache, fixed_order, single
from dpcore.stages.strategies.search.kinds import settings_of, solved, strategy_of
from dpcore.stages.strategies.search.single import Bracket, factor
from dpcore.stages.strategies.search.toeplitz import toeplitz
from dpcore.stages.strategies.workload import Workload
from dpcore.stages.strategies.workloads import error_of, ones

TOLERANCE: Final = 5e-6
TOLERANCE_OF_EPOCHS: Final = 1e-6
MOST_DENSE: Final = 4096
"""Most steps of a dense problem, and of a bound that needs one."""
MOST_EPOCHS: Final = 512
"""Of a bound for several epochs, which takes longer."""

Told = Callable[[Bracket], None]


@dataclass(frozen=True)
class Optimum:
    """A strategy with its certificate.

    Attributes
    ----------
    strategy : Strategy
    error : float
        Root mean squared error of the workload, or its largest, at mu = 1 and in clip norms: `dpcore.strategies.rmse`.
    lower_bound : float or None
        What the error of no mechanism is below, matrix mechanisms of any shape and size among them; None where it is
        not known.
    seconds : float
        That the search took, when it was made.
    finished : bool
        False if it was interrupted: the best so far.
    """

    strategy: Strategy
    error: float
    lower_bound: float | None
    seconds: float
    finished: bool = True

    @property
    def above(self) -> float | None:
        """How far the error is above the bound, as a share of it."""
        return None if self.lower_bound is None else self.error / self.lower_bound - 1


def optimal(
    kind: str,
    workload: Workload | int,
    *,
    epochs: int = 1,
    bands: int | None = None,
    buffers: int | None = None,
    largest: bool = False,
    tolerance: float | None = None,
    keep: bool = True,
    certified: bool = True,
    told: Told | None = None,
) -> Optimum:
    """Return the strategy of a kind with the least error on a workload, and the least error of any mechanism.

    Parameters
    ----------
    kind : {"dense", "banded", "banded-toeplitz", "toeplitz", "blt", "banded-inverse", "bifr", "lambda-cgd"}
    workload : Workload or int
        A number of steps stands for that of plain SGD, prefix sums.
    epochs : int
        How often an example takes part: at j, j + b, j + 2b, ... with b = ceil(steps / epochs), in a fixed order.
    bands : int, optional
        Of "banded" and "banded-toeplitz", by default 32 or all steps of an epoch where these are fewer; of
        "banded-inverse" and "bifr", by default 32 or all steps.
    buffers : int, optional
        Of "blt"; 4 by default.
    largest : bool
        Minimize the largest error of any step instead of the mean one; for "dense" and one epoch.
    tolerance : float, optional
        How far above the least error a dense strategy may be, as a share of it; by default 5e-6, or 1e-6 for several
        epochs.
    keep : bool
        Look the problem up among the solved ones on disk, and keep it there (`dpcore.strategies.cache_folder`).
    certified : bool
        Whether to look for the bound, too, which may take longer than all else.
    told : callable, optional
        Told of every bracket of a dense search.

    Raises
    ------
    ArgumentError
        For a kind that does not fit the workload or the participation.

    Notes
    -----
    Ctrl-C ends a dense search with the best strategy so far, which is not `finished`.
    """
    workload = _workload(workload)
    steps = workload.steps
    epochs = validate.integer(1, epochs=epochs)
    if epochs > steps:
        raise ArgumentError(f"epochs={epochs}: must be at most {steps}, the number of steps")
    period = -(-steps // epochs)
    settings = settings_of(kind, bands, buffers, period, steps)
    usual = TOLERANCE if epochs == 1 else TOLERANCE_OF_EPOCHS
    tolerance = usual if tolerance is None else validate.positive(tolerance=tolerance)
    if largest and (kind != "dense" or epochs > 1):
        raise ArgumentError(f"largest=True: is for kind='dense' and epochs=1, not for {kind!r} and {epochs}")
    if steps > MOST_DENSE and kind in ("dense", "banded"):
        raise ArgumentError(
            f"steps={steps}: must be at most {MOST_DENSE} for kind={kind!r}; take 'banded-toeplitz' or 'blt'"
        )
    problem = {"kind": kind, "workload": workload.describe()["sha256"], "epochs": epochs, "largest": largest,
               "tolerance": tolerance, "certified": certified, **settings}  # fmt: skip
    found = cache.load(problem) if keep else None
    if found is None:
        begun = time.monotonic()
        if kind == "dense":
            found = _dense(workload, epochs, period, largest, tolerance, told)
        else:
            found = {**solved(kind, workload, epochs, period, settings), "finished": True}
            found["bound"] = squared_bound(workload, epochs, keep=keep) if certified else 0.0
        found["seconds"] = time.monotonic() - begun
        if keep and found["finished"]:
            cache.save(problem, found)
    strategy, bound = strategy_of(kind, found, steps), float(found["bound"])
    error = error_of(strategy, workload, epochs, largest=largest)
    known = math.sqrt(bound) if bound > 0 else None
    return Optimum(strategy, error, known, float(found["seconds"]), bool(found["finished"]))


def lower_bound(workload: Workload | int, *, epochs: int = 1, largest: bool = False, tolerance: float = 1e-4) -> float:
    """Return what the error of no mechanism is below, within `tolerance` of the least; arguments as of `optimal`.

    Raises
    ------
    ArgumentError
        For more than 4,096 steps, where only that of prefix sums in one epoch is known (and there within 1.8 %).
    """
    workload = _workload(workload)
    bound = squared_bound(workload, epochs, largest=largest, tolerance=tolerance)
    if bound <= 0:
        raise ArgumentError(
            f"workload of {workload.steps} steps with epochs={epochs}: must have at most {MOST_DENSE} in one epoch or "
            f"{MOST_EPOCHS} in several, or be prefix sums in one epoch"
        )
    return math.sqrt(bound)


def squared_bound(
    workload: Workload, epochs: int, *, largest: bool = False, tolerance: float = 1e-4, keep: bool = True
) -> float:
    """Return the square of `lower_bound`, 0 where none is known."""
    if epochs == 1 and not largest and workload.steps <= MOST_DENSE:
        quick = single.quick_bound(workload, tolerance)
        if quick is not None:
            return quick
    if workload.steps <= MOST_DENSE and (epochs == 1 or workload.steps <= MOST_EPOCHS):
        dense = optimal("dense", workload, epochs=epochs, largest=largest, tolerance=tolerance, keep=keep)
        return 0.0 if dense.lower_bound is None else dense.lower_bound**2
    if epochs == 1 and not largest and np.array_equal(workload.inverse, ones(workload.steps).inverse):
        # lambda of ones, with the singular values of prefix sums: 1 / (2 sin((2 j - 1) pi / (4 n + 2))).
        n = workload.steps
        return float((0.5 / np.sin((2 * np.arange(1, n + 1) - 1) * np.pi / (4 * n + 2))).sum() ** 2) / n**2
    return 0.0


def _workload(workload: Any) -> Workload:
    if isinstance(workload, Workload):
        return workload
    if not isinstance(workload, int | np.integer):
        raise ArgumentTypeError(
            f"workload={workload!r}: must be a number of steps, or a dpcore.strategies.Workload, as "
            "dpcore.strategies.workloads.momentum(...) returns"
        )
    return ones(validate.integer(1, steps=workload))


def _dense(
    workload: Workload, epochs: int, period: int, largest: bool, tolerance: float, told: Told | None
) -> dict[str, Any]:
    found: Iterator[Bracket] = single.brackets(workload, largest)
    if epochs > 1:
        # To begin with: any with so many bands has the pattern, whatever the workload.
        series = toeplitz(ones(workload.steps), period, epochs, period)
        start = strategy_of("banded-toeplitz", {"series": series}, workload.steps)
        matrix = start.matrix(workload.steps)
        found = fixed_order.brackets(workload, period, matrix.T @ matrix)
    best, finished = Bracket(np.eye(workload.steps), np.inf, 0.0), True
    try:
        for bracket in found:
            best = bracket
            if told is not None:
                told(bracket)
            if bracket.gap <= tolerance:
                break
    except KeyboardInterrupt:
        finished = False
    return {"matrix": factor(best.square), "bound": best.lower_bound, "finished": finished}
