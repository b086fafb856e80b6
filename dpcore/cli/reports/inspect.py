"""``dpcore inspect``: filters, and the released gradients of a run, in numbers and pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dpcore.cli import plots
from dpcore.cli.gradients import Gradients, load_gradients
from dpcore.cli.options import Commands, Json, Picture, name_or_design, real, reals
from dpcore.cli.output import known, write_json, write_line, write_table
from dpcore.errors import ArgumentError, DataError
from dpcore.stages.filters import NAMED_FILTERS, Averaging, LowPass, named_filter
from dpcore.stages.filters.designs import DESIGNS, filter_of
from dpcore.statement.text import counted
from dpcore.theory.analysis import filters as analysis
from dpcore.theory.analysis import recorded, spectrum

# ``dpcore inspect filter``: a filter's effect on gradient and noise.

# Numbers of steps after which the noise factor is shown.
_STEPS = (1, 10, 100)
_PICTURED = 60


def inspect_filter(
    words: Annotated[list[str] | None, typer.Argument(metavar="NAME | b=.. a=.. | kappa=..",
        help="A named filter, coefficients (several with commas), or DiSK's kappa; all named filters if left out.",
        show_default=False)] = None,
    out: Picture = None,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Show a filter's effect on gradient and noise. Ends with status 2 for a filter that runs refuse."""
    text = " ".join(words or []).strip()
    if not text:
        if out is not None:
            raise typer.BadParameter("--out cannot be used here; give the name of a filter with it")
        _tell_all(as_json)
        return 0
    given = ask(text)
    numbers = numbers_of_filter(given)
    if out is not None:
        _draw_filter(given, numbers, out)

    def write() -> None:
        write_table(("", ""), _rows(numbers), title=f"filter {given.name}", wraps=1)
        if given.refused:
            write_line(f"\nNo run takes this filter: {given.refused}")

    _tell(numbers, out, as_json, write)
    return 2 if given.refused else 0


def _tell(numbers: dict[str, Any], out: Path | None, as_json: bool, write: Callable[[], None]) -> None:
    """Write the numbers as JSON, or as `write` does, with the picture's place."""
    if as_json:
        write_json({**numbers, **({"picture": str(out)} if out else {})})
        return
    write()
    if out is not None:
        write_line(f"\npicture: {out}")


def numbers_of_filter(given: GivenFilter) -> dict[str, Any]:
    """Return the numbers of a filter for JSON; None for a number that does not exist."""
    b, a = form = analysis.transfer(given.stage)
    factors = analysis.noise_factor(given.stage, max(_STEPS))
    # c_t tends to the gain, even if that is not 1.
    gain, stable = analysis.gain(form), analysis.is_stable(form)
    limit = analysis.limiting_noise_factor(form) / gain**2 if stable and gain else math.inf
    poles = analysis.poles(form)
    left = {**{str(step): float(factors[step - 1]) for step in _STEPS}, "limit": limit}
    return {
        "filter": given.name,
        "b": b.tolist(),
        "a": a[1:].tolist(),
        "accepted": not given.refused,
        "refused_because": given.refused or None,
        "gain": known(gain),
        "poles": [{"real": float(z.real), "imaginary": float(z.imag), "modulus": float(abs(z))} for z in poles],
        "stable": stable,
        "cutoff": known(analysis.cutoff(form)),
        "delay": known(analysis.delay(form)),
        "half_life": known(analysis.half_life(form)),
        "noise_factor": {step: known(factor) for step, factor in left.items()},
    }


def _rows(numbers: dict[str, Any]) -> list[tuple[str, str]]:
    factors, stable = numbers["noise_factor"], numbers["stable"]
    rows = [
        ("b", _list(numbers["b"])),
        ("a", _list(numbers["a"])),
        ("gain", _number(numbers["gain"])),
        *(("pole", _pole(pole)) for pole in numbers["poles"]),
        ("stable", "yes" if stable else "no: a pole has a modulus of 1 or more"),
    ]
    if stable:
        cutoff, passes = numbers["cutoff"], "none"
        if cutoff is not None:
            passes = f"{cutoff:.4g} cycles/step, a period of {1 / cutoff:.3g} steps"
        rows += [
            ("delay", f"{_number(numbers['delay'])} steps"),
            ("half-life", f"{_number(numbers['half_life'])} steps"),
            ("cutoff at -3 dB", passes),
        ]
    rows += [(f"noise after {counted(step, 'step')}", _number(factors[str(step)])) for step in _STEPS]
    return [*rows, ("noise in the long run", _number(factors["limit"]))]


