"""``dpcore epsilon`` and ``dpcore delta``: what a plan costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from dpcore import accounting
from dpcore.cli.accounting import answer
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
    _answer("epsilon", "delta", delta, accountant, opacus, show_all, as_json, given)


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
    _answer("delta", "epsilon", epsilon, accountant, opacus, show_all, as_json, given)


def _answer(
    wanted: str,
    other: str,
    at: float,
    accountant: str | None,
    opacus: Path | None,
    show_all: bool,
    as_json: bool,
    given: dict[str, Any],
) -> None:  # fmt: skip
    """Write the bound on one of the two at a value of the other, the certified interval, and it by accountant."""
    plan = asked(opacus, given)
    event = plan.event()
    bound: Callable[..., float] = accounting.delta
    bounds: Callable[..., tuple[float, float]] = accounting.delta_interval
    if wanted == "epsilon":
        bound, bounds = accounting.epsilon, accounting.epsilon_interval
    name = answer.tightest(bound, event, at, accountant)
    value = bound(event, at, name)
    interval = bounds(event, at) if name == "pld" else None
    stated = value if wanted == "delta" else at
    remark = answer.remark_on_delta(stated, plan, event) if wanted == "epsilon" or 0 < value < 1 else None
    every = accounting.accountants_for(event) if show_all or as_json else []
    table = {each: bound(event, at, each) for each in every}
    if as_json:
        ends = {} if interval is None else {"interval": plain(list(interval))}
        rests = plan.described() if isinstance(plan, OpacusHistory) else {}
        write_json({wanted: plain(value), other: at, "accountant": name, **ends, "accountants": plain(table),
            **answer.described(event), **({} if remark is None else {"remark": remark}), **rests})  # fmt: skip
        return
    # Where anything was released, an upper bound of 0 is one that a float64 cannot hold.
    underflow = wanted == "delta" and value == 0.0 and bound(event, 0.0, name) > 0.0
    write_line(f"{wanted} = {'below 1e-300' if underflow else format_epsilon(value)} at {other} = {format_number(at)}")
    write_line(answer.sentence(name, plan, event))
    if value == math.inf:
        write_line("Infinite: there is no guarantee at all.")
    if wanted == "delta" and value == 1.0:
        write_line("A delta of 1 is no guarantee at all.")
    if interval is not None and math.isfinite(interval[1]):
        low, high = format_lower(interval[0]), format_epsilon(interval[1])
        write_line(f"certified: the smallest {wanted} lies in [{low}, {high}]")
    for each, found in table.items():
        write_line(f"  {each.ljust(max(map(len, table)))}  {format_epsilon(found)}")
    if isinstance(plan, OpacusHistory):
        for line in plan.lines():
            write_line(line)
