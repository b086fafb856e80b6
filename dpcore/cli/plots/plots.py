"""Pictures of released quantities: held-out accuracy and the epsilon spent.

matplotlib is imported when a picture is drawn, and writes to a file without a display.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, DpcoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette: distinct to color-blind readers and in gray.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GRAY = "#6b6b6b"
_STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GRAY,
    "axes.labelcolor": "#222222",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": _GRAY,
    "ytick.color": _GRAY,
    "legend.frameon": False,
    "figure.dpi": 150,
}


def learning_curve(
    path: str | os.PathLike[str],
    epochs: Sequence[float],
    accuracy: Sequence[float],
    epsilon: Sequence[float],
    *,
    title: str = "",
    target_epsilon: float | None = None,
) -> Path:
    """Draw held-out accuracy against epochs, with the epsilon spent on a second axis.

    Parameters
    ----------
    path : path
        The file to write; its ending decides the format.
    epochs, accuracy, epsilon : sequences of float, equally long
        Accuracy in [0, 1], after each epoch; the epsilon spent by then (infinite values are left out).
    title : str, optional
        First line of the picture.
    target_epsilon : float, optional
        Drawn as a thin line on the second axis.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ArgumentError
        Where the sequences differ in length or are empty.
    DpcoreError
        Where matplotlib is not installed.
    """
    if not len(epochs) == len(accuracy) == len(epsilon) > 0:
        raise ArgumentError(
            f"epochs, accuracy, epsilon: have {len(epochs)}, {len(accuracy)}, {len(epsilon)} values; "
            "must be equally many, at least one"
        )
    x, spent = np.asarray(epochs, float), np.asarray(epsilon, float)
    with _figure(path, (6.4, 3.8)) as figure:
        axes = figure.subplots()
        axes.plot(x, 100 * np.asarray(accuracy), color=COLORS[0], marker="o", markersize=3.5, linewidth=1.8)
        axes.set_xlabel("epoch")
        axes.set_ylabel("held-out accuracy (%)", color=COLORS[0])
        axes.set_title(title)
        _whole_epochs(axes, x)
        if np.isfinite(spent).any():
            second = axes.twinx()
            second.spines["right"].set_visible(True)
            second.grid(False)
            second.plot(x, np.where(np.isfinite(spent), spent, np.nan), color=COLORS[1], linestyle="--", linewidth=1.5)
            second.set_ylabel("epsilon spent", color=COLORS[1])
            top = np.nanmax(np.append(spent[np.isfinite(spent)], target_epsilon or 0))
            second.set_ylim(0, 1.08 * top or 1)
            if target_epsilon is not None and np.isfinite(target_epsilon):
                second.axhline(target_epsilon, color=COLORS[1], linewidth=0.8, alpha=0.5)
                second.annotate(
                    "target",
                    (0.01, target_epsilon),
                    xycoords=("axes fraction", "data"),
                    xytext=(0, 3),
                    textcoords="offset points",
                    color=COLORS[1],
                    fontsize=8,
                )
    return Path(path)


def comparison(
    path: str | os.PathLike[str],
    curves: Mapping[str, npt.ArrayLike],
    epochs: Sequence[float],
    epsilon: Sequence[float],
    *,
    title: str = "",
) -> Path:
    """Draw several methods over several seeds: accuracy on the way (mean and spread), and at the end (every seed).

    Parameters
    ----------
    path : path
        The file to write.
    curves : mapping of str to array, shape (seeds, len(epochs))
        Held-out accuracy in [0, 1] by method.
    epochs, epsilon : sequences of float, equally long
        The epochs at which accuracy was taken, and the epsilon spent by then, the same for every method.
    title : str, optional
        First line of the picture.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ArgumentError
        Where shapes do not fit.
    DpcoreError
        Where matplotlib is not installed.
    """
    values = {name: np.atleast_2d(np.asarray(curve, float)) for name, curve in curves.items()}
    for name, curve in values.items():
        if curve.ndim != 2 or curve.shape[1] != len(epochs) or not curve.size:
            raise ArgumentError(f"curves[{name!r}]: has shape {curve.shape}; must be (seeds, {len(epochs)})")
    if not values or len(epsilon) != len(epochs):
        raise ArgumentError(f"epsilon: has {len(epsilon)} values for {len(epochs)} epochs and {len(values)} methods")
    x = np.asarray(epochs, float)
    with _figure(path, (9.0, 4.0)) as figure:
        way, end = figure.subplots(1, 2, width_ratios=(1.75, 1))
        for index, (name, curve) in enumerate(values.items()):
            color = COLORS[index % len(COLORS)]
            mean, spread = 100 * curve.mean(axis=0), 100 * _deviation(curve)
            way.plot(x, mean, color=color, marker="o", markersize=3, linewidth=1.8, label=name)
            way.fill_between(x, mean - spread, mean + spread, color=color, alpha=0.13, linewidth=0)
            _final(end, index, 100 * curve[:, -1], color)
        way.set_xlabel("epoch")
        way.set_ylabel("held-out accuracy (%)")
        several = any(len(curve) > 1 for curve in values.values())
        said = "mean over seeds, band: ± 1 standard deviation" if several else "one run each"
        way.set_title(said, fontsize=9, color=_GRAY)
        way.legend(loc="lower right")
        _whole_epochs(way, x)
        _epsilon_ticks(way, x, np.asarray(epsilon, float))
        end.set_xticks(range(len(values)), list(values), color="#222222")
        if len(values) > 4:
            end.tick_params(axis="x", rotation=30)
        end.set_xlim(-0.6, len(values) - 0.25)
        end.grid(axis="x", visible=False)
        said = "at the end: each seed, mean ± standard error" if several else "at the end"
        end.set_title(said, fontsize=9, color=_GRAY)
        figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    return Path(path)


def _final(axes: Axes, index: int, final: npt.NDArray[np.float64], color: str) -> None:
    # Spread in the order of the seeds, so that equal results stay visible; the same picture from the same numbers.
    offsets = np.linspace(-0.18, 0.18, len(final)) if len(final) > 1 else np.zeros(1)
    axes.plot(
        index + offsets, final, linestyle="none", marker="o", markersize=4, color=color, alpha=0.4, markeredgewidth=0
    )
    error = final.std(ddof=1) / np.sqrt(len(final)) if len(final) > 1 else 0.0
    axes.errorbar(
        index,
        final.mean(),
        yerr=error,
        color=color,
        marker="_",
        markersize=22,
        markeredgewidth=2.2,
        capsize=4,
        linewidth=1.6,
    )
    axes.annotate(
        f"{final.mean():.1f}",
        (index, final.mean()),
        xytext=(20, 0),
        textcoords="offset points",
        va="center",
        color=color,
    )


def _deviation(curve: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return curve.std(axis=0, ddof=1) if len(curve) > 1 else np.zeros(curve.shape[1])


def _whole_epochs(axes: Axes, x: npt.NDArray[np.float64]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(x) > 1:
        axes.margins(x=0.02)


def _epsilon_ticks(axes: Axes, x: npt.NDArray[np.float64], epsilon: npt.NDArray[np.float64]) -> None:
    """Say on a second horizontal axis how much epsilon was spent by some of the epochs."""
    if not np.isfinite(epsilon).all():
        return
    chosen = np.unique(np.linspace(0, len(x) - 1, min(6, len(x))).round().astype(int))
    second = axes.secondary_xaxis(-0.17)
    second.set_xticks(x[chosen], [f"{value:.2g}" for value in epsilon[chosen]], color=_GRAY, fontsize=9)
    second.set_xlabel("epsilon spent", color=_GRAY, fontsize=9)
    second.spines["bottom"].set_visible(False)
    second.tick_params(length=0)


@contextmanager
def _figure(path: str | os.PathLike[str], size: tuple[float, float]) -> Iterator[Figure]:
    """Draw on a new figure and put it in place in one move, so that no half picture is ever seen."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise DpcoreError("a picture needs matplotlib; install it with: pip install 'dpcore[cli]'") from cause
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        target = Path(path)
        draft = target.with_name(f".{target.stem}.draft{target.suffix}")
        figure.savefig(draft)
        draft.replace(target)
