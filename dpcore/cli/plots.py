"""All pictures: of a comparison, a filter and released gradients.

matplotlib is imported when a picture is drawn, and writes to a file without a display. Every function that draws a
picture puts it in `path` in one move (the path's ending decides the format), with `title` as its first line;
MissingPackageError if matplotlib is not installed. Arrays of one picture have one shape, (m,).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpcore.cli.intervals import mean_interval
from dpcore.errors import MissingPackageError
from dpcore.spec.extras import needs
from dpcore.spec.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
PathLike = str | os.PathLike[str]

# Okabe and Ito's palette: distinct to color-blind readers and in gray.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GRAY = "#6b6b6b"
DOTTED: Any = {"color": GRAY, "linewidth": 0.8, "linestyle": ":"}
_STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GRAY,
    "axes.labelcolor": "#222222", "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "xtick.color": GRAY, "ytick.color": GRAY,
    "legend.frameon": False, "figure.dpi": 150}  # fmt: skip


@contextmanager
def drawing(path: PathLike, size: tuple[float, float], title: str = "") -> Iterator[Figure]:
    """Draw on a new figure and put it in place in one move, so that no half picture is ever seen."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise MissingPackageError(needs("a picture", "matplotlib")) from cause
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=11)
        target = Path(path)
        with whole_file(target) as file:
            figure.savefig(file, format=target.suffix.lower().lstrip("."))


def label(axes: Axes, x: str, y: str, title: str = "", /) -> None:
    """Write a title and the names of both axes."""
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def note(axes: Axes, text: str, *, x: float | None = None, y: float | None = None) -> None:
    """Write a small text left of a vertical line at `x`, or over the right end of a level one at `y`."""
    if y is None:
        at, offset, frame = (x, 0.04), (-4, 0), ("data", "axes fraction")
    else:
        at, offset, frame = (0.99, y), (0, 3), ("axes fraction", "data")
    style: Any = {"ha": "right", "color": GRAY, "fontsize": 8}
    axes.annotate(text, at, xycoords=frame, xytext=offset, textcoords="offset points", **style)


