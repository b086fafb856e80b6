"""``dpcore inspect filter``: what a filter does to gradient and noise."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from dpcore.cli.options import Json, Picture, option
from dpcore.cli.output import known, write_json, write_line, write_table
from dpcore.cli.plots import plots
from dpcore.cli.values import count, one_of, real, reals
from dpcore.errors import ArgumentError
from dpcore.spec.canonical import plain
from dpcore.stages.filters import NAMED_FILTERS, Averaging, LowPass, ScalarKalman, butterworth, chebyshev, named_filter
from dpcore.theory.analysis import filters as analysis

# After how many steps the noise factor is told.
_STEPS = (1, 10, 100)
_PICTURED = 60


def inspect_filter(
    words: Annotated[list[str] | None, typer.Argument(metavar="NAME | b=.. a=.. | kappa=..",
        help="A named filter, coefficients (several with commas), DiSK's kappa or sigma_H=.. sigma_v=.. sigma_w=.. "
        "of its Kalman gain, butterworth or chebyshev; all named filters if left out.",
        show_default=False)] = None,
    order: Annotated[Any, option(count, "N", "Of butterworth and chebyshev: 1, 2 or 3.")] = None,
    cutoff: Annotated[Any, option(real, "F",
        "Of the same: a fraction of the highest frequency, half a cycle a step.")] = None,
    ripple: Annotated[Any, option(real, "DB", "Of chebyshev: its ripple in decibels, 1 if left out.")] = None,
    out: Picture = None,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Say what a filter does to gradient and noise. Ends with status 2 for a filter that runs refuse."""
    text, design = " ".join(words or []).strip(), {"order": order, "cutoff": cutoff, "ripple": ripple}
    if not text:
        refuse_options({**design, "out": out}, "give the name of a filter with it")
        _tell_all(as_json)
        return 0
    asked = ask(text, design)
    numbers = numbers_of(asked)
    if out is not None:
        _draw(asked, numbers, out)
    if as_json:
        write_json(plain({**numbers, **({"picture": str(out)} if out else {})}))
    else:
        _tell(asked, numbers)
        if out is not None:
            write_line(f"\npicture: {out}")
    return 2 if asked.refused else 0


def numbers_of(asked: Asked) -> dict[str, Any]:
    """Return what is known of a filter, as JSON has it; None stands for what does not exist."""
    b, a = form = analysis.transfer(asked.stage)
    factors = analysis.noise_factor(asked.stage, max(_STEPS))
    # c_t tends to the gain, also where that is not 1.
    gain, stable = analysis.gain(form), analysis.is_stable(form)
    limit = analysis.limiting_noise_factor(form) / gain**2 if stable and gain else math.inf
    return {
        "filter": asked.name,
        "b": b.tolist(),
        "a": a[1:].tolist(),
        "accepted": not asked.refused,
        "refused_because": asked.refused or None,
        "gain": known(gain),
        "poles": [
            {"real": float(pole.real), "imaginary": float(pole.imag), "modulus": float(abs(pole))}
            for pole in analysis.poles(form)
        ],
        "stable": stable,
        "cutoff": known(analysis.cutoff(form)),
        "delay": known(analysis.delay(form)),
        "half_life": known(analysis.half_life(form)),
        "noise_factor": {**{str(step): known(float(factors[step - 1])) for step in _STEPS}, "limit": known(limit)},
    }


def _tell(asked: Asked, numbers: dict[str, Any]) -> None:
    write_table(("", "", ""), _rows(numbers), title=f"filter {asked.name}", wraps=2)
    if asked.refused:
        write_line(f"\nNo run takes this filter: {asked.refused}")


