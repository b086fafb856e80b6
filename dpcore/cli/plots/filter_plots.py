"""Pictures of filters, from their coefficients, and of recorded gradients, from released quantities."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpcore.cli.plots.plots import _GRAY, COLORS, _figure
from dpcore.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Decibels would be one more thing to know: powers of ten, and nothing below one in ten thousand.
_LEAST_POWER = 1e-4


def filter_picture(
    path: str | os.PathLike[str],
    impulse_response: npt.ArrayLike,
    normalizers: npt.ArrayLike,
    noise_factor: npt.ArrayLike,
    frequencies: npt.ArrayLike,
    power: npt.ArrayLike,
    *,
    cutoff: float = float("nan"),
    limiting_noise_factor: float = float("nan"),
    title: str = "",
) -> Path:
    """Draw what a filter is: its memory, its start, the noise it leaves and the frequencies it passes.

    Parameters
    ----------
    path : path
        The file to write; its ending decides the format.
    impulse_response, normalizers, noise_factor : arrays, shape (T,)
        kappa by age; c_t, and the share of white noise's variance in the output, after each step.
    frequencies, power : arrays, shape (F,)
        Positive frequencies in cycles per step, and |H|^2 at each.
    cutoff : float, optional
        Where |H|^2 has fallen to half; not drawn if NaN.
    limiting_noise_factor : float, optional
        Drawn as a line if finite.
    title : str, optional
        First line of the picture.

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
    kappa, ones, left = (np.asarray(item, float) for item in (impulse_response, normalizers, noise_factor))
    x, passed = np.asarray(frequencies, float), np.asarray(power, float)
    if not kappa.shape == ones.shape == left.shape or kappa.ndim != 1 or not kappa.size:
        raise ArgumentError(
            f"impulse_response, normalizers, noise_factor: have shapes {kappa.shape}, {ones.shape}, {left.shape}; "
            "must be (T,), the same T"
        )
    if x.shape != passed.shape or x.ndim != 1 or not x.size or x.min() <= 0:
        raise ArgumentError(
            f"frequencies, power: have shapes {x.shape} and {passed.shape}; must be (F,), frequencies above 0"
        )
    with _figure(path, (9.0, 6.0)) as figure:
        (memory, start), (spectrum, noise) = figure.subplots(2, 2)
        figure.get_layout_engine().set(wspace=0.06, hspace=0.06)  # type: ignore[union-attr,call-arg]
        steps = np.arange(len(kappa))
        memory.vlines(steps, 0, kappa, color=COLORS[0], linewidth=1.2)
        memory.plot(steps, kappa, color=COLORS[0], marker="o", markersize=3, linestyle="none")
        memory.axhline(0, color=_GRAY, linewidth=0.8)
        _label(memory, "Impulse response: the weight of each gradient", "age of the gradient (steps)", "weight")
        start.plot(steps + 1, ones, color=COLORS[2], linewidth=1.8)
        start.axhline(1, color=_GRAY, linewidth=0.8, linestyle=":")
        _label(start, "Normalizer: the weights so far, added up", "steps taken", "divisor of the output")
        if np.isfinite(ones).all() and ones.min() >= 0:
            start.set_ylim(0, 1.08 * max(1.0, ones.max()))
        noise.plot(steps + 1, left, color=COLORS[1], linewidth=1.8)
        _label(noise, "Noise left in the output", "steps taken", "share of the variance")
        if np.isfinite(limiting_noise_factor):
            noise.axhline(limiting_noise_factor, color=_GRAY, linewidth=0.8, linestyle=":")
            _beside(noise, f"in the long run {limiting_noise_factor:.3g}", limiting_noise_factor)
        if np.isfinite(left).any():
            noise.set_ylim(0, 1.12 * max(left[np.isfinite(left)].max(), 1e-3))
        _response(spectrum, x, passed, cutoff)
        figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    return Path(path)