def _tell_all(as_json: bool) -> None:
    every = [numbers_of_filter(GivenFilter(name, named_filter(name))) for name in NAMED_FILTERS]
    if as_json:
        write_json({"filters": every})
        return
    head = ("filter", "gain", "largest pole", "delay", "half-life", "cutoff", "noise, 10 steps", "noise, long run")
    rows = []
    for item in every:
        modulus = max((pole["modulus"] for pole in item["poles"]), default=None)
        factors = item["noise_factor"]
        cells = (item["gain"], modulus, item["delay"], item["half_life"], item["cutoff"], factors["10"],
            factors["limit"])  # fmt: skip
        rows.append((item["filter"], *map(_number, cells)))
    write_table(head, rows, title="named filters", right=len(head) - 1)
    write_line(
        "\nlargest pole: its modulus; delay and half-life in steps; cutoff: where half of the power passes, in cycles "
        "per step;\nnoise: the remaining share of the noise's variance. Runs refuse filters whose gain is not 1."
    )


def _draw_filter(given: GivenFilter, numbers: dict[str, Any], out: Path) -> None:
    form = analysis.transfer(given.stage)
    frequencies = np.geomspace(1e-3, 0.5, 600)
    steps = min(200, max(_PICTURED, 6 * math.ceil(numbers["half_life"] or 0))) if numbers["stable"] else _PICTURED
    # From a late step on, when a filter with its own start has settled.
    kappa = analysis.impulse_response(given.stage, steps, start=steps)
    plots.filter_picture(
        out,
        kappa,
        analysis.normalizers(given.stage, steps),
        analysis.noise_factor(given.stage, steps),
        frequencies,
        np.abs(analysis.frequency_response(form, frequencies)) ** 2 if numbers["stable"] else frequencies * math.nan,
        cutoff=numbers["cutoff"],
        limiting_noise_factor=numbers["noise_factor"]["limit"],
        title=f"filter {given.name}",
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values) or "none"


def _pole(pole: dict[str, float]) -> str:
    imaginary = f" {pole['imaginary']:+.4g}i" if pole["imaginary"] else ""
    return f"{pole['real']:.4g}{imaginary}, modulus {pole['modulus']:.4g}"


@dataclass(frozen=True)
class GivenFilter:
    """The filter of a command; `refused` is the reason if no run would take it."""

    name: str
    stage: analysis.Coefficients
    refused: str = ""


def ask(text: str) -> GivenFilter:
    """Return the filter of a name or of coefficients."""
    if "=" in text:
        return _by_coefficients(text)
    name = name_or_design(NAMED_FILTERS, DESIGNS)(text)
    return GivenFilter(name, filter_of(name))


def _by_coefficients(text: str) -> GivenFilter:
    pairs = re.findall(r"(\S*?)\s*=\s*([^=]*?)\s*(?=$|[\s,;]\S+?\s*=)", text)
    given = {key.strip(",; "): value.strip(",; ") for key, value in pairs}
    if set(given) == {"kappa"}:
        kappa = real(given["kappa"])
        return GivenFilter(f"kappa={kappa:g}", Averaging(kappa))
    if "b" not in given or not set(given) <= {"a", "b"}:
        raise ArgumentError(f"filter={text!r}: write it as b=0.1 a=-0.9, b=0.25,0.25,0.25,0.25 or kappa=0.7")
    b, a = reals(given["b"]), reals(given["a"]) if given.get("a") else ()
    name = f"b={','.join(f'{value:g}' for value in b)}" + (f" a={','.join(f'{value:g}' for value in a)}" if a else "")
    try:
        return GivenFilter(name, LowPass(b, a))
    except ArgumentError as error:
        return GivenFilter(name, analysis.Recurrence(b, a), refused=str(error))


# ``dpcore inspect gradients``: signal and noise in the released gradients of a run.

_BELOW = (0.01, 0.05, 0.1, 0.25)
# With more lags than this the fit is no better, and takes seconds.
_MOST_LAGS = 128
# Largest residual of a fit, relative to the output, that still determines the filter's noise.
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
    numbers = numbers_of_gradients(gradients)
    if out is not None:
        both, width = _correlations(gradients), gradients.released.shape[1]
        frequencies = np.geomspace(min(0.25, 1 / len(both[0])), 0.5, 400)
        densities = [spectrum.power_spectral_density(item, frequencies) / width for item in both]
        floor, share = gradients.noise_std**2 if gradients.white_noise else 0.0, gradients.negative_share
        title = f"{folder.name or folder.resolve().name}: released gradients"
        plots.gradient_picture(out, frequencies, *densities, floor=floor, negative_share=share, title=title)
    _tell(numbers, out, as_json, lambda: _tell_gradients(gradients, numbers))