def _rows(numbers: dict[str, Any]) -> list[tuple[str, str, str]]:
    factors, moduli = numbers["noise_factor"], [pole["modulus"] for pole in numbers["poles"]]
    limit, gain, stable = factors["limit"], numbers["gain"], numbers["stable"]
    rows = [
        ("b", _list(numbers["b"]), "weights of the newest gradients"),
        ("a", _list(numbers["a"]), "minus the weights of the last outputs"),
        ("gain", _number(gain), "a constant gradient comes out " + _gain_words(gain, stable)),
        *(
            ("pole", _pole(pole), f"modulus {pole['modulus']:.4g}" + (", outside" if pole["modulus"] > 1 else ""))
            for pole in numbers["poles"]
        ),
        ("stable", "yes" if stable else "no", _stable_words(moduli)),
    ]
    if stable:
        cutoff = numbers["cutoff"]
        rows += [
            ("delay", f"{_number(numbers['delay'])} steps", "mean age of the gradients in the output"),
            ("half-life", f"{_number(numbers['half_life'])} steps", "until the slowest part of the memory halves"),
            ("cutoff at -3 dB", *_cutoff_words(cutoff)),
        ]
    for step in _STEPS:
        said = "share of the noise's variance in the output" if step == _STEPS[0] else ""
        rows.append((f"noise after {step:,} step{'s' if step > 1 else ''}", _number(factors[str(step)]), said))
    if limit is not None and limit > 1:
        said = "more noise than without a filter"
    elif limit:
        said = f"as in a mean of {1 / limit:.3g} gradients; standard deviation times {math.sqrt(limit):.3g}"
    else:
        said = "the weights do not settle"
    return [*rows, ("noise in the long run", _number(limit), said)]


def _gain_words(gain: float | None, stable: bool) -> str:
    if not stable or gain is None:
        return "larger and larger, or swinging"
    if abs(gain - 1) < 1e-9:
        return "unchanged in the long run"
    return f"times {gain:.4g}, were it not divided by c_t"


def _stable_words(moduli: list[float]) -> str:
    if not moduli:
        return "it has no pole: its memory ends after the last b"
    return "every pole must have a modulus below 1"


def _cutoff_words(cutoff: float | None) -> tuple[str, str]:
    if cutoff is None:
        return "none", "no frequency loses half of its power"
    said = f"half the power passes: a period of {1 / cutoff:.3g} steps; {2 * cutoff:.3g} as --cutoff"
    return f"{_number(cutoff)} cycles/step", said


def _tell_all(as_json: bool) -> None:
    every = [numbers_of(Asked(name, named_filter(name))) for name in NAMED_FILTERS]
    if as_json:
        write_json(plain({"filters": every}))
        return
    head = ("filter", "gain", "largest pole", "delay", "half-life", "cutoff", "noise, 10 steps", "noise, long run")
    rows = []
    for item in every:
        modulus = max((pole["modulus"] for pole in item["poles"]), default=None)
        factors = item["noise_factor"]
        cells = (item["gain"], modulus, item["delay"], item["half_life"], item["cutoff"], factors["10"],
            factors["limit"])  # fmt: skip
        rows.append((item["filter"], *(_number(value) for value in cells)))
    write_table(head, rows, title="named filters", right=len(head) - 1)
    write_line(
        "\nlargest pole: its modulus; delay and half-life in steps; cutoff: where half of the power passes, in cycles "
        "per step;\nnoise: the share of the noise's variance that is left. Runs refuse filters of another gain than 1."
    )


