"""``dpcore statement``, ``verify`` and ``methods``: a run's statement, its verification, and the methods' papers."""

import inspect
import shutil
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any

import typer

from dpcore.accounting import PrivateSelection, smallest_epsilon
from dpcore.cli.options import Json, flag
from dpcore.cli.output import told_if_slow, write_json, write_line, write_table
from dpcore.cli.stored import as_statement, stored
from dpcore.cli.train.run_folder import RUNS
from dpcore.errors import DpcoreError
from dpcore.ledger import Ledger, RunRecord
from dpcore.methods import METHODS, PAPERS
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, counted, visible
from dpcore.statement.verify import ROUNDING, too_much, upper_bound
from dpcore.statement.verify import holds as all_hold
from dpcore.statement.verify import verify as check
from dpcore.statement.verify.finding import FAILED, OK, REMARK, TRUSTED, Finding, difference
from dpcore.statement.verify.folder import check_files, looked_at
from dpcore.statement.verify.rebuild import StatedEvents, rebuilt


def folder_findings(folder: Path, content: Mapping[str, Any]) -> list[Finding]:
    """Compare the files of a run's folder, or of an export, with its statement; name the files that are not checked."""
    try:
        statement = Statement.unchecked(content)
    except (DpcoreError, LookupError, TypeError, ValueError):  # the check of the statement itself reported it
        return [_unchecked(folder, ("statement.json",))]
    return [*check_files(folder, statement), _unchecked(folder, looked_at(folder))]


def _unchecked(folder: Path, looked: Container[str], more: Iterable[str] = ()) -> Finding:
    names = [*sorted(path.name for path in folder.iterdir() if path.name not in looked), *sorted(more)]
    return Finding("other files", TRUSTED, f"not checked: {', '.join(names)}" if names else "there are none")


@told_if_slow("every epsilon of the statement again")
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run folder, an export, or a statement.json.")],
    ledger: Annotated[Path | None, typer.Option("--ledger", metavar="FILE",
        help="Also compare run, event, steps and total with the ledger that paid.")] = None,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Derive a statement again from its settings, and compare the files next to it. Status 1 if a check fails."""
    statements = stored(path)
    by_name = {}
    for name, (folder, content) in statements.items():
        by_name[name] = [*check(content), *(folder_findings(folder, content) if path.is_dir() else ())]
        if ledger is not None:
            by_name[name] += ledger_findings(content, ledger)
    if path.is_dir() and "" not in statements:
        folders = [folder for folder, _ in statements.values()]
        others = [str(run.relative_to(path)) for run in path.glob(f"{RUNS}/*") if run not in folders]
        by_name["The comparison's own files"] = [_unchecked(path, ("statement.json", RUNS), others)]
    good = all(all_hold(findings) for findings in by_name.values())
    if as_json:
        checks = {name: [asdict(finding) for finding in findings] for name, findings in by_name.items()}
        write_json({"holds": good, "path": str(path), "checks": checks.get("", checks)})
    else:
        from rich.markup import escape

        styles = {"ok": "green", "failed": "bold red", "remark": "yellow", "trusted": "dim"}
        for name, findings in by_name.items():
            if name:
                write_line(f"\n{visible(name)}")
            rows = [
                (escape(one.check), f"[{styles[one.status]}]{one.status}[/]", escape(visible(one.words)))
                for one in findings
            ]
            write_table(("check", "", "found"), rows, wraps=2)
        write_line(_verdict(by_name.values()))
    return 0 if good else 1


def _verdict(every: Collection[list[Finding]]) -> str:
    counts = Counter(finding.status for findings in every for finding in findings)
    hold, are = ("holds" if counts["ok"] == 1 else "hold"), ("is" if counts["trusted"] == 1 else "are")
    summary = f"{counted(counts['ok'], 'check')} {hold}, {counted(counts['trusted'], 'point')} {are} taken on trust"
    if counts["remark"]:
        summary += f", {counted(counts['remark'], 'remark')}"
    if counts["failed"]:
        return f"\nDOES NOT HOLD: {counts['failed']} of the checks failed. {summary}."
    events = [finding for findings in every for finding in findings if finding.check in ("event", "event planned")]
    if any(finding.status == "trusted" for finding in events):
        return f"\nNothing contradicts the statement, but its epsilon rests on an event taken on trust: {summary}."
    return f"\nThe statement follows from its settings: {summary}."


def ledger_findings(content: Mapping[str, Any], path: Path) -> list[Finding]:
    """Compare a statement's run, event, steps and total with the ledger's."""
    ledger = Ledger.open(path, read_only=True)
    try:
        return list(_compared(Statement.unchecked(content), ledger))
    except (DpcoreError, LookupError, TypeError, ValueError, AttributeError) as cause:
        return [Finding("ledger", FAILED, f"the statement cannot be compared with {path} ({type(cause).__name__})")]


def _compared(statement: Statement, ledger: Ledger) -> Iterator[Finding]:
    named, path = statement.ledger, ledger.path
    if named.get("ledger") != ledger.ledger_id:
        other = f"names the ledger {named['ledger']}" if named else "names no ledger"
        yield Finding("ledger", FAILED, f"the statement {other}, but {path} is {ledger.ledger_id}")
        return
    matching = [run for run in ledger.runs() if run.run_id == named.get("run")]
    if not matching:
        yield Finding("ledger", FAILED, f"{path} has no run {named.get('run')}: it is an older copy, or never paid")
        return
    yield Finding("ledger", OK, f"{path} paid for it, as its run {matching[0].run_id}")
    yield _steps(statement, matching[0])
    yield _planned(statement, matching[0])
    if "seal" not in named and "total" not in named:
        return
    seal = str(named.get("seal"))
    missing = [problem for problem in ledger.verify(seal=seal).problems if f"the seal {seal}" in problem]
    yield Finding("ledger: seal", FAILED if missing else OK, missing[0] if missing else f"{seal[:16]}... is an entry's")
    if "total" in named and not missing:
        yield from _total(statement, ledger.at(seal))


def _total(statement: Statement, ledger: Ledger) -> Iterator[Finding]:
    """Compare the stated total with that of the ledger as it was at the statement's seal."""
    name, stated = "ledger: total", statement.ledger["total"]
    before = next((run.releases for run in ledger.runs() if run.run_id == statement.ledger["run"]), 0)
    if before < _released(statement) and not statement.note.startswith(WRITTEN_BEFORE):
        words = f"the seal is of an entry before the last step of this run: it had {counted(before, 'step')} then"
        yield Finding(name, FAILED, words)
    total = ledger.total(float(stated["delta"]))
    for key, follows in (("epsilon", total.filter), ("epsilon_if_fixed_beforehand", total.fixed)):
        yield upper_bound(f"{name}, {key.replace('_', ' ')}", float(stated[key]), follows, statement)


