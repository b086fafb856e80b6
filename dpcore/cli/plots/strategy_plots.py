"""Pictures of strategies: their errors beside the least one, and their noise over time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dpcore.cli.plots.figure import COLORS, Array, PathLike, drawing, label


def strategies_picture(
    path: PathLike, errors: Mapping[str, float], bound: float, noise: Mapping[str, Array], *, title: str = ""
) -> Path:
    """Draw the error of each strategy and the bound, and the standard deviation of each one's noise by step.

    `noise` has the variance of each step's noise over that of the seed noise, (T,), the strategies scaled to column
    norms of at most 1.
    """
    with drawing(path, (11.0, 4.2), title) as figure:
        bars, lines = figure.subplots(1, 2)
        names = sorted(errors, key=lambda name: -errors[name])
        bars.plot([errors[name] for name in names], names, "o", color=COLORS[0])
        bars.axvline(bound, color=COLORS[1], linewidth=1.6, label=f"no mechanism is below {bound:.4g}")
        bars.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1, 0.12))
        bars.set_xscale("log")
        bars.grid(axis="y", visible=False)
        label(bars, "root mean squared error at mu = 1 (clip norms)", "", "Error")
        for i, name in enumerate(names):
            deviation = np.sqrt(noise[name])
            steps = np.arange(1, len(deviation) + 1)
            dashes = "-" if i < len(COLORS) else "--"
            lines.plot(steps, deviation, color=COLORS[i % len(COLORS)], linestyle=dashes, linewidth=1.4, label=name)
        lines.set_xscale("log")
        lines.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        label(lines, "step", "over the seed noise's", "Standard deviation of a step's noise")
    return Path(path)


def matrices_picture(path: PathLike, matrix: Array, *, title: str = "") -> Path:
    """Draw C and its inverse, (T, T), as maps of their entries; those of the inverse have both signs."""
    from scipy.linalg import solve_triangular

    inverse = solve_triangular(matrix, np.eye(len(matrix)), lower=True)
    with drawing(path, (9.5, 4.4), title) as figure:
        for axes, entries, words in zip(figure.subplots(1, 2), (matrix, inverse), ("C", "its inverse"), strict=True):
            most = float(np.abs(entries).max())
            shown = np.sign(entries) * np.sqrt(np.abs(entries) / most)  # small entries are seen beside the diagonal
            image = axes.imshow(shown, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
            axes.grid(visible=False)
            label(axes, "step of the seed noise" if words != "C" else "step of the sum", "step", words)
            bar = figure.colorbar(image, ax=axes, ticks=[-1, 0, 1], shrink=0.8)
            bar.set_ticklabels([f"{-most:.2g}", "0", f"{most:.2g}"])
    return Path(path)
