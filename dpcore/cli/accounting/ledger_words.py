"""A ledger in words, for ``dpcore ledger``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpcore.cli.output import write_line
from dpcore.statement.text import counted, format_epsilon, format_number

if TYPE_CHECKING:
    from dpcore.ledger import Ledger, Total

_NARROWEST = 80
_CALIBRATE = "dpcore calibrate --ledger FILE --dataset-size N --batch-size B --epochs E"


def budget(shown: Ledger) -> str:
    """Return the budget, and how runs add up."""
    how = "Gaussian (GDP) filter"
    if shown.filter.kind == "rdp":
        order = "to be fixed with the first row" if shown.order is None else f"{shown.order:g}"
        how = f"Renyi filter of order {order}"
    if shown.budget is None:
        return f"none; {how}"
    epsilon, delta = shown.budget
    return f"epsilon = {format_number(epsilon)} at delta = {format_number(delta)}; {how}"


def table(shown: Ledger, delta: float) -> None:
    """Write the table of runs."""
    from rich.markup import escape
    from rich.table import Table

    from dpcore.cli.output import results

    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("run", "name", "begun", "steps", "forks", "epsilon alone"):
        made.add_column(
            column,
            justify="right" if column in ("steps", "forks", "epsilon alone") else "left",
            no_wrap=column != "name",
            overflow="fold",
        )
    for run in shown.runs():
        begun = run.begun[:16].replace("T", " ")
        counted = f"{run.releases:,} / {run.steps:,}"
        alone = format_epsilon(run.epsilon(delta))
        made.add_row(run.run_id.partition("-")[2], escape(run.name), begun, counted, str(run.forks), alone)
    console = results()
    # On a narrower terminal lines are broken, and no figure is cut off.
    console.width = max(console.width, _NARROWEST)
    write_line()
    console.print(made)
    write_line()


def spent(shown: Ledger, total: Total) -> str:
    """Say in one line what is spent, what is left, and of what."""
    who = counted(total.runs, "run")
    if shown.budget is None or total.limit is None:
        at = f"at delta = {format_number(total.delta)}"
        return f"Spent: epsilon = {format_epsilon(total.odometer)} {at} by {who}; there is no budget."
    epsilon, delta = shown.budget
    whole = f"of a budget of epsilon = {format_number(epsilon)} at delta = {format_number(delta)}"
    if total.alone:
        return f"Spent, or kept for plans fixed beforehand: all {whole}, by {who}. Nothing is left for another run."
    used, kept, left = _shares(total, total.limit)
    middle = f"; kept for plans fixed beforehand: {kept:.1f}%" if kept else ""
    return f"Spent: {used:.1f}% {whole}, by {who}{middle}; left: {left:.1f}%."


def _shares(total: Total, limit: float) -> tuple[float, float, float]:
    """Return which percentages of a budget are spent, kept and left."""
    used, kept = (100 * part / limit if part else 0.0 for part in (total.spent, total.kept))
    return used, kept, max(0.0, 100 - used - kept)


def tell(total: Total) -> None:
    """Write what the runs come to, line by line."""
    at = f"at delta = {format_number(total.delta)}"
    if total.adjacency is not None:
        at += f", {total.adjacency} adjacency"
    write_line(f"so far, if all were fixed beforehand     epsilon = {format_epsilon(total.fixed)} {at}")
    if not total.alone:
        write_line(f"so far, however they were chosen         epsilon = {format_epsilon(total.odometer)} {at}")
        if total.budget is not None and total.odometer:
            write_line(" " * 41 + "(holds whenever one looks, which costs more than its share of the budget)")
    if total.plan is not None:
        plans = counted(len(total.fixed_runs), "plan")
        write_line(f"{f'whole, {plans} fixed beforehand':<40} epsilon = {format_epsilon(total.plan)} {at}")
    if total.budget is not None and total.limit is not None:
        write_line(f"with all to come, however it is chosen   epsilon = {format_epsilon(total.budget)} {at}")
        _tell_budget(total, total.limit)
    for note in total.notes:
        write_line(f"note: {note}")


def _tell_budget(total: Total, limit: float) -> None:
    start = "of the budget                            "
    if total.alone:
        write_line(f"{start}all kept for the plans fixed beforehand: no later run, and no fork, can be paid for")
        return
    if not total.fixed_runs and total.spent == 0.0:
        write_line(f"{start}0.0% spent, 100.0% left; what is begun before the first row is reserved may use all of it")
        return
    used, kept, left = _shares(total, limit)
    middle = f", {kept:.1f}% kept for the plans fixed beforehand" if kept else ""
    write_line(f"{start}{used:.1f}% spent{middle}, {left:.1f}% left")
    if left:
        # Whole, as it is to be typed: what is left out of the plan is what calibrate looks for.
        write_line(f"{'what noise a plan then needs':<40} {_CALIBRATE}")
