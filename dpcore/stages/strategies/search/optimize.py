"""Optimal strategies of every kind, each with its error and the least error of any mechanism."""

import hashlib
import json
import math
import os
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.spec.whole_file import whole_file
from dpcore.stages.strategies.base import Strategy
from dpcore.stages.strategies.kinds import BLT, BandedInverseToeplitz, BandedToeplitz, from_matrix
from dpcore.stages.strategies.search import matrices
from dpcore.stages.strategies.search.matrices import Bracket, factor
from dpcore.stages.strategies.search.series import banded_inverse, blt, toeplitz
from dpcore.stages.strategies.workloads import Workload, error_of, ones

# Solved problems on disk: one file each, named by the problem and by the version of the search.


VERSION: Final = 2
"""Of the searches: a file of another version is another problem's."""


def folder() -> Path:
    """Return the folder of solved problems: ``DPCORE_CACHE_DIR``, or the user's cache folder."""
    base = os.environ.get("DPCORE_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dpcore" / "strategies"


def looked_up(problem: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the saved solution of a problem; None if there is none, or the file is damaged."""
    path = _path(problem)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            content = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None
    arrays = {name: value for name, value in content.items() if value.dtype.kind in "fb" and np.isfinite(value).all()}
    return arrays if arrays.keys() == content.keys() and {"bound", "seconds"} <= arrays.keys() else None


def keep_solved(problem: Mapping[str, Any], solution: Mapping[str, Any]) -> None:
    """Save a solution; if it cannot be written, it is computed again next time."""
    path = _path(problem)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            np.savez(file, allow_pickle=False, **{name: np.asarray(value) for name, value in solution.items()})


def _path(problem: Mapping[str, Any]) -> Path:
    text = json.dumps({"version": VERSION, **problem}, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npz"


# The numbers of each kind of strategy, and its settings.


KINDS: Final = ("dense", "banded-toeplitz", "blt", "banded-inverse")
WITH_BANDS: Final = ("banded-toeplitz", "banded-inverse")


def settings_of(kind: str, bands: int | None, buffers: int | None, period: int, steps: int) -> dict[str, int]:
    """Return the settings of a kind, checked; `period` is the number of steps between two of an example's."""
    validate.choice(KINDS, kind=kind)
    if bands is not None and kind not in WITH_BANDS:
        raise ArgumentError(f"bands={bands}: is for kind={', '.join(map(repr, WITH_BANDS))}, not for {kind!r}")
    if buffers is not None and kind != "blt":
        raise ArgumentError(f"buffers={buffers}: is for kind='blt', not for {kind!r}")
    if kind == "blt":
        return {"buffers": validate.integer(1, buffers=4 if buffers is None else buffers)}
    if kind not in WITH_BANDS:
        return {}
    most, why = period, "the steps between two of an example's; with more, its columns overlap"
    if kind == "banded-inverse":
        most, why = steps, "the number of steps"
    count = validate.integer(1, bands=min(32, most) if bands is None else bands)
    if count > most:
        raise ArgumentError(f"bands={count}: must be at most {most}, {why}")
    return {"bands": count}


def solved(kind: str, workload: Workload, epochs: int, period: int, settings: dict[str, int]) -> dict[str, Any]:
    """Return the numbers of the best strategy of a kind that has few of them."""
    if kind == "blt":
        scales, decays = blt(workload, settings["buffers"], epochs, period)
        return {"scales": scales, "decays": decays}
    search = banded_inverse if kind == "banded-inverse" else toeplitz
    return {"series": search(workload, settings["bands"], epochs, period)}


def strategy_of(kind: str, solution: dict[str, Any], steps: int) -> Any:
    """Return the strategy that is made of these numbers."""
    if kind == "dense":
        return from_matrix(solution["matrix"])
    if kind == "blt":
        return BLT(solution["scales"].tolist(), solution["decays"].tolist(), steps)
    series = tuple(solution["series"].tolist())
    return BandedToeplitz(series) if kind == "banded-toeplitz" else BandedInverseToeplitz(series, steps)


TOLERANCE: Final = 5e-6
TOLERANCE_OF_EPOCHS: Final = 1e-6
MOST_DENSE: Final = 4096
"""Most steps of a dense problem, and of a bound that needs one."""
MOST_EPOCHS: Final = 512
"""Of a bound for several epochs, which takes longer."""


@dataclass(frozen=True)
class Optimum:
    """A strategy with its certificate.

    Attributes
    ----------
    strategy : Strategy
    error : float
        Root mean squared error of the workload at mu = 1 and in clip norms: `dpcore.strategies.rmse`.
    lower_bound : float or None
        No mechanism has a smaller error, including matrix mechanisms of any shape and size; None if unknown.
    seconds : float
        That the search took, when it was made.
    """

    strategy: Strategy
    error: float
    lower_bound: float | None
    seconds: float

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
    tolerance: float | None = None,
    keep: bool = True,
    certified: bool = True,
) -> Optimum:
    """Return the strategy of a kind with the least error on a workload, and the least error of any mechanism.

    Parameters
    ----------
    kind : {"dense", "banded-toeplitz", "blt", "banded-inverse"}
    workload : Workload or int
        A number of steps means prefix sums, the workload of plain SGD.
    epochs : int
        How often an example takes part: at j, j + b, j + 2b, ... with b = ceil(steps / epochs), in a fixed order.
    bands : int, optional
        Of "banded-toeplitz", by default 32, or all steps of an epoch if these are fewer; of "banded-inverse", by
        default 32 or all steps.
    buffers : int, optional
        Of "blt"; 4 by default.
    tolerance : float, optional
        How far above the least error a dense strategy may be, as a share of it; by default 5e-6, or 1e-6 for several
        epochs.
    keep : bool
        Look the problem up among the solved ones on disk, and save it there (`dpcore.strategies.cache_folder`).
    certified : bool
        Whether to compute the bound, too, which may take longer than all else.

    Raises
    ------
    ArgumentError
        For a kind that does not fit the workload or the participation.
    """
    workload, epochs = problem_of(workload, epochs)
    steps = workload.steps
    period = -(-steps // epochs)
    settings = settings_of(kind, bands, buffers, period, steps)
    usual = TOLERANCE if epochs == 1 else TOLERANCE_OF_EPOCHS
    tolerance = usual if tolerance is None else validate.positive(tolerance=tolerance)
    if steps > MOST_DENSE and kind == "dense":
        raise ArgumentError(
            f"steps={steps}: must be at most {MOST_DENSE} for kind={kind!r}; take 'banded-toeplitz' or 'blt'"
        )
    problem = {"kind": kind, "workload": workload.describe()["sha256"], "epochs": epochs,
               "tolerance": tolerance, "certified": certified, **settings}  # fmt: skip
    solution = looked_up(problem) if keep else None
    if solution is None:
        begun = time.monotonic()
        if kind == "dense":
            solution = _dense(workload, epochs, period, tolerance)
        else:
            solution = solved(kind, workload, epochs, period, settings)
            solution["bound"] = squared_bound(workload, epochs, keep=keep) if certified else 0.0
        solution["seconds"] = time.monotonic() - begun
        if keep:
            keep_solved(problem, solution)
    strategy, bound = strategy_of(kind, solution, steps), float(solution["bound"])
    error = error_of(strategy, workload, epochs)
    known = math.sqrt(bound) if bound > 0 else None
    return Optimum(strategy, error, known, float(solution["seconds"]))


def lower_bound(workload: Workload | int, *, epochs: int = 1, tolerance: float = 1e-4) -> float:
    """Return a bound that no mechanism's error is below, within `tolerance` of the least; arguments as in `optimal`.

    Raises
    ------
    ArgumentError
        For more than 4,096 steps, unless they are prefix sums in one epoch (known within 1.8 %).
    """
    workload, epochs = problem_of(workload, epochs)
    bound = squared_bound(workload, epochs, tolerance=tolerance)
    if bound <= 0:
        raise ArgumentError(
            f"workload of {workload.steps} steps with epochs={epochs}: must have at most {MOST_DENSE} in one epoch or "
            f"{MOST_EPOCHS} in several, or be prefix sums in one epoch"
        )
    return math.sqrt(bound)


def squared_bound(workload: Workload, epochs: int, *, tolerance: float = 1e-4, keep: bool = True) -> float:
    """Return the square of `lower_bound`, 0 if none is known."""
    if epochs == 1 and workload.steps <= MOST_DENSE:
        quick = matrices.quick_bound(workload, tolerance)
        if quick is not None:
            return quick
    if workload.steps <= (MOST_DENSE if epochs == 1 else MOST_EPOCHS):
        dense = optimal("dense", workload, epochs=epochs, tolerance=tolerance, keep=keep)
        return 0.0 if dense.lower_bound is None else dense.lower_bound**2
    if epochs == 1 and np.array_equal(workload.inverse, ones(workload.steps).inverse):
        # lambda of ones, with the singular values of prefix sums: 1 / (2 sin((2 j - 1) pi / (4 n + 2))).
        n = workload.steps
        return float((0.5 / np.sin((2 * np.arange(1, n + 1) - 1) * np.pi / (4 * n + 2))).sum() ** 2) / n**2
    return 0.0


def problem_of(workload: Any, epochs: int) -> tuple[Workload, int]:
    """Return the workload (of a number of steps: prefix sums) and the number of epochs, checked."""
    if isinstance(workload, int | np.integer):
        workload = ones(validate.integer(1, steps=workload))
    if not isinstance(workload, Workload):
        raise ArgumentTypeError(
            f"workload={workload!r}: must be a number of steps, or a dpcore.strategies.Workload, as "
            "dpcore.strategies.workloads.momentum(...) returns"
        )
    epochs = validate.integer(1, epochs=epochs)
    if epochs > workload.steps:
        raise ArgumentError(f"epochs={epochs}: must be at most {workload.steps}, the number of steps")
    return workload, epochs


def _dense(workload: Workload, epochs: int, period: int, tolerance: float) -> dict[str, Any]:
    brackets: Iterator[Bracket] = matrices.brackets(workload)
    if epochs > 1:
        # A start: any strategy with `period` bands has the pattern, whatever the workload.
        root = BandedToeplitz(tuple(toeplitz(ones(workload.steps), period, epochs, period).tolist()))
        matrix = root.matrix(workload.steps)
        brackets = matrices.brackets_of_epochs(workload, period, matrix.T @ matrix)
    for best in brackets:
        if best.gap <= tolerance:
            break
    return {"matrix": factor(best.square), "bound": best.lower_bound}
