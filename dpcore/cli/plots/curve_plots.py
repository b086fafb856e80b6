"""Pictures of guarantees: delta over epsilon, what an attacker can do, and epsilon over the steps of a run.

Every curve is a band between certified ends; where the ends are closer than a line is wide, the band is that line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpcore.cli.plots.plots import _GRAY, COLORS, _figure
from dpcore.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = npt.NDArray[np.float64]


def delta_curve(
    path: str | os.PathLike[str],
    epsilon: npt.ArrayLike,
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    *,
    title: str = "",
    dataset_size: int | None = None,
) -> Path:
    """Draw delta over epsilon.

    Parameters
    ----------
    path : path
        The file to write; its ending decides the format.
    epsilon, lower, upper : arrays, shape (m,)
        Certified ends of delta at each epsilon, in [0, 1]; points at 0 are left out.
    title : str, optional
        First line of the picture.
    dataset_size : int, optional
        n; 1/n is then drawn as a line.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ArgumentError
        Where lengths do not fit or no point is above 0.
    DpcoreError
        Where matplotlib is not installed.
    """
    x, low, high = _checked(epsilon, lower, upper, "epsilon, lower, upper")
    shown = high > 0
    if not shown.any():
        raise ArgumentError("upper: is 0 at every epsilon; must be above 0 somewhere, or there is nothing to draw")
    with _figure(path, (6.4, 4.0)) as figure:
        axes = figure.subplots()
        # A lower end of 0 has no place on a scale of powers of ten.
        _band(axes, x[shown], np.maximum(low[shown], high[shown].min() / 10), high[shown])
        axes.set_yscale("log")
        axes.set_xlabel("epsilon")
        axes.set_ylabel("delta")
        axes.set_title(title, fontsize=9.5, x=0.0, wrap=True)
        if dataset_size is not None:
            axes.axhline(1 / dataset_size, color=_GRAY, linewidth=0.8, linestyle=":")
            _note(axes, f"1/n, n = {dataset_size:,}", 1 / dataset_size)
    return Path(path)


def trade_off_curve(
    path: str | os.PathLike[str],
    false_positive_rate: npt.ArrayLike,
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    *,
    title: str = "",
    advantage: float | None = None,
) -> Path:
    """Draw the best true positive rate of an attacker over the false positive rate, plain and in powers of ten.

    Parameters
    ----------
    path : path
        The file to write; its ending decides the format.
    false_positive_rate, lower, upper : arrays, shape (m,)
        Certified ends of the best true positive rate at each false positive rate.
    title : str, optional
        First line of the picture.
    advantage : float, optional
        The largest difference of the two rates, for the legend.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ArgumentError
        Where lengths do not fit.
    DpcoreError
        Where matplotlib is not installed.
    """
    x, low, high = _checked(false_positive_rate, lower, upper, "false_positive_rate, lower, upper")
    label = "best attacker" if advantage is None else f"best attacker: advantage {advantage:.3g}"
    with _figure(path, (9.0, 4.2)) as figure:
        plain, powers = figure.subplots(1, 2)
        for axes in (plain, powers):
            _band(axes, x, low, high, label)
            axes.plot(x, x, color=_GRAY, linewidth=0.9, linestyle="--", label="guessing")
            axes.set_xlabel("false positive rate")
        plain.set_ylabel("true positive rate")
        plain.set_xlim(-0.01, 1.01)
        plain.set_ylim(-0.01, 1.01)
        plain.legend(loc="lower right")
        powers.set_xscale("log")
        powers.set_yscale("log")
        powers.set_title("the same in powers of ten", fontsize=9, color=_GRAY)
        figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    return Path(path)


def steps_curve(
    path: str | os.PathLike[str],
    steps: npt.ArrayLike,
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    *,
    title: str = "",
    taken: int | None = None,
    unit: str = "steps",
) -> Path:
    """Draw epsilon over the steps of a run.

    Parameters
    ----------
    path : path
        The file to write; its ending decides the format.
    steps, lower, upper : arrays, shape (m,)
        Certified ends of epsilon after so many steps; infinite ones are left out.
    title : str, optional
        First line of the picture.
    taken : int, optional
        Steps taken so far, marked.
    unit : str
        What is counted: steps, or epochs.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ArgumentError
        Where lengths do not fit or epsilon is infinite throughout.
    DpcoreError
        Where matplotlib is not installed.
    """
    x, low, high = _checked(steps, lower, upper, "steps, lower, upper")
    shown = np.isfinite(high)
    if not shown.any():
        raise ArgumentError("upper: epsilon is infinite after every number of steps; there is nothing to draw")
    with _figure(path, (6.4, 4.0)) as figure:
        axes = figure.subplots()
        _band(axes, x[shown], low[shown], high[shown])
        axes.set_xlabel(unit)
        axes.set_xlim(left=0)
        axes.set_ylabel("epsilon")
        axes.set_title(title, fontsize=9.5, x=0.0, wrap=True)
        axes.set_ylim(0, 1.08 * float(high[shown].max()) or 1)
        if taken is not None:
            axes.axvline(taken, color=_GRAY, linewidth=0.8, linestyle=":")
            axes.annotate(
                f"{taken:,} taken",
                (taken, 0.02),
                xycoords=("data", "axes fraction"),
                xytext=(-3, 0),
                textcoords="offset points",
                ha="right",
                color=_GRAY,
                fontsize=8,
            )
    return Path(path)


def _checked(x: npt.ArrayLike, lower: npt.ArrayLike, upper: npt.ArrayLike, names: str) -> tuple[Array, Array, Array]:
    values = tuple(np.asarray(value, np.float64) for value in (x, lower, upper))
    if not values[0].shape == values[1].shape == values[2].shape or values[0].ndim != 1 or not values[0].size:
        shapes = ", ".join(str(value.shape) for value in values)
        raise ArgumentError(f"{names}: have shapes {shapes}; must be (m,), the same m, at least one")
    return values[0], values[1], values[2]


def _band(axes: Axes, x: Array, low: Array, high: Array, label: str = "certified upper end") -> None:
    axes.fill_between(x, low, high, color=COLORS[1], alpha=0.35, linewidth=0, label="between the certified ends")
    axes.plot(x, high, color=COLORS[0], linewidth=1.8, label=label)


def _note(axes: Axes, text: str, height: float) -> None:
    axes.annotate(
        text,
        (0.99, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color=_GRAY,
        fontsize=8,
    )
