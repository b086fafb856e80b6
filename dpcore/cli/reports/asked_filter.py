"""A filter as it is typed on the command line: by its name, by coefficients, or by a design."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import typer

from dpcore.cli.values import one_of, real, reals
from dpcore.errors import ArgumentError
from dpcore.stages.filters import NAMED_FILTERS, Averaging, LowPass, ScalarKalman, butterworth, chebyshev, named_filter
from dpcore.theory.analysis import filters as analysis

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
