"""What ``dpcore ledger charge`` writes down: a release that the ledger did not pay for step by step."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.accounting import Event
from dpcore.cli.accounting.event_options import EventOptions
from dpcore.cli.accounting.opacus import OpacusHistory, asked
from dpcore.cli.stored import single_statement
from dpcore.errors import ArgumentError, BudgetError

if TYPE_CHECKING:
    from dpcore.ledger import Ledger


def charge(ledger: Ledger, statement: Path | None, opacus: Path | None, name: str, already_released: bool) -> str:
    """Charge what a file says was released, and return the run's id."""
    if (statement is None) == (opacus is None):
        raise ArgumentError("--statement and --opacus: give one of the two, which says what was released")
    if not name.strip():
        raise ArgumentError(f"name={name!r}: must say what was released, such as --name 'sweep of May'")
    event, description = _of_opacus(opacus) if opacus is not None else _of_statement(statement, ledger)
    try:
        return ledger.charge(event, name=name, description=description, already_released=already_released)
    except BudgetError as cause:
        raise BudgetError(
            f"{cause}; if it was released already, add --already-released, which writes it down and leaves no budget"
        ) from cause


def _of_opacus(path: Path) -> tuple[Event, dict[str, Any]]:
    history = asked(path, {item.name: item.default for item in fields(EventOptions)})
    assert isinstance(history, OpacusHistory)
    return history.event(), {"opacus": history.described()}


def _of_statement(path: Path | None, ledger: Ledger) -> tuple[Event, dict[str, Any]]:
    assert path is not None
    read = single_statement(path)
    if read.ledger.get("ledger") == ledger.ledger_id:
        raise ArgumentError(f"statement={str(path)!r}: this ledger paid for it, as its run {read.ledger.get('run')}")
    hashes = {"settings_hash": read.settings_hash, "statement_hash": read.statement_hash}
    if any(run.description == hashes for run in ledger.runs()):
        raise ArgumentError(f"statement={str(path)!r}: this ledger was charged for it before")
    return Event.from_dict(read.event), hashes