def gradient_picture(
    path: str | os.PathLike[str],
    frequencies: npt.ArrayLike,
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    *,
    floor: float = 0.0,
    negative_share: Sequence[float] | npt.NDArray[np.floating] = (),
    title: str = "",
) -> Path:
    """Draw the power spectral density of released gradients, and the share of negative second moments.

    Parameters
    ----------
    path : path
        The file to write; its ending decides the format.
    frequencies : array, shape (F,)
        Positive frequencies in cycles per step.
    before, after : arrays, shape (F,)
        Density per coordinate, before and after the filter.
    floor : float, optional
        s^2, the density of the mechanism's noise before the filter; not drawn if 0.
    negative_share : array, shape (T,), optional
        In [0, 1] or NaN, by step. The second picture is left out where all are NaN.
    title : str, optional
        First line of the picture.

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
    x, raw, filtered = (np.asarray(item, float) for item in (frequencies, before, after))
    if not x.shape == raw.shape == filtered.shape or x.ndim != 1 or not x.size or x.min() <= 0:
        raise ArgumentError(
            f"frequencies, before, after: have shapes {x.shape}, {raw.shape}, {filtered.shape}; "
            "must be (F,), frequencies above 0"
        )
    share = np.asarray(negative_share, float)
    both = bool(np.isfinite(share).any())
    with _figure(path, (9.6, 3.9) if both else (6.4, 3.9)) as figure:
        panels = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
        axes = panels[0]
        unchanged = np.array_equal(raw, filtered)
        name = "before and after the filter, which changes nothing" if unchanged else "before the filter"
        axes.plot(x, _positive(raw), color=COLORS[0], linewidth=1.8, label=name)
        if not unchanged:
            axes.plot(x, _positive(filtered), color=COLORS[1], linewidth=1.8, label="after the filter")
        if floor > 0:
            axes.axhline(floor, color=_GRAY, linewidth=1.0, linestyle="--", label="noise of the mechanism, before")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(x.min(), x.max())
        _plain_ticks(axes)
        shown = np.concatenate([raw[raw > 0], filtered[filtered > 0], [floor] if floor > 0 else []])
        low, high = (0.7 * shown.min(), 1.4 * shown.max()) if shown.size else (0.1, 1.0)
        # Room for the legend above the curves, in a scale of powers of ten.
        axes.set_ylim(low, high * max(3.0, (high / low) ** 0.45))
        axes.legend(loc="upper right", fontsize=9)
        _label(axes, "Power spectral density of the gradients", "frequency (cycles per step)", "power per coordinate")
        if both:
            panels[1].plot(np.arange(1, len(share) + 1), 100 * share, color=COLORS[3], linewidth=1.4)
            panels[1].set_ylim(0, max(55.0, min(100.0, 110 * float(np.nanmax(share)))))
            panels[1].axhline(50, color=_GRAY, linewidth=0.8, linestyle=":")
            _label(panels[1], "Second moments below zero", "steps taken", "share of coordinates (%)")
        figure.suptitle(title, x=0.012, ha="left", fontsize=11)
    return Path(path)


def _response(axes: Axes, x: npt.NDArray[np.float64], passed: npt.NDArray[np.float64], cutoff: float) -> None:
    shown = np.where(np.isfinite(passed), np.maximum(passed, _LEAST_POWER / 10), np.nan)
    axes.plot(x, shown, color=COLORS[0], linewidth=1.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x.min(), x.max())
    _plain_ticks(axes)
    finite = shown[np.isfinite(shown)]
    if finite.size:
        axes.set_ylim(max(_LEAST_POWER, min(0.05, 0.5 * finite.min())), 3 * max(1.0, finite.max()))
    else:
        axes.set_ylim(_LEAST_POWER, 3)
        axes.text(0.5, 0.5, "none: the filter is unstable", transform=axes.transAxes, ha="center", color=_GRAY)
    if np.isfinite(cutoff) and x.min() < cutoff:
        axes.axvline(cutoff, color=_GRAY, linewidth=0.8, linestyle=":")
        axes.annotate(
            f"half at {cutoff:.3g}:\na period of {1 / cutoff:.3g} steps",
            (cutoff, 0.04),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            color=_GRAY,
            fontsize=8,
        )
    _label(axes, "Frequency response: the power that passes", "frequency (cycles per step)", "share of power, $|H|^2$")


def _plain_ticks(axes: Axes) -> None:
    """Write 0.01 for 10 to the power of -2, and of the ticks between only 2 and 5, where there is room for them."""
    from matplotlib.ticker import FuncFormatter

    low, high = axes.get_xlim()
    room = high / low < 100
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if room and f"{value:.0e}"[0] in "25" else "")
    )


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _beside(axes: Axes, text: str, height: float) -> None:
    axes.annotate(
        text,
        (0.98, height),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color=_GRAY,
        fontsize=8,
    )


def _positive(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.where(values > 0, values, np.nan)
