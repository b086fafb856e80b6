"""Pictures of guarantees: delta over epsilon, what an attacker can do, and epsilon over the steps of a run.

Every curve is a band between certified ends; where the ends are closer than a line is wide, the band is that line.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpcore.cli.plots.figure import COLORS, DOTTED, GRAY, Array, PathLike, drawing, label, note, rows
from dpcore.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def delta_curve(
    path: PathLike,
    epsilon: npt.ArrayLike,
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    *,
    title: str = "",
    dataset_size: int | None = None,
) -> Path:
    """Draw delta over epsilon, from certified ends of delta in [0, 1], shape (m,); 1/n is a line where n is given.

    Points at 0 are left out, and one must be above.
    """
    x, low, high = rows("epsilon, lower, upper", epsilon, lower, upper)
    shown = high > 0
    if not shown.any():
        raise ArgumentError("upper: is 0 at every epsilon; must be above 0 somewhere, or there is nothing to draw")
    with drawing(path, (6.4, 4.0)) as figure:
        axes = figure.subplots()
        # A lower end of 0 has no place on a scale of powers of ten.
        _band(axes, x[shown], np.maximum(low[shown], high[shown].min() / 10), high[shown])
        axes.set_yscale("log")
        label(axes, "epsilon", "delta", title, fontsize=9.5, x=0.0, wrap=True)
        if dataset_size is not None:
            axes.axhline(1 / dataset_size, **DOTTED)
            note(axes, f"1/n, n = {dataset_size:,}", y=1 / dataset_size)
    return Path(path)


def trade_off_curve(
    path: PathLike,
    false_positive_rate: npt.ArrayLike,
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    *,
    title: str = "",
    advantage: float | None = None,
) -> Path:
    """Draw the best true positive rate of an attacker over the false positive rate, plain and in powers of ten.

    `lower` and `upper`, shape (m,), are certified ends; `advantage`, the largest difference of the two rates, is for
    the legend.
    """
    x, low, high = rows("false_positive_rate, lower, upper", false_positive_rate, lower, upper)
    name = "best attacker" if advantage is None else f"best attacker: advantage {advantage:.3g}"
    with drawing(path, (9.0, 4.2), title) as figure:
        plain, powers = figure.subplots(1, 2)
        for axes in (plain, powers):
            _band(axes, x, low, high, name)
            axes.plot(x, x, color=GRAY, linewidth=0.9, linestyle="--", label="guessing")
        label(plain, "false positive rate", "true positive rate")
        plain.set_xlim(-0.01, 1.01)
        plain.set_ylim(-0.01, 1.01)
        plain.legend(loc="lower right")
        powers.set_xscale("log")
        powers.set_yscale("log")
        label(powers, "false positive rate", "", "the same in powers of ten", fontsize=9, color=GRAY)
    return Path(path)


def steps_curve(
    path: PathLike,
    steps: npt.ArrayLike,
    lower: npt.ArrayLike,
    upper: npt.ArrayLike,
    *,
    title: str = "",
    taken: int | None = None,
    unit: str = "steps",
) -> Path:
    """Draw epsilon over the steps (or epochs: `unit`) of a run, from certified ends, shape (m,); `taken` is marked.

    Infinite ends are left out, and one must be finite.
    """
    x, low, high = rows("steps, lower, upper", steps, lower, upper)
    shown = np.isfinite(high)
    if not shown.any():
        raise ArgumentError("upper: epsilon is infinite after every number of steps; there is nothing to draw")
    with drawing(path, (6.4, 4.0)) as figure:
        axes = figure.subplots()
        _band(axes, x[shown], low[shown], high[shown])
        label(axes, unit, "epsilon", title, fontsize=9.5, x=0.0, wrap=True)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1.08 * float(high[shown].max()) or 1)
        if taken is not None:
            axes.axvline(taken, **DOTTED)
            note(axes, f"{taken:,} taken", x=taken)
    return Path(path)


def _band(axes: Axes, x: Array, low: Array, high: Array, name: str = "certified upper end") -> None:
    axes.fill_between(x, low, high, color=COLORS[1], alpha=0.35, linewidth=0, label="between the certified ends")
    axes.plot(x, high, color=COLORS[0], linewidth=1.8, label=name)