def frequency_axes(axes: Axes, x: Array) -> None:
    """Use powers of ten in both directions, and frequencies from end to end."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x.min(), x.max())


_MARKERS = ("o", "s", "^", "D", "v", "P")
_FREQUENCY = "frequency (cycles per step)"
# Powers of ten, which need no explanation as decibels do, and nothing below one in ten thousand.
_LEAST_POWER = 1e-4


class Curves(NamedTuple):
    """Held-out accuracy in [0, 1] of several seeds, shape (seeds, len(epochs))."""

    epochs: Sequence[float]
    accuracy: npt.ArrayLike


def by_epsilon(path: PathLike, panels: Mapping[str, Mapping[str, Curves]], *, title: str = "") -> None:
    """Draw a column for each panel, by title: accuracy by epoch above, the final runs below.

    A contestant has the same color in every panel.
    """
    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    height = 3.3 + 1.3 + 0.3 * len(names)
    several = any(np.shape(curves.accuracy)[0] > 1 for panel in panels.values() for curves in panel.values())
    said = "bars: 95 % interval of the mean over seeds" if several else "one run each"
    title = f"{title}\n{said}" if title else said
    with drawing(path, (max(6.4, 4.6 * len(panels)), height), title) as figure:
        ratios = (3.3, 0.6 + 0.3 * len(names))
        axes = figure.subplots(2, len(panels), squeeze=False, height_ratios=ratios)
        for column, (words, panel) in enumerate(panels.items()):
            way, end = axes[0][column], axes[1][column]
            # Side by side, so that bars do not hide each other.
            gaps = [float(np.diff(curves.epochs).min()) for curves in panel.values() if len(curves.epochs) > 1]
            apart = 0.3 * min(gaps, default=1.0) / len(names)
            for index, name in enumerate(names):
                if name in panel:
                    _way(way, index, name, panel[name], (index - (len(names) - 1) / 2) * apart)
                    _end(end, index, panel[name])
            way.set_title(words)
            way.set_xlabel("epoch")
            end.set_yticks(range(len(names)), names if column == 0 else [""] * len(names), color="#222222")
            end.set_ylim(len(names) - 0.4, -0.6)
            end.grid(axis="y", visible=False)
            end.margins(x=0.14)
            end.set_xlabel("held-out accuracy at the end (%)")
        axes[0][0].set_ylabel("held-out accuracy (%)")
        axes[0][0].legend(loc="lower right", fontsize=8)


def _style(index: int) -> tuple[str, str]:
    return COLORS[index % len(COLORS)], _MARKERS[index // len(COLORS) % len(_MARKERS)]


def _way(axes: Axes, index: int, name: str, curves: Curves, aside: float) -> None:
    from matplotlib.ticker import MaxNLocator

    color, marker = _style(index)
    values, x = 100 * np.asarray(curves.accuracy, float), np.asarray(curves.epochs, float) + aside
    intervals = [mean_interval(column) for column in values.T]
    mean = np.array([interval.center for interval in intervals])
    half = np.nan_to_num([interval.half_width for interval in intervals])
    axes.plot(x, mean, color=color, marker=marker, markersize=3.5, linewidth=1.6, label=name)
    # With few seeds the interval can be wider than the range of an accuracy.
    axes.vlines(x, np.clip(mean - half, 0, 100), np.clip(mean + half, 0, 100), color=color, linewidth=1.2, alpha=0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(x) > 1:
        axes.margins(x=0.02)
    else:
        axes.set_xlim(curves.epochs[0] - 0.5, curves.epochs[0] + 0.5)
        axes.set_xticks(curves.epochs)


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
    text, place = f"{interval.center:.2f}", (interval.center, index)
    axes.annotate(text, place, xytext=(0, 6), textcoords="offset points", **style)


def filter_picture(
    path: PathLike,
    impulse_response: npt.ArrayLike,
    normalizers: npt.ArrayLike,
    noise_factor: npt.ArrayLike,
    frequencies: npt.ArrayLike,
    power: npt.ArrayLike,
    *,
    cutoff: float | None = None,
    limiting_noise_factor: float | None = None,
    title: str = "",
) -> None:
    """Draw a filter: its memory, its start, the noise it leaves and the frequencies it passes.

    kappa by age, c_t and the share of white noise's variance in the output after each step have shape (T,). `power` is
    |H|^2 at positive frequencies in cycles per step, shape (F,), and `cutoff` the frequency at which it is half.
    """
    kappa, ones, left = (np.asarray(values, float) for values in (impulse_response, normalizers, noise_factor))
    with drawing(path, (9.0, 6.0), title) as figure:
        (memory, start), (spectrum, noise) = figure.subplots(2, 2)
        figure.get_layout_engine().set(wspace=0.06, hspace=0.06)  # type: ignore[union-attr,call-arg]
        steps = np.arange(len(kappa))
        memory.vlines(steps, 0, kappa, color=COLORS[0], linewidth=1.2)
        memory.plot(steps, kappa, color=COLORS[0], marker="o", markersize=3, linestyle="none")
        memory.axhline(0, color=GRAY, linewidth=0.8)
        label(memory, "age of the gradient (steps)", "weight", "Impulse response: the weight of each gradient")
        start.plot(steps + 1, ones, color=COLORS[2], linewidth=1.8)
        start.axhline(1, **DOTTED)
        label(start, "steps taken", "divisor of the output", "Normalizer: the weights so far, added up")
        if np.isfinite(ones).all() and ones.min() >= 0:
            start.set_ylim(0, 1.08 * max(1.0, ones.max()))
        noise.plot(steps + 1, left, color=COLORS[1], linewidth=1.8)
        label(noise, "steps taken", "share of the variance", "Noise left in the output")
        if limiting_noise_factor is not None:
            noise.axhline(limiting_noise_factor, **DOTTED)
            note(noise, f"in the long run {limiting_noise_factor:.3g}", y=limiting_noise_factor)
        if np.isfinite(left).any():
            noise.set_ylim(0, 1.12 * max(left[np.isfinite(left)].max(), 1e-3))
        _response(spectrum, np.asarray(frequencies, float), np.asarray(power, float), cutoff)


def gradient_picture(
    path: PathLike,
    frequencies: npt.ArrayLike,
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    *,
    floor: float = 0.0,
    negative_share: npt.ArrayLike = (),
    title: str = "",
) -> None:
    """Draw the power spectral density of released gradients, and the share of negative second moments.

    The density is per coordinate, at positive frequencies in cycles per step, shape (F,); `floor` is s^2, that of the
    mechanism's noise before the filter. `negative_share` has shape (T,), in [0, 1], or NaN: its picture is left out if
    no value is finite.
    """
    x, raw, filtered, share = (np.asarray(values, float) for values in (frequencies, before, after, negative_share))
    both = bool(np.isfinite(share).any())
    with drawing(path, (9.6, 3.9) if both else (6.4, 3.9), title) as figure:
        panels = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
        axes = panels[0]
        unchanged = np.array_equal(raw, filtered)
        name = "before and after the filter, which changes nothing" if unchanged else "before the filter"
        axes.plot(x, np.where(raw > 0, raw, np.nan), color=COLORS[0], linewidth=1.8, label=name)
        if not unchanged:
            axes.plot(
                x, np.where(filtered > 0, filtered, np.nan), color=COLORS[1], linewidth=1.8, label="after the filter"
            )
        if floor > 0:
            axes.axhline(floor, color=GRAY, linewidth=1.0, linestyle="--", label="noise of the mechanism, before")
        frequency_axes(axes, x)
        shown = np.concatenate([raw[raw > 0], filtered[filtered > 0], [floor] if floor > 0 else []])
        low, high = (0.7 * shown.min(), 1.4 * shown.max()) if shown.size else (0.1, 1.0)
        # Room for the legend above the curves, in a scale of powers of ten.
        axes.set_ylim(low, high * max(3.0, (high / low) ** 0.45))
        axes.legend(loc="upper right", fontsize=9)
        label(axes, _FREQUENCY, "power per coordinate", "Power spectral density of the gradients")
        if both:
            panels[1].plot(np.arange(1, len(share) + 1), 100 * share, color=COLORS[3], linewidth=1.4)
            panels[1].set_ylim(0, max(55.0, min(100.0, 110 * float(np.nanmax(share)))))
            panels[1].axhline(50, **DOTTED)
            label(panels[1], "steps taken", "share of coordinates (%)", "Second moments below zero")


def _response(axes: Axes, x: Array, passed: Array, cutoff: float | None) -> None:
    shown = np.where(np.isfinite(passed), np.maximum(passed, _LEAST_POWER / 10), np.nan)
    axes.plot(x, shown, color=COLORS[0], linewidth=1.8)
    frequency_axes(axes, x)
    finite = shown[np.isfinite(shown)]
    if finite.size:
        axes.set_ylim(max(_LEAST_POWER, min(0.05, 0.5 * finite.min())), 3 * max(1.0, finite.max()))
    else:
        axes.set_ylim(_LEAST_POWER, 3)
        axes.text(0.5, 0.5, "none: the filter is unstable", transform=axes.transAxes, ha="center", color=GRAY)
    if cutoff is not None and x.min() < cutoff:
        axes.axvline(cutoff, **DOTTED)
        note(axes, f"half at {cutoff:.3g}:\na period of {1 / cutoff:.3g} steps", x=cutoff)
    label(axes, _FREQUENCY, "share of power, $|H|^2$", "Frequency response: the power that passes")
