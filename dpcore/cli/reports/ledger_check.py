"""A statement beside the ledger that paid for its run, for ``dpcore verify --ledger``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.errors import DpcoreError
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, counted
from dpcore.statement.verify.finding import FAILED, OK, REMARK, Finding, difference

if TYPE_CHECKING:
    from dpcore.ledger import Ledger, RunRecord


def ledger_findings(content: Mapping[str, Any], path: Path) -> list[Finding]:
    """Compare a statement's run, event and steps with those that the ledger holds."""
    from dpcore.ledger import Ledger

    ledger = Ledger.open(path, read_only=True)
    try:
        return list(_compared(Statement.unchecked(content), ledger))
    except (DpcoreError, LookupError, TypeError, ValueError, AttributeError) as cause:
        return [Finding("ledger", FAILED, f"the statement cannot be compared with {path} ({type(cause).__name__})")]


def _compared(statement: Statement, ledger: Ledger) -> Iterator[Finding]:
    named, path = statement.ledger, ledger.path
    if named.get("ledger") != ledger.ledger_id:
        other = f"names the ledger {named['ledger']}" if named else "names no ledger"
        yield Finding("ledger", FAILED, f"the statement {other}, and {path} is {ledger.ledger_id}")
        return
    found = [run for run in ledger.runs() if run.run_id == named.get("run")]
    if not found:
        yield Finding("ledger", FAILED, f"{path} has no run {named.get('run')}: it is an older copy, or never paid")
        return
    yield Finding("ledger", OK, f"{path} paid for it, as its run {found[0].run_id}")
    yield _steps(statement, found[0])
    if not statement.steps_abandoned:  # those come on top of the plan
        yield _event("ledger: event planned", statement.event_planned, found[0].planned.to_dict())
    if "seal" not in named:
        return
    seal = str(named["seal"])
    missing = [problem for problem in ledger.verify(seal=seal).problems if f"the seal {seal}" in problem]
    yield Finding("ledger: seal", FAILED if missing else OK, missing[0] if missing else f"{seal[:16]}... is an entry's")


def _steps(statement: Statement, run: RunRecord) -> Finding:
    name, stated = "ledger: event", statement.steps_taken + statement.steps_abandoned
    held = counted(run.releases, "step")
    if stated == run.releases:
        return _event(name, statement.event, run.event.to_dict())
    if stated < run.releases:
        words = f"the ledger holds {held} of this run and the statement {stated:,}: it is older, or leaves steps out"
        return Finding(name, FAILED, words)
    if statement.note.startswith(WRITTEN_BEFORE):
        words = f"the statement counts {stated:,} steps before they were taken, and the ledger holds {held}"
        return Finding(name, REMARK, words)
    return Finding(name, FAILED, f"the statement counts {stated:,} steps, and the ledger paid for {held}")


def _event(name: str, stated: Mapping[str, Any], held: Mapping[str, Any]) -> Finding:
    problem = difference(stated, held)
    if problem is None:
        return Finding(name, OK, "the one that the ledger holds")
    return Finding(name, FAILED, f"is not the one that the ledger holds: {problem}")