def _released(statement: Statement) -> int:
    """Return how many rows the statement says that the run released."""
    if statement.event.get("event") == PrivateSelection.__name__:  # of all that its runs release, one thing leaves
        return 1
    return statement.steps_taken + statement.steps_abandoned


def _steps(statement: Statement, run: RunRecord) -> Finding:
    name, stated = "ledger: event", _released(statement)
    charged = counted(run.releases, "step")
    if stated == run.releases and statement.steps_counted > statement.steps_taken:
        return Finding(name, OK, f"is that of the whole plan, of which the ledger has {charged}")
    if stated == run.releases:
        return _event(name, statement.event, run.event.to_dict())
    if stated < run.releases:
        words = f"the ledger has {charged} of this run, the statement {stated:,}: it is older, or leaves steps out"
        return Finding(name, FAILED, words)
    if statement.note.startswith(WRITTEN_BEFORE):
        words = f"the statement counts {stated:,} steps before they were taken, and the ledger has {charged}"
        return Finding(name, REMARK, words)
    return Finding(name, FAILED, f"the statement counts {stated:,} steps, but the ledger paid for {charged}")


def _planned(statement: Statement, run: RunRecord) -> Finding:
    name, stated = "ledger: event planned", statement.event_planned
    if statement.steps_abandoned:  # which are additional to the plan
        if (problem := too_much(statement)) is not None:
            return Finding(name, FAILED, f"cannot be checked: {problem}")
        plan, _ = rebuilt(statement)
        if isinstance(plan, StatedEvents):  # its event is only stated, abandoned steps included: it costs no less
            said = min(statement.epsilon_planned.values())
            least = max(smallest_epsilon(event, statement.delta)[0] for event in (run.planned, run.event))
            enough = said >= least * (1 - ROUNDING)
            words = f"epsilon = {said:.4g} with abandoned steps is {'not ' if enough else ''}below the ledger's"
            return Finding(name, TRUSTED if enough else FAILED, words)
        stated = plan.event.to_dict()
    return _event(name, stated, run.planned.to_dict())


def _event(name: str, stated: Mapping[str, Any], charged: Mapping[str, Any]) -> Finding:
    problem = difference(stated, charged)
    if problem is None:
        return Finding(name, OK, "equals the ledger's")
    return Finding(name, FAILED, f"differs from the ledger's: {problem}")


_WIDTH, _INDENT = 80, "  "


def methods(as_json: Json = False) -> None:
    """List the methods, each with the paper that it comes from."""
    said = {name: (inspect.getdoc(make) or name).splitlines()[0].replace("`", "") for name, make in METHODS.items()}
    if as_json:
        papers = {name: [{**asdict(paper), "url": paper.url} for paper in PAPERS[name]] for name in METHODS}
        write_json({name: {"summary": said[name], "papers": papers[name]} for name in METHODS})
        return
    for name, sentence in said.items():
        write_line(name)
        for text in (sentence, *(paper.text() for paper in PAPERS[name])):
            for line in wrap(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False):
                write_line(line)


def statement(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A run folder, an export, or a statement.json.")],
    full: Annotated[bool, flag("--full", "All settings, events and assumptions, not a summary in ten lines.")] = False,
    as_json: Json = False,
) -> None:
    """Print a stored privacy statement in short. dpcore verify checks it."""
    statements = {name: as_statement(path, content) for name, (_, content) in stored(path).items()}
    if as_json:
        contents = {name: item.to_dict() for name, item in statements.items()}
        write_json(contents.get("", contents))
        return
    width = min(100, max(40, shutil.get_terminal_size().columns))
    for name, item in statements.items():
        if name:
            write_line(f"{visible(name)}\n")
        write_line(item.summary(width, full=full))