def _draw(asked: Asked, numbers: dict[str, Any], out: Path) -> None:
    form = analysis.transfer(asked.stage)
    frequencies = np.geomspace(1e-3, 0.5, 600)
    steps = min(200, max(_PICTURED, 6 * math.ceil(numbers["half_life"] or 0))) if numbers["stable"] else _PICTURED
    # From a late step on, where a filter with a start of its own has settled.
    kappa = analysis.impulse_response(asked.stage, steps, start=steps)
    plots.filter_picture(
        out,
        kappa,
        analysis.normalizers(asked.stage, steps),
        analysis.noise_factor(asked.stage, steps),
        frequencies,
        np.abs(analysis.frequency_response(form, frequencies)) ** 2 if numbers["stable"] else frequencies * math.nan,
        cutoff=_or_nan(numbers["cutoff"]),
        limiting_noise_factor=_or_nan(numbers["noise_factor"]["limit"]),
        title=f"filter {asked.name}",
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _list(values: list[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values) or "none"


def _pole(pole: dict[str, float]) -> str:
    if pole["imaginary"] == 0:
        return f"{pole['real']:.4g}"
    return f"{pole['real']:.4g} {'+' if pole['imaginary'] > 0 else '-'} {abs(pole['imaginary']):.4g}i"


DESIGNS = ("butterworth", "chebyshev")
_KALMAN = ("sigma_H", "sigma_v", "sigma_w")


@dataclass(frozen=True)
class Asked:
    """A filter as asked for; `refused` says why no run would take it."""

    name: str
    stage: analysis.Coefficients
    refused: str = ""


def ask(text: str, design: dict[str, float | None]) -> Asked:
    """Return the filter of a name, of coefficients, or of a design with its order, cutoff and ripple."""
    given = {key: value for key, value in design.items() if value is not None}
    if "=" in text:
        refuse_options(design, "it belongs to butterworth and chebyshev")
        return _by_coefficients(text)
    name = one_of((*NAMED_FILTERS, *DESIGNS))(text)
    if name not in DESIGNS:
        refuse_options(design, "it belongs to butterworth and chebyshev")
        return Asked(name, named_filter(name))
    missing = [f"--{key}" for key in ("order", "cutoff") if key not in given]
    if missing:
        raise ArgumentError(f"{name}: needs {' and '.join(missing)}, such as {name} --order 2 --cutoff 0.1")
    order, cutoff = int(given["order"]), given["cutoff"]
    if name == "chebyshev":
        ripple = given.get("ripple", 1.0)
        return Asked(
            f"{name}, order {order}, cutoff {cutoff:g}, ripple {ripple:g} dB", chebyshev(order, cutoff, ripple)
        )
    refuse_options({"ripple": design["ripple"]}, "it belongs to chebyshev")
    return Asked(f"{name}, order {order}, cutoff {cutoff:g}", butterworth(order, cutoff))


def _by_coefficients(text: str) -> Asked:
    pairs = re.findall(r"(\S*?)\s*=\s*([^=]*?)\s*(?=$|[\s,;]\S+?\s*=)", text)
    given = {key.strip(",; "): value.strip(",; ") for key, value in pairs}
    if set(given) == {"kappa"}:
        kappa = real(given["kappa"])
        return Asked(f"kappa={kappa:g}", Averaging(kappa))
    if set(given) == set(_KALMAN):
        deviations = {key: real(given[key]) for key in _KALMAN}
        name = " ".join(f"{key}={value:g}" for key, value in deviations.items())
        return Asked(name, ScalarKalman(**deviations))
    if "b" not in given or not set(given) <= {"a", "b"}:
        raise ArgumentError(
            f"filter={text!r}: write it as b=0.1 a=-0.9, b=0.25,0.25,0.25,0.25, kappa=0.7 or "
            "sigma_H=0 sigma_v=0.1 sigma_w=1"
        )
    b, a = reals(given["b"]), reals(given["a"]) if given.get("a") else ()
    name = f"b={','.join(f'{value:g}' for value in b)}" + (f" a={','.join(f'{value:g}' for value in a)}" if a else "")
    try:
        return Asked(name, LowPass(b, a))
    except ArgumentError as error:
        return Asked(name, analysis.Recurrence(b, a), refused=str(error))


def refuse_options(options: dict[str, Any], why: str) -> None:
    """Refuse the options that were given."""
    for key, value in options.items():
        if value is not None:
            raise typer.BadParameter(f"--{key} cannot be used here; {why}")
