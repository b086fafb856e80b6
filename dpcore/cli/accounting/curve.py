"""``dpcore curve``: delta over epsilon, an attacker's rates, epsilon over the steps."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from dpcore import accounting
from dpcore.accounting.pld import curve as curve_of_deltas
from dpcore.accounting.pld import trade_off
from dpcore.cli.accounting import answer
from dpcore.cli.accounting.answer import EventOptions
from dpcore.cli.options import Json, one_of, option, real
from dpcore.cli.output import write_json, write_line, write_table
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.statement.text import format_epsilon, format_lower

KINDS = ("delta", "trade-off", "steps")
_LEAST_DELTA = 1e-10
_POINTS = 40


class Points(NamedTuple):
    """A curve: the names of x and y, and rows of x and the certified ends of y."""

    names: tuple[str, str]
    rows: list[tuple[float, float, float]]
    more: dict[str, float]


@answer.accounts()
def curve(
    kind: Annotated[str, typer.Argument(parser=one_of(KINDS), metavar="delta | trade-off | steps",
        help="Which curve.")] = "delta",
    delta: Annotated[float | None, option(real, "DELTA", "Of the curve over steps; for example 1e-5.")] = None,
    as_json: Json = False,
    **given: Any,
) -> None:  # fmt: skip
    """Show a plan's guarantee: delta over epsilon, an attacker's rates, epsilon over the steps."""
    plan = EventOptions(**given)
    if delta is not None and kind != "steps":
        raise ArgumentError(f"delta={delta!r}: is only for the curve over steps; leave it out")
    event = plan.event()
    if "pld" not in accounting.accountants_for(event):
        raise PrivacyError(f"event={type(event).__name__}: has no privacy loss distribution that is known here")
    if math.isinf(accounting.epsilon_interval(event, 0.5).upper):
        raise PrivacyError("epsilon is infinite: there is no guarantee at all, and nothing to show")
    points = {"delta": _deltas, "trade-off": _trade_off, "steps": _epsilons}[kind](plan, delta)
    if as_json:
        axes = {"curve": kind, "x": points.names[0], "y": points.names[1]}
        write_json({**axes, "points": points.rows, **points.more, **answer.described(event)})
        return
    _tell(kind, points, plan)


def _deltas(plan: EventOptions, _: float | None) -> Points:
    """Return delta at epsilons from 0 until it falls below 1e-10."""
    event = plan.event()
    last = accounting.epsilon_interval(event, _LEAST_DELTA).upper
    x = np.linspace(0.0, last, _POINTS) if last > 0 else np.array([0.0])
    return Points(("epsilon", "delta"), _rows(x, *curve_of_deltas(event, x)), {})


def _rows(*columns: Iterable[float]) -> list[tuple[float, float, float]]:
    return [(float(x), float(low), float(high)) for x, low, high in zip(*columns, strict=True)]


def _epsilons(plan: EventOptions, delta: float | None) -> Points:
    """Epsilon at numbers of steps up to the planned one."""
    if delta is None:
        raise ArgumentError("delta: give --delta for the curve of epsilon over steps")
    steps = plan.steps_in_all
    # Closer together at the beginning, where epsilon rises fastest; all steps if the exact formula is instant.
    many = 400 if "gaussian" in accounting.accountants_for(plan.event()) else _POINTS
    if steps < 1:
        raise ArgumentError("steps: must be at least 1 for the curve over steps")
    counts = sorted({max(1, round(steps * share**2)) for share in np.linspace(0, 1, many)})
    spans = [accounting.epsilon_interval(replace(plan, steps=count, epochs=None).event(), delta) for count in counts]
    ends = [item.lower for item in spans], [item.upper for item in spans]
    return Points(("steps", "epsilon"), _rows(counts, *ends), {"delta": delta})


def _trade_off(plan: EventOptions, _: float | None) -> Points:
    """An attacker's best true positive rate at false positive rates from 1e-6 to 1."""
    # Close together in both scales: between two points of a concave curve, a straight line is below it.
    rates = np.unique(np.concatenate([10.0 ** np.linspace(-6, -1, 21), np.linspace(0.05, 0.95, 37)]))
    bounds = trade_off(plan.event(), rates.tolist())
    rows = _rows(bounds.false_positive_rates, bounds.lower, bounds.upper)
    # The guess that everybody is in has both rates 1.
    more = {"advantage": bounds.advantage.upper}
    return Points(("false positive rate", "true positive rate"), [*rows, (1.0, 1.0, 1.0)], more)


def _tell(kind: str, points: Points, plan: EventOptions) -> None:
    """Print a few of the points."""
    write_line(f"{plan.words}, noise multiplier {plan.noise_multiplier:g}, {plan.event().adjacency} adjacency")
    chosen = np.unique(np.linspace(0, len(points.rows) - 1, min(9, len(points.rows))).round().astype(int))
    rows = [
        (f"{int(x):,}" if kind == "steps" else f"{x:.4g}", format_lower(low), format_epsilon(high))
        for x, low, high in (points.rows[i] for i in chosen)
    ]
    write_table((points.names[0], f"{points.names[1]} at least", "at most"), rows, right=3)
    if "advantage" in points.more:
        write_line(f"advantage: the two rates differ by at most {format_epsilon(points.more['advantage'])}")
