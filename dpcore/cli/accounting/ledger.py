"""``dpcore ledger``: make a privacy ledger, look at it, check it, write it out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpcore.cli.accounting import ledger_words as words
from dpcore.cli.accounting.answer import large_delta
from dpcore.cli.options import Commands, Json, flag, option
from dpcore.cli.output import remarks, write_json, write_line
from dpcore.cli.values import one_of, real
from dpcore.cli.waiting import tells_if_slow
from dpcore.errors import ArgumentError, DataError
from dpcore.spec.canonical import plain
from dpcore.statement.text import counted

if TYPE_CHECKING:
    from dpcore.ledger import Ledger

ledger = Commands()  # its words stand in dpcore.cli.app

_File = Annotated[Path, typer.Argument(metavar="FILE", help="The ledger's file.")]
_Accept = Annotated[
    bool,
    typer.Option(
        "--accept-file-system",
        metavar=" ",
        help="Let it lie on a file system that is not known to be safe; every statement will say so.",
    ),
]


@ledger.callback(invoke_without_command=True)
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@ledger.command(
    "create", epilog="Example:  dpcore ledger create patients.ledger --budget-epsilon 3 --budget-delta 1e-5"
)
def create_command(
    file: _File,
    budget_epsilon: Annotated[Any, option(real, "EPSILON", "What all runs together must not cross.")] = None,
    budget_delta: Annotated[Any, option(real, "DELTA", "Of the budget: well below 1/N; for example 1e-5.")] = None,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="What you call the data set.")] = "",
    composition: Annotated[str, option(one_of(("rdp", "gdp")), "NAME",
        "How runs add up: rdp, or gdp for runs without secretly sampled batches, which loses nothing.")] = "rdp",
    order: Annotated[Any, option(real, "A", "The order of rdp; the best one for the first run if left out.")] = None,
    accept_file_system: _Accept = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a new ledger. The budget is fixed once."""
    from dpcore.ledger import Ledger

    if (budget_epsilon is None) != (budget_delta is None):
        raise ArgumentError("--budget-epsilon and --budget-delta: give both, or neither for a ledger without a budget")
    budget = None if budget_epsilon is None else (budget_epsilon, budget_delta)
    if budget is not None and 0 < budget_delta < 1:
        _remark_on_delta(budget_delta)
    made = Ledger.create(
        file, budget=budget, name=name, composition=composition, order=order, accept_file_system=accept_file_system
    )
    if as_json:
        write_json({"file": str(made.path), **_header(made)})
        return
    write_line(f"made    {made.path}")
    write_line(f"budget  {words.budget(made)}")


@ledger.command("show", epilog="Example:  dpcore ledger show patients.ledger --delta 1e-6")
@tells_if_slow(lambda _given: "what the runs of the ledger come to together")
def show_command(
    file: _File,
    delta: Annotated[Any, option(real, "DELTA", "That of the budget if left out, or 1e-5 without one.")] = None,
    as_json: Json = False,
) -> None:
    """Show the runs, what they cost together, and what the budget leaves."""
    shown = _open(file)
    total = shown.total(1e-5 if delta is None and shown.budget is None else delta)
    if delta is not None:
        _remark_on_delta(delta)
    if as_json:
        runs = [run.to_dict() | {"epsilon": plain(run.epsilon(total.delta))} for run in shown.runs()]
        write_json({"file": str(shown.path), **_header(shown), "runs": runs, "total": total.to_dict()})
        return
    write_line(words.spent(shown, total))
    write_line()
    write_line(f"ledger  {shown.path}" + (f" ({shown.name})" if shown.name else ""))
    write_line(f"budget  {words.budget(shown)}")
    if shown.file_systems:
        write_line(f"lies on {', '.join(shown.file_systems)}, on its owner's word")
    if total.runs:
        words.table(shown, total.delta)
    words.tell(total)


@ledger.command("verify", epilog="Example:  dpcore ledger verify patients.ledger")
def verify_command(
    file: _File,
    seal: Annotated[str | None, typer.Option("--seal", metavar="SHA256",
        help="A seal noted earlier, which some entry must bear.")] = None,
    accept_file_system: _Accept = False,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Check all entries, seals, counters and charges anew. Ends with status 2 where something is wrong."""
    found = _open(file, accept_file_system).verify(seal=seal)
    if as_json:
        write_json(
            {"valid": found.valid, "entries": found.entries, "seal": found.seal, "problems": list(found.problems)}
        )
    else:
        for problem in found.problems:
            write_line(f"problem  {problem}")
        word = "valid" if found.valid else "NOT valid"
        write_line(f"{word}: {counted(found.entries, 'entry', 'entries')}, the last with the seal {found.seal}")
    return 0 if found.valid else 2


@ledger.command("export", epilog="Example:  dpcore ledger export patients.ledger > patients.json")
def export_command(
    file: _File,
    as_json: Json = False,  # noqa: ARG001 (it always is)
) -> int:
    """Write all entries as one JSON object; of a damaged ledger what can be read, with status 2."""
    from dpcore.ledger import salvage

    try:
        content = _open(file).export()
    except DataError as problem:
        if not file.is_file():
            raise
        content = salvage(file)
        if not content["entries"]:
            raise
        remarks().print(f"remark: {problem}", markup=False)
        write_json({"damaged": str(problem), **content})
        return 2
    write_json(content)
    return 0


@ledger.command(
    "charge", epilog="Example:  dpcore ledger charge patients.ledger --statement runs/old --name 'before the ledger'"
)
def charge_command(
    file: _File,
    statement: Annotated[Path | None, typer.Option("--statement", metavar="FILE",
        help="A run folder, or its statement.json.")] = None,
    opacus: Annotated[Path | None, typer.Option("--opacus", metavar="FILE",
        help="A checkpoint of Opacus, or its accountant's state_dict() as JSON.")] = None,
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="What the ledger shall call it.")] = "",
    already_released: Annotated[bool, flag("--already-released",
        "Write it down even beyond the budget, of which nothing is left then.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Charge a release that the ledger did not pay for step by step."""
    from dpcore.cli.accounting.ledger_charge import charge

    opened = _open(file)
    run_id = charge(opened, statement, opacus, name, already_released)
    total = opened.total(1e-5 if opened.budget is None else None)
    if as_json:
        write_json({"file": str(opened.path), "run": run_id, "total": total.to_dict()})
        return
    write_line(f"charged  {name}, as run {run_id.partition('-')[2]}")
    write_line(words.spent(opened, total))


def _remark_on_delta(delta: float) -> None:
    sentence = large_delta(delta)
    if sentence is not None:
        remarks().print(f"[yellow]remark:[/] {sentence}")


def _open(file: Path, accept_file_system: bool = False) -> Ledger:
    """Open a ledger to look at it: one that cannot be written may be looked at too."""
    import os

    from dpcore.ledger import Ledger

    writable = os.access(file, os.W_OK) and os.access(file.resolve().parent, os.W_OK)
    return Ledger.open(file, read_only=file.exists() and not writable, accept_file_system=accept_file_system)


def _header(shown: Ledger) -> dict[str, Any]:
    return {"ledger": shown.ledger_id, "name": shown.name,
        "budget": None if shown.budget is None else dict(zip(("epsilon", "delta"), shown.budget, strict=True)),
        "composition": shown.filter.kind, "order": shown.order, "file_systems": list(shown.file_systems)}  # fmt: skip
