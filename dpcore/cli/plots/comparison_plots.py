"""The picture of a comparison: accuracy on the way, and every final run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dpcore.cli.intervals import mean_interval
from dpcore.cli.plots.figure import COLORS, GRAY, PathLike, drawing, whole_epochs
from dpcore.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_TICKS = 6
_MARKERS = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Curves:
    """Held-out accuracy in [0, 1] of several seeds, shape (seeds, len(epochs)), and the epsilon spent by each epoch."""

    epochs: tuple[float, ...]
    accuracy: npt.ArrayLike
    epsilon: tuple[float, ...] = ()


def by_epsilon(path: PathLike, panels: Mapping[str, Mapping[str, Curves]], *, title: str = "") -> Path:
    """Draw a column for each panel, by title: accuracy by epoch above, the final runs below.

    A contestant has the same color in every panel.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    if not names:
        raise ArgumentError("panels: hold no contestant; must have at least one")
    for panel in panels.values():
        for name, curves in panel.items():
            shape = np.shape(curves.accuracy)
            if len(shape) != 2 or shape[1] != len(curves.epochs) or not math.prod(shape):
                raise ArgumentError(f"panels: {name!r} has shape {shape}; must be (seeds, {len(curves.epochs)})")
    height = 3.3 + 1.3 + 0.3 * len(names)
    several = any(np.shape(curves.accuracy)[0] > 1 for panel in panels.values() for curves in panel.values())
    said = "bars: 95 % interval of the mean over seeds" if several else "one run each"
    title = f"{title}\n{said}" if title else said
    with drawing(path, (max(6.4, 4.6 * len(panels)), height), title) as figure:
        ratios = (3.3, 0.6 + 0.3 * len(names))
        axes = figure.subplots(2, len(panels), squeeze=False, height_ratios=ratios)
        for column, (words, panel) in enumerate(panels.items()):
            way, end = axes[0][column], axes[1][column]
            for index, name in enumerate(names):
                if name in panel:
                    _way(way, index, name, panel[name], (index - (len(names) - 1) / 2) * _apart(panel, len(names)))
                    _end(end, index, panel[name])
            way.set_title(words)
            way.set_xlabel("epoch")
            _epsilon_ticks(way, list(panel.values()))
            end.set_yticks(range(len(names)), names if column == 0 else [""] * len(names), color="#222222")
            end.set_ylim(len(names) - 0.4, -0.6)
            end.grid(axis="y", visible=False)
            end.margins(x=0.14)
            end.set_xlabel("held-out accuracy at the end (%)")
        axes[0][0].set_ylabel("held-out accuracy (%)")
        axes[0][0].legend(loc="lower right", fontsize=8)
    return Path(path)


def _style(index: int) -> tuple[str, str]:
    return COLORS[index % len(COLORS)], _MARKERS[index // len(COLORS) % len(_MARKERS)]


def _apart(panel: Mapping[str, Curves], count: int) -> float:
    """Return how far to the side of the last contestant one is drawn, so that bars do not hide each other."""
    gaps = [float(np.diff(curves.epochs).min()) for curves in panel.values() if len(curves.epochs) > 1]
    return 0.3 * min(gaps, default=1.0) / count


def _way(axes: Axes, index: int, name: str, curves: Curves, aside: float) -> None:
    color, marker = _style(index)
    values, x = 100 * np.asarray(curves.accuracy, float), np.asarray(curves.epochs, float) + aside
    intervals = [mean_interval(column) for column in values.T]
    mean = np.array([interval.center for interval in intervals])
    half = np.nan_to_num([interval.half_width for interval in intervals])
    axes.plot(x, mean, color=color, marker=marker, markersize=3.5, linewidth=1.6, label=name)
    # With few seeds the interval can be wider than the range of an accuracy.
    axes.vlines(x, np.clip(mean - half, 0, 100), np.clip(mean + half, 0, 100), color=color, linewidth=1.2, alpha=0.5)
    whole_epochs(axes)
    if len(x) > 1:
        axes.margins(x=0.02)
    else:
        axes.set_xlim(curves.epochs[0] - 0.5, curves.epochs[0] + 0.5)
        axes.set_xticks(curves.epochs)


def _epsilon_ticks(axes: Axes, curves: list[Curves]) -> None:
    """Say on a second horizontal axis how much epsilon some of the epochs had spent, where that is the same for all."""
    epochs, epsilon = curves[0].epochs, curves[0].epsilon
    if len({(item.epochs, item.epsilon) for item in curves}) > 1 or not epsilon or not np.isfinite(epsilon).all():
        return
    # Every so many epochs, back from the last one: so the gaps are equal.
    chosen = range(len(epochs) - 1, -1, -max(1, math.ceil(len(epochs) / _MOST_TICKS)))
    second = axes.secondary_xaxis(-0.17)
    shown = [f"{epsilon[index]:.2g}" for index in chosen]
    second.set_xticks([epochs[index] for index in chosen], shown, color=GRAY, fontsize=9)
    second.set_xlabel("epsilon spent", color=GRAY, fontsize=9)
    second.spines["bottom"].set_visible(False)
    second.tick_params(length=0)


def _end(axes: Axes, index: int, curves: Curves) -> None:
    color, marker = _style(index)
    final = 100 * np.asarray(curves.accuracy, float)[:, -1]
    interval = mean_interval(final)
    axes.plot(final, np.full(len(final), index + 0.22), "o", color=color, markersize=3.5, alpha=0.45, markeredgewidth=0)
    error = None
    if not math.isnan(interval.half_width):
        # With few seeds the interval can be wider than the range of an accuracy.
        error = [[min(interval.half_width, room)] for room in (interval.center, max(100 - interval.center, 0.0))]
    axes.errorbar(
        interval.center, index, xerr=error, color=color, marker=marker, markersize=5.5, capsize=3.5, linewidth=1.5
    )
    style: Any = {"ha": "center", "fontsize": 8, "color": color if index % len(COLORS) < 4 else GRAY}
    told, place = f"{interval.center:.2f}", (interval.center, index)
    axes.annotate(told, place, xytext=(0, 6), textcoords="offset points", **style)
