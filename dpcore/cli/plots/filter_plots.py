"""Pictures of filters, and of the released gradients of a run before and after its filter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from dpcore.cli.plots.figure import COLORS, DOTTED, GRAY, Array, PathLike, drawing, frequency_axes, label, note, rows
from dpcore.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FREQUENCY = "frequency (cycles per step)"
# Decibels would be one more thing to know: powers of ten, and nothing below one in ten thousand.
_LEAST_POWER = 1e-4


def filter_picture(
    path: PathLike,
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

    kappa by age, c_t and the share of white noise's variance in the output after each step have shape (T,). `power` is
    |H|^2 at positive frequencies in cycles per step, shape (F,), and `cutoff` where it has fallen to half, if not NaN.
    """
    names = "impulse_response, normalizers, noise_factor"
    kappa, ones, left = rows(names, impulse_response, normalizers, noise_factor)
    x, passed = _by_frequency("frequencies, power", frequencies, power)
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
        if np.isfinite(limiting_noise_factor):
            noise.axhline(limiting_noise_factor, **DOTTED)
            note(noise, f"in the long run {limiting_noise_factor:.3g}", y=limiting_noise_factor)
        if np.isfinite(left).any():
            noise.set_ylim(0, 1.12 * max(left[np.isfinite(left)].max(), 1e-3))
        _response(spectrum, x, passed, cutoff)
    return Path(path)


def gradient_picture(
    path: PathLike,
    frequencies: npt.ArrayLike,
    before: npt.ArrayLike,
    after: npt.ArrayLike,
    *,
    floor: float = 0.0,
    negative_share: npt.ArrayLike = (),
    title: str = "",
) -> Path:
    """Draw the power spectral density of released gradients, and the share of negative second moments.

    The density is per coordinate, at positive frequencies in cycles per step, shape (F,); `floor` is s^2, that of the
    mechanism's noise before the filter. `negative_share` has shape (T,), in [0, 1], or NaN: without any finite value
    its picture is left out.
    """
    x, raw, filtered = _by_frequency("frequencies, before, after", frequencies, before, after)
    share = np.asarray(negative_share, float)
    both = bool(np.isfinite(share).any())
    with drawing(path, (9.6, 3.9) if both else (6.4, 3.9), title) as figure:
        panels = figure.subplots(1, 2 if both else 1, squeeze=False)[0]
        axes = panels[0]
        unchanged = np.array_equal(raw, filtered)
        name = "before and after the filter, which changes nothing" if unchanged else "before the filter"
        axes.plot(x, _positive(raw), color=COLORS[0], linewidth=1.8, label=name)
        if not unchanged:
            axes.plot(x, _positive(filtered), color=COLORS[1], linewidth=1.8, label="after the filter")
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
    return Path(path)


def _by_frequency(names: str, *values: npt.ArrayLike) -> tuple[Array, ...]:
    arrays = rows(names, *values)
    if arrays[0].min() <= 0:
        raise ArgumentError(f"{names.partition(',')[0]}: holds {arrays[0].min():g}; must be frequencies above 0")
    return arrays


def _response(axes: Axes, x: Array, passed: Array, cutoff: float) -> None:
    shown = np.where(np.isfinite(passed), np.maximum(passed, _LEAST_POWER / 10), np.nan)
    axes.plot(x, shown, color=COLORS[0], linewidth=1.8)
    frequency_axes(axes, x)
    finite = shown[np.isfinite(shown)]
    if finite.size:
        axes.set_ylim(max(_LEAST_POWER, min(0.05, 0.5 * finite.min())), 3 * max(1.0, finite.max()))
    else:
        axes.set_ylim(_LEAST_POWER, 3)
        axes.text(0.5, 0.5, "none: the filter is unstable", transform=axes.transAxes, ha="center", color=GRAY)
    if np.isfinite(cutoff) and x.min() < cutoff:
        axes.axvline(cutoff, **DOTTED)
        note(axes, f"half at {cutoff:.3g}:\na period of {1 / cutoff:.3g} steps", x=cutoff)
    label(axes, _FREQUENCY, "share of power, $|H|^2$", "Frequency response: the power that passes")


def _positive(values: Array) -> Array:
    return np.where(values > 0, values, np.nan)