def numbers_of_gradients(gradients: Gradients) -> dict[str, Any]:
    """Return the record's numbers for JSON; None for a number that it does not determine."""
    steps, width = gradients.released.shape
    before, after = _correlations(gradients)
    share = gradients.negative_share[np.isfinite(gradients.negative_share)].astype(float)
    tenth = max(1, len(share) // 10)
    parts = {"mean": share, "first_tenth": share[:tenth], "last_tenth": share[-tenth:]}
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
                "frequency": f,
                "white_noise": 2 * f,
                "before": known(spectrum.share_below(before, f)),
                "after": known(spectrum.share_below(after, f)),
            }
            for f in _BELOW
        ],
        "signal_to_noise": _ratios(gradients),
        "negative_share": None if not len(share) else {name: float(part.mean()) for name, part in parts.items()},
    }


def _correlations(gradients: Gradients) -> tuple[spectrum.Floats, spectrum.Floats]:
    lag = (len(gradients.released) - 1) // 2
    return spectrum.autocorrelation(gradients.released, lag), spectrum.autocorrelation(gradients.filtered, lag)


def _ratios(gradients: Gradients) -> dict[str, Any]:
    """Return the ratios over the second half of the run, before and after, with the fitted noise factor."""
    steps = len(gradients.released)
    half = slice(steps // 2, None)
    nothing = {"before": None, "after": None, "noise_factor": None, "fit_residual": None}
    if gradients.noise_std == 0 or not gradients.white_noise:
        return nothing
    before = recorded.signal_to_noise(gradients.released[half], gradients.noise_std)
    lags = max(1, min(_MOST_LAGS, steps // 2))
    kappa, residual = recorded.fit_filter(gradients.released, gradients.filtered, lags)
    ratios = {**nothing, "before": before._asdict(), "fit_residual": residual}
    if residual > _SMALL_RESIDUAL or not kappa.any():
        return ratios
    after = recorded.signal_to_noise(gradients.filtered[half], gradients.noise_std, kappa)
    return {**ratios, "after": after._asdict(), "noise_factor": float(kappa @ kappa)}


def _tell_gradients(gradients: Gradients, numbers: dict[str, Any]) -> None:
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
    for name, value in _lines(gradients, numbers).items():
        write_line(f"{name:<28}{value}")
    if numbers["signal_to_noise"]["before"]:
        write_line(
            "\nSignal is all that is not the mechanism's noise, also the randomness of the batches. The ratios are over"
            "\nthe second half of the run."
        )


def _lines(gradients: Gradients, numbers: dict[str, Any]) -> dict[str, str]:
    """Return the record's other numbers in words, by name."""
    power, floor, s = numbers["power_per_coordinate"], numbers["noise_floor_per_coordinate"], gradients.noise_std
    ratios, share = numbers["signal_to_noise"], numbers["negative_share"]
    floor_text = (
        f"{floor:.4g} per coordinate (s^2, s = {s:.4g}), {numbers['noise_floor']:.4g} for all {gradients.dimension:,}"
    )
    if not floor:
        floor_text = "0: this run has no noise and is not private"
    elif not gradients.white_noise:
        floor_text = f"not flat: the noise is correlated, or scaled by coordinate (seed noise s = {s:.4g})"
    after = f"{power['before']:.4g} before, {power['after']:.4g} after the filter"
    lines = {"power per coordinate": after, "noise floor": floor_text}
    if ratios["before"]:
        lines["signal to noise, before"] = _ratio(ratios["before"])
        left = (
            f"no fixed weights make the output from the last inputs ({_percent(ratios['fit_residual'])} of it is left)"
        )
        why = "the filter's output is zero" if ratios["fit_residual"] <= _SMALL_RESIDUAL else left
        lines["signal to noise, after"] = _ratio(ratios["after"]) if ratios["after"] else f"unknown: {why}"
    if ratios["after"]:
        factor = f"{ratios['noise_factor']:.4g} of the variance, read off the filter's inputs and outputs"
        lines["noise left by the filter"] = factor
    moments = "none recorded: the update has no second moment"
    if share:
        first, last = _percent(share["first_tenth"]), _percent(share["last_tenth"])
        moments = f"{first} of the coordinates in the first tenth of the steps, {last} in the last"
    return lines | {"second moments below zero": moments}


def _ratio(ratio: dict[str, float]) -> str:
    value, error = ratio["value"], ratio["error"]
    text = f"{value:.3g} (noise alone gives 0 ± {error:.2g})"
    return text if abs(value) > 2 * error else f"{text}: too little signal for this record to show"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.3g}%"


inspect = Commands()  # its help is in dpcore.cli.app
inspect.command("filter", example="dpcore inspect filter b=0.1 a=-0.9 --out momentum.png")(inspect_filter)
inspect.command("gradients", example="dpcore inspect gradients runs/digits-mlp-doppler --out gradients.png")(
    inspect_gradients
)
