"""``dpcore ledger``: make a privacy ledger, look at it, check it, write it out."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.accounting import Event
from dpcore.cli.accounting.answer import history, large_delta
from dpcore.cli.options import Commands, Json, flag, option, real
from dpcore.cli.output import remark, told_if_slow, write_answer, write_json, write_line, write_table
from dpcore.cli.stored import single_statement
from dpcore.errors import ArgumentError, BudgetError, DataError
from dpcore.ledger import Ledger, Total, salvage
from dpcore.statement.text import counted, format_epsilon, format_number

ledger = Commands()  # its help is in dpcore.cli.app

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger's file.")]
_Accept = Annotated[bool, flag("--accept-file-system",
    "Allow a file system that is not known to be safe; every statement will say so.")]  # fmt: skip


@ledger.command("create", example="dpcore ledger create patients.ledger --budget-epsilon 3 --budget-delta 1e-5")
def create_command(
    file: _File,
    budget_epsilon: Annotated[Any, option(real, "EPSILON", "Limit for all runs together.")] = None,
    budget_delta: Annotated[Any, option(real, "DELTA", "The budget's delta, well below 1/N; such as 1e-5.")] = None,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Name of the data set.")] = "",
    accept_file_system: _Accept = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a new ledger. The budget is fixed once."""
    if (budget_epsilon is None) != (budget_delta is None):
        raise ArgumentError("--budget-epsilon and --budget-delta: give both, or neither for a ledger without a budget")
    budget = None if budget_epsilon is None else (budget_epsilon, budget_delta)
    if budget is not None and 0 < budget_delta < 1:
        remark(large_delta(budget_delta))
    made = Ledger.create(file, budget=budget, name=name, accept_file_system=accept_file_system)
    header = {"file": str(made.path), **_header(made)}
    write_answer(as_json, header, f"made    {made.path}", f"budget  {_budget(made)}")


@ledger.command("show", example="dpcore ledger show patients.ledger --delta 1e-6")
@told_if_slow("the total of the ledger's runs")
def show_command(
    file: _File,
    delta: Annotated[Any, option(real, "DELTA", "By default the budget's, or 1e-5 without a budget.")] = None,
    as_json: Json = False,
) -> None:
    """Show the runs, their total cost, and the rest of the budget."""
    from rich.markup import escape

    shown = _open(file)
    total = shown.total(1e-5 if delta is None and shown.budget is None else delta)
    if delta is not None:
        remark(large_delta(delta))
    if as_json:
        runs = [run.to_dict() | {"epsilon": run.epsilon(total.delta)} for run in shown.runs()]
        write_json({"file": str(shown.path), **_header(shown), "runs": runs, "total": total.to_dict()})
        return
    write_line(_spent(shown, total))
    write_line()
    write_line(f"ledger  {shown.path}" + (f" ({shown.name})" if shown.name else ""))
    write_line(f"budget  {_budget(shown)}")
    if shown.file_systems:
        write_line(f"is on {', '.join(shown.file_systems)}, which its owner accepted")
    if total.runs:
        rows = [
            (run.run_id.partition("-")[2], escape(run.name), run.begun[:16].replace("T", " "),
             f"{run.releases:,} / {run.steps:,}", str(run.forks), format_epsilon(run.epsilon(total.delta)))
            for run in shown.runs()
        ]  # fmt: skip
        write_line()
        head = "run", "name", "begun", "steps", "forks", "epsilon alone"
        write_table(head, rows, right=3, wraps=1)
        write_line()
    _tell(total)


