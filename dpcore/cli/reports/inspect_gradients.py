"""``dpcore inspect gradients``: signal and noise in the released gradients of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dpcore.cli.gradients import Gradients, load_gradients
from dpcore.cli.options import Json, Picture
from dpcore.cli.output import known, write_json, write_line, write_table
from dpcore.cli.plots import plots
from dpcore.errors import DataError
from dpcore.spec.canonical import plain
from dpcore.theory.analysis import recorded, spectrum

_BELOW = (0.01, 0.05, 0.1, 0.25)
# With more lags than this the fit knows no more, and takes seconds.
_MOST_LAGS = 128
# What a fit may leave of the output where the filter's noise is told by it.
_SMALL_RESIDUAL = 0.05


def inspect_gradients(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run folder made with --record-gradients.")],
    out: Picture = None,
    as_json: Json = False,
) -> None:
    """Show signal and noise in the gradients that a run released, before and after its filter."""
    if not folder.exists():
        raise DataError(f"folder={str(folder)!r}: no such folder")
    gradients = load_gradients(folder)
    numbers = numbers_of(gradients)
    if out is not None:
        _draw(gradients, out, f"{folder.name or folder.resolve().name}: released gradients")
    if as_json:
        write_json(plain({**numbers, **({"picture": str(out)} if out else {})}))
        return
    _tell(gradients, numbers)
    if out is not None:
        write_line(f"\npicture: {out}")


def numbers_of(gradients: Gradients) -> dict[str, Any]:
    """Return what the record shows, as JSON has it; None stands for what cannot be told."""
    steps, width = gradients.released.shape
    before, after = _correlations(gradients)
    share = gradients.negative_share[np.isfinite(gradients.negative_share)].astype(float)
    tenth = max(1, len(share) // 10)
    return {
        "steps": steps,
        "coordinates_recorded": width,
        "dimension": gradients.dimension,
        "noise_std": gradients.noise_std,
        "white_noise": gradients.white_noise,
        "noise_floor": spectrum.noise_floor(gradients.noise_std, gradients.dimension),
        "noise_floor_per_coordinate": gradients.noise_std**2,
        "power_per_coordinate": {"before": before[0] / width, "after": after[0] / width},
        "share_of_power_below": [
            {
                "frequency": frequency,
                "white_noise": 2 * frequency,
                "before": known(spectrum.share_below(before, frequency)),
                "after": known(spectrum.share_below(after, frequency)),
            }
            for frequency in _BELOW
        ],
        "signal_to_noise": _ratios(gradients),
        "negative_share": {
            "mean": float(share.mean()),
            "first_tenth": float(share[:tenth].mean()),
            "last_tenth": float(share[-tenth:].mean()),
        }
        if len(share)
        else None,
    }


def _correlations(gradients: Gradients) -> tuple[spectrum.Floats, spectrum.Floats]:
    lag = (len(gradients.released) - 1) // 2
    return spectrum.autocorrelation(gradients.released, lag), spectrum.autocorrelation(gradients.filtered, lag)


def _ratios(gradients: Gradients) -> dict[str, Any]:
    """Return the ratios over the second half of the run, before and after, with the noise factor that was read off."""
    steps = len(gradients.released)
    half = slice(steps // 2, None)
    nothing = {"before": None, "after": None, "noise_factor": None, "fit_residual": None}
    if gradients.noise_std == 0 or not gradients.white_noise:
        return nothing
    before = recorded.signal_to_noise(gradients.released[half], gradients.noise_std)
    lags = max(1, min(_MOST_LAGS, steps // 2))
    kappa, residual = recorded.fit_filter(gradients.released, gradients.filtered, lags)
    told = {**nothing, "before": before._asdict(), "fit_residual": residual}
    if residual > _SMALL_RESIDUAL or not kappa.any():
        return told
    after = recorded.signal_to_noise(gradients.filtered[half], gradients.noise_std, kappa)
    return {**told, "after": after._asdict(), "noise_factor": float(kappa @ kappa)}


def _tell(gradients: Gradients, numbers: dict[str, Any]) -> None:
    write_line(
        f"{numbers['steps']:,} steps, {numbers['coordinates_recorded']:,} of {numbers['dimension']:,} coordinates "
        "of the privatized average gradient"
    )
    write_line("Everything below comes from released gradients and public settings: it costs no privacy.\n")
    head = "cycles per step", "before the filter", "after the filter", "white noise would have"
    rows = [
        (f"below {row['frequency']:g} (periods over {1 / row['frequency']:g} steps)",
         *(_percent(row[key]) for key in ("before", "after", "white_noise")))
        for row in numbers["share_of_power_below"]
    ]  # fmt: skip
    write_table(head, rows, title="share of the power at low frequencies", right=3)
    write_line()
    lines = [*_power(gradients, numbers), *_signal(numbers["signal_to_noise"]), _moments(numbers["negative_share"])]
    for name, value in lines:
        write_line(f"{name:<28}{value}")
    if numbers["signal_to_noise"]["before"]:
        write_line(
            "\nSignal is all that is not the mechanism's noise, also the randomness of the batches. The ratios are over"
            "\nthe second half of the run."
        )


def _power(gradients: Gradients, numbers: dict[str, Any]) -> list[tuple[str, str]]:
    power, floor = numbers["power_per_coordinate"], numbers["noise_floor_per_coordinate"]
    told = (
        f"{floor:.4g} per coordinate (s^2, s = {gradients.noise_std:.4g}), "
        f"{numbers['noise_floor']:.4g} for all {gradients.dimension:,}"
    )
    if not floor:
        told = "0: this run has no noise and is not private"
    elif not gradients.white_noise:
        told = f"not flat: the noise is correlated, or scaled by coordinate (seed noise s = {gradients.noise_std:.4g})"
    return [
        ("power per coordinate", f"{power['before']:.4g} before, {power['after']:.4g} after the filter"),
        ("noise floor", told),
    ]


def _signal(ratios: dict[str, Any]) -> list[tuple[str, str]]:
    if not ratios["before"]:
        return []
    before = ("signal to noise, before", _ratio(ratios["before"]))
    if not ratios["after"]:
        return [before, ("signal to noise, after", _why_not(ratios["fit_residual"]))]
    factor = f"{ratios['noise_factor']:.4g} of the variance, read off the filter's inputs and outputs"
    return [before, ("signal to noise, after", _ratio(ratios["after"])), ("noise left by the filter", factor)]


def _moments(share: dict[str, float] | None) -> tuple[str, str]:
    name = "second moments below zero"
    if not share:
        return name, "none recorded: the update has no second moment"
    first, last = _percent(share["first_tenth"]), _percent(share["last_tenth"])
    return name, f"{first} of the coordinates in the first tenth of the steps, {last} in the last"


def _ratio(ratio: dict[str, float]) -> str:
    value, error = ratio["value"], ratio["error"]
    told = f"{value:.3g} (noise alone gives 0 ± {error:.2g})"
    return told if abs(value) > 2 * error else f"{told}: too little signal for this record to show"


def _why_not(residual: float) -> str:
    if residual <= _SMALL_RESIDUAL:
        return "cannot be told: the filter's output is zero"
    left = _percent(residual)
    return f"cannot be told: no fixed weights make the output from the last inputs ({left} of it is left over)"


def _draw(gradients: Gradients, out: Path, title: str) -> None:
    both, width = _correlations(gradients), gradients.released.shape[1]
    frequencies = np.geomspace(min(0.25, 1 / len(both[0])), 0.5, 400)
    densities = [spectrum.power_spectral_density(item, frequencies) / width for item in both]
    floor, share = gradients.noise_std**2 if gradients.white_noise else 0.0, gradients.negative_share
    plots.gradient_picture(out, frequencies, *densities, floor=floor, negative_share=share, title=title)


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.3g}%"
