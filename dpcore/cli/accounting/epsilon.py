"""``dpcore epsilon`` and ``dpcore delta``: what a plan costs."""

from __future__ import annotations

import math
from typing import Annotated, Any

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.cli.accounting import answer
from dpcore.cli.accounting.event_options import EventOptions
from dpcore.cli.accounting.opacus import Opacus, OpacusHistory, asked
from dpcore.cli.options import Json, option
from dpcore.cli.output import write_json, write_line
from dpcore.cli.values import real
from dpcore.spec.canonical import plain
from dpcore.statement.text import format_epsilon, format_lower, format_number


@answer.accounts()
def epsilon(
    delta: Annotated[float, option(real, "DELTA", "Well below 1/N; for example 1e-5.")],
    accountant: answer.Accountant = None,
    opacus: Opacus = None,
    show_all: answer.AllAccountants = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Say what epsilon a noise multiplier gives."""
    plan = asked(opacus, given)
    event = plan.event()
    name = answer.tightest(accounting.epsilon, event, delta, accountant)
    value = accounting.epsilon(event, delta, name)
    interval = accounting.epsilon_interval(event, delta) if name == "pld" else None
    told = {"epsilon": plain(value), "delta": delta, "accountant": name}
    remark = answer.remark_on_delta(delta, plan, event)
    table = answer.every(accounting.epsilon, event, delta) if show_all or as_json else {}
    lines = [f"epsilon = {format_epsilon(value)} at delta = {format_number(delta)}", answer.sentence(name, plan, event)]
    lines += ["Infinite: there is no guarantee at all."] if value == float("inf") else []
    _tell(told, lines, interval, plan, event, table, remark, as_json)


@answer.accounts()
def delta(
    epsilon: Annotated[float, option(real, "EPSILON", "0 or more, for example 3.")],
    accountant: answer.Accountant = None,
    opacus: Opacus = None,
    show_all: answer.AllAccountants = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Say what delta a plan has at an epsilon."""
    plan = asked(opacus, given)
    event = plan.event()
    name = answer.tightest(accounting.delta, event, epsilon, accountant)
    value = accounting.delta(event, epsilon, name)
    interval = accounting.delta_interval(event, epsilon) if name == "pld" else None
    told = {"delta": value, "epsilon": epsilon, "accountant": name}
    remark = answer.remark_on_delta(value, plan, event) if 0 < value < 1 else None
    table = answer.every(accounting.delta, event, epsilon) if show_all or as_json else {}
    # Where anything was released, an upper bound of 0 is one that a float64 cannot hold.
    underflow = value == 0.0 and accounting.delta(event, 0.0, name) > 0.0
    shown = "below 1e-300" if underflow else format_epsilon(value)
    lines = [f"delta = {shown} at epsilon = {format_number(epsilon)}", answer.sentence(name, plan, event)]
    lines += ["A delta of 1 is no guarantee at all."] if value == 1.0 else []
    _tell(told, lines, interval, plan, event, table, remark, as_json)


def _tell(
    told: dict[str, Any],
    lines: list[str],
    interval: tuple[float, float] | None,
    plan: EventOptions | OpacusHistory,
    event: Event,
    table: dict[str, float],
    remark: str | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Write an answer: a person gets the lines, the certified interval, and the bound by accountant."""
    if as_json:
        ends = {} if interval is None else {"interval": plain(list(interval))}
        beside = {} if remark is None else {"remark": remark}
        rests = (
            {} if isinstance(plan, EventOptions) else {"mechanism": plan.mechanism, "holds_if": list(plan.assumptions)}
        )
        write_json({**told, **ends, "accountants": plain(table), **answer.described(event), **beside, **rests})
        return
    if interval is not None and math.isfinite(interval[1]):
        low, high = format_lower(interval[0]), format_epsilon(interval[1])
        lines.append(f"certified: the smallest {next(iter(told))} lies in [{low}, {high}]")
    width = max(map(len, table), default=0)
    for line in [*lines, *(f"  {name.ljust(width)}  {format_epsilon(value)}" for name, value in table.items())]:
        write_line(line)
    if isinstance(plan, OpacusHistory):
        for line in plan.lines():
            write_line(line)