@ledger.command("verify", example="dpcore ledger verify patients.ledger")
def verify_command(
    file: _File,
    seal: Annotated[str | None, typer.Option("--seal", metavar="SHA256",
        help="A seal noted earlier, which some entry must have.")] = None,
    accept_file_system: _Accept = False,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Check all entries, seals, counters and charges again. Ends with status 2 if something is wrong."""
    check = _open(file, accept_file_system).verify(seal=seal)
    write_answer(
        as_json,
        {"valid": check.valid, "entries": check.entries, "seal": check.seal, "problems": list(check.problems)},
        *(f"problem  {problem}" for problem in check.problems),
        f"{'valid' if check.valid else 'NOT valid'}: {counted(check.entries, 'entry', 'entries')}, the last with the "
        f"seal {check.seal}",
    )
    return 0 if check.valid else 2


@ledger.command("export", example="dpcore ledger export patients.ledger > patients.json")
def export_command(
    file: _File,
    as_json: Json = False,  # noqa: ARG001 (it always is)
) -> int:
    """Write all entries as one JSON object. If the ledger is damaged, write all readable ones; the status is 2."""
    try:
        content = _open(file).export()
    except DataError as problem:
        if not file.is_file():
            raise
        content = salvage(file)
        if not content["entries"]:
            raise
        remark(str(problem))
        write_json({"damaged": str(problem), **content})
        return 2
    write_json(content)
    return 0


@ledger.command(
    "charge", example="dpcore ledger charge patients.ledger --statement runs/old --name 'before the ledger'"
)
def charge_command(
    file: _File,
    statement: Annotated[Path | None, typer.Option("--statement", metavar="FILE",
        help="A run folder, or its statement.json.")] = None,
    opacus: Annotated[Path | None, typer.Option("--opacus", metavar="FILE",
        help="A checkpoint of Opacus, or its accountant's state_dict() as JSON.")] = None,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="Name of the release in the ledger.")] = "",
    already_released: Annotated[bool, flag("--already-released",
        "Charge it even beyond the budget, which is then used up.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Charge a release that the ledger did not pay for step by step."""
    opened = _open(file)
    if (statement is None) == (opacus is None):
        raise ArgumentError("--statement and --opacus: give one of the two, which describes the release")
    if not name.strip():
        raise ArgumentError(f"name={name!r}: must name the release, such as --name 'sweep of May'")
    if opacus is not None:
        recorded = history(opacus)
        event, description = recorded.event(), dict[str, Any](opacus=recorded.described())
    else:
        assert statement is not None
        read = single_statement(statement)
        event = Event.from_dict(read.event)
        description = {"settings_hash": read.settings_hash, "statement_hash": read.statement_hash}
        if read.ledger.get("ledger") == opened.ledger_id:
            paid = f"this ledger paid for it, as its run {read.ledger.get('run')}"
            raise ArgumentError(f"statement={str(statement)!r}: {paid}")
        if any(run.description == description for run in opened.runs()):
            raise ArgumentError(f"statement={str(statement)!r}: this ledger was charged for it before")
    try:
        run_id = opened.charge(event, name=name, description=description, already_released=already_released)
    except BudgetError as cause:
        raise BudgetError(
            f"{cause}; if it was released already, add --already-released, which charges it and uses up the budget"
        ) from cause
    total = opened.total(1e-5 if opened.budget is None else None)
    charged = {"file": str(opened.path), "run": run_id, "total": total.to_dict()}
    write_answer(as_json, charged, f"charged  {name}, as run {run_id.partition('-')[2]}", _spent(opened, total))


def _open(file: Path, accept_file_system: bool = False) -> Ledger:
    """Open a ledger for reading; it need not be writable."""
    writable = os.access(file, os.W_OK) and os.access(file.resolve().parent, os.W_OK)
    return Ledger.open(file, read_only=file.exists() and not writable, accept_file_system=accept_file_system)


def _header(shown: Ledger) -> dict[str, Any]:
    return {"ledger": shown.ledger_id, "name": shown.name,
        "budget": None if shown.budget is None else dict(zip(("epsilon", "delta"), shown.budget, strict=True)),
        "composition": shown.filter.kind, "order": shown.order, "file_systems": list(shown.file_systems)}  # fmt: skip


_CALIBRATE = "dpcore calibrate --ledger FILE --dataset-size N --batch-size B --epochs E"


def _budget(shown: Ledger) -> str:
    """Return the budget, and how runs add up."""
    how = "Gaussian (GDP) filter"
    if shown.filter.kind == "rdp":
        order = ", whose order the first row fixes" if shown.order is None else f" of order {shown.order:g}"
        how = f"Renyi filter{order}"
    if shown.budget is None:
        return f"none; {how}"
    epsilon, delta = shown.budget
    return f"epsilon = {format_number(epsilon)} at delta = {format_number(delta)}; {how}"


def _spent(shown: Ledger, total: Total) -> str:
    """Return one line on the spent and remaining parts of the budget."""
    who = counted(total.runs, "run")
    if shown.budget is None or total.limit is None:
        at = f"at delta = {format_number(total.delta)}"
        return f"Spent: epsilon = {format_epsilon(total.odometer)} {at} by {who}; there is no budget."
    epsilon, delta = shown.budget
    whole = f"of a budget of epsilon = {format_number(epsilon)} at delta = {format_number(delta)}"
    if total.alone:
        return f"Spent, or kept for plans fixed beforehand: all {whole}, by {who}. Nothing is left for another run."
    used, kept = (100 * part / total.limit if part else 0.0 for part in (total.spent, total.kept))
    middle = f"; kept for plans fixed beforehand: {kept:.1f}%" if kept else ""
    left = max(0.0, 100 - used - kept)
    one = 1.0 if epsilon >= 1 else epsilon / 10
    fit = counted(shown.remaining().runs(one), "more run")
    return (
        f"Spent: {used:.1f}% {whole}, by {who}{middle}; left: {left:.1f}%, or {fit} of epsilon = {format_number(one)}."
    )


def _tell(total: Total) -> None:
    """Write the totals of the runs, line by line."""
    at = f"at delta = {format_number(total.delta)}"
    if total.adjacency is not None:
        at += f", {total.adjacency} adjacency"
    bounds = {"so far, if all were fixed beforehand": total.fixed} if total.runs else {}
    if total.runs and total.budget is None:
        bounds["so far, however they were chosen"] = total.odometer
    if total.plan not in (None, total.fixed):
        bounds[f"whole, {counted(len(total.fixed_runs), 'plan')} fixed beforehand"] = total.plan
    if total.budget is not None:
        bounds["with all to come, however it is chosen"] = total.budget
    for name, epsilon in bounds.items():
        write_line(f"{name:<40} epsilon = {format_epsilon(epsilon)} {at}")
    if total.budget is not None and not total.alone:
        # The whole command to type: calibrate finds the setting that is left out.
        write_line(f"{'to find the noise of a plan':<40} {_CALIBRATE}")
    for note in total.notes:
        write_line(f"note: {note}")
