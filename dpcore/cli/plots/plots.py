"""The picture of a run: held-out accuracy and the epsilon spent, by epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.cli.plots.figure import COLORS, DOTTED, PathLike, drawing, label, note, rows, whole_epochs


def learning_curve(
    path: PathLike,
    epochs: npt.ArrayLike,
    accuracy: npt.ArrayLike,
    epsilon: npt.ArrayLike,
    *,
    title: str = "",
    target_epsilon: float | None = None,
    planned_epochs: float | None = None,
) -> Path:
    """Draw held-out accuracy against epochs, with the epsilon spent on a second axis.

    Parameters
    ----------
    path, title
        See `dpcore.cli.plots.figure`.
    epochs, accuracy, epsilon : arrays, shape (m,)
        Accuracy in [0, 1], after each epoch; the epsilon spent by then (infinite values are left out).
    target_epsilon : float, optional
        Drawn as a thin line on the second axis.
    planned_epochs : float, optional
        Where the horizontal axis ends; a run that stopped before has a line where it did.
    """
    x, shown, spent = rows("epochs, accuracy, epsilon", epochs, accuracy, epsilon)
    finite = np.isfinite(spent)
    with drawing(path, (6.4, 3.8)) as figure:
        axes = figure.subplots()
        axes.plot(x, 100 * shown, color=COLORS[0], marker="o", markersize=3.5, linewidth=1.8)
        label(axes, "epoch", "held-out accuracy (%)", title, fontsize=11)
        axes.yaxis.label.set_color(COLORS[0])
        last, end = float(x[-1]), max(float(x[-1]), planned_epochs or 0.0)
        # From 0: also a single evaluation then has a place in the run.
        axes.set_xlim(0, 1.03 * end)
        if end >= 1:
            whole_epochs(axes)
        if last < end:
            axes.axvline(last, **DOTTED)
            note(axes, f"stopped at {last:.3g}", x=last, right=last < end / 4)
        if finite.any():
            second = axes.twinx()
            second.spines["right"].set_visible(True)
            second.grid(False)
            line: Any = {"linestyle": "--", "linewidth": 1.5, "marker": "s", "markersize": 3.0}
            second.plot(x, np.where(finite, spent, np.nan), color=COLORS[1], **line)
            second.set_ylabel("epsilon spent", color=COLORS[1])
            second.set_ylim(0, 1.08 * max(spent[finite].max(), target_epsilon or 0) or 1)
            if target_epsilon is not None and np.isfinite(target_epsilon):
                second.axhline(target_epsilon, color=COLORS[1], linewidth=0.8, alpha=0.5)
                note(second, "target", y=target_epsilon, left=True)
    return Path(path)
