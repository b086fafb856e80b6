"""Runs a comparison to its finished folder, for ``dpcore compare`` and ``dpcore demo``."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

from rich.console import Console

from dpcore import accounting
from dpcore.cli.compare import budget, report
from dpcore.cli.compare.comparison import Comparison
from dpcore.cli.compare.log import Log, earlier
from dpcore.cli.compare.runs import Display, Plans, check_plans, events_of, make_runs, preview
from dpcore.cli.datasets import load
from dpcore.cli.interrupt import Stopped, deferred
from dpcore.cli.output import remark, remarks, results, write_json, write_line
from dpcore.cli.plots.plots import Curves, by_epsilon
from dpcore.cli.train.run import BUDGET_STATUS
from dpcore.cli.train.run_folder import RUNS, locked
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.statement.text import counted, format_epsilon, format_number

_WIDTH_OF_FILES = 120


def run_comparison(
    comparison: Comparison, out: Path, *, jobs: int, overwrite: bool, as_json: bool, ledger: Path | None = None
) -> int:
    """Make the runs of a comparison that are not made yet, and finish its folder; return the exit status."""
    if jobs < 1:
        raise ArgumentError(f"jobs={jobs}: must be at least 1")
    shared = comparison.shared
    dataset = load(shared.data, shared.data_dir)
    earlier(out, comparison, ledger, overwrite=overwrite)
    check_plans(comparison, dataset, ledger)
    console = remarks()
    remark(accounting.delta_remark(shared.delta, len(dataset)))
    console.print(f"{counted(comparison.total, 'run')} {'is' if comparison.total == 1 else 'are'} planned.")
    plans = preview(comparison, dataset, ledger)
    paying = None if ledger is None else budget.ledger_for(ledger, [plan.event for plan in plans.values()])
    payer = None if paying is None else budget.Payer(paying)
    _announce(comparison, plans, console)
    log = Log.open(out, comparison, ledger, overwrite=overwrite)
    with locked(out), deferred() as interruption:
        complete = len(log.complete())
        if complete:
            were = "was made before and is" if complete == 1 else "were made before and are"
            console.print(f"{complete} of {counted(comparison.total, 'run')} {were} kept.")
        if paying is not None:
            remark(budget.shortage(paying, events_of(plans, comparison.ahead(log.accuracies()))))
        try:
            with Display(console, complete, comparison.total) as display:
                make_runs(log, dataset, jobs, display, interruption, plans, payer)
        except Stopped as stop:
            raise Stopped(
                f"{stop}; each run spent at most what its folder in {out / RUNS} states", stop.status
            ) from stop
        except BudgetError as end:
            stopped = report.stopped(log, "the ledger's budget", goes_on=False)
            said = f"{stopped} {str(end)[:1].upper()}{str(end)[1:]}."
            _end(log, report.rows(log, plans), "the ledger's budget", said, as_json)
            return BUDGET_STATUS
        except OSError:
            remark(report.kept(log))
            raise
        if log.due():
            said = report.stopped(log, interruption.name)
            _end(log, [], interruption.name, said, as_json)
            return interruption.status
        _finish(log, report.rows(log, plans), as_json)
    return 0


def _end(log: Log, made: list[report.Row], by: str, said: str, as_json: bool) -> None:
    """Keep a comparison that ended early, and show the rows that are made."""
    comparison, folder, tuned = log.comparison, log.folder.path, report.tuning(log)
    log.summary = report.to_dict(made, tuned, said, []) if made else None
    log.write()
    _write_statements(log, [said], made)
    if as_json:
        ended = {"status": f"stopped by {by}", "words": said, "folder": str(folder)}
        write_json({**ended, "settings": comparison.to_dict(), **(log.summary or {})})
        return
    if made:
        results(_WIDTH_OF_FILES).print(report.table(comparison, made, seconds=True))
    write_line(said)
    write_line(f"Statements: {folder / 'statement.txt'}")


def _announce(comparison: Comparison, plans: Plans, console: Console) -> None:
    """Say, where asked, what all runs cost together; refuse where nobody can say."""
    if not comparison.account_for_tuning:
        return
    whole = report.together(events_of(plans, comparison.ahead({})), comparison.shared.delta)
    if not whole:
        raise PrivacyError(
            "account_for_tuning=True: no accountant covers all runs together (they have different neighbors, or plans "
            "of different kinds); leave the option away, or compare methods with the same sampling"
        )
    stated = f"epsilon = {format_epsilon(min(whole.values()))} at delta = {format_number(comparison.shared.delta)}"
    console.print(f"All of them together will spend {stated}.")


def _finish(log: Log, made: list[report.Row], as_json: bool) -> None:
    comparison, folder = log.comparison, log.folder.path
    tuned, verdict = report.tuning(log), report.verdict(made)
    lines = report.footer(comparison, made, tuned)
    log.summary = report.to_dict(made, tuned, verdict, lines)
    log.write()
    file = StringIO()
    Console(file=file, width=_WIDTH_OF_FILES, highlight=False).print(report.table(comparison, made, seconds=False))
    log.folder.write("table.txt", "\n".join([file.getvalue().rstrip(), "", verdict, "", *lines, ""]).encode())
    _write_statements(log, lines[-1:], made)
    panels: dict[str, dict[str, Curves]] = {}
    shared, seeds = comparison.shared, f"{comparison.seeds} seed{'s' if comparison.seeds > 1 else ''}"
    for row in made:
        panel = f"epsilon = {format_number(row.target_epsilon)}, delta = {format_number(shared.delta)}"
        panels.setdefault(panel, {})[row.contestant] = row.curves
    by_epsilon(folder / "comparison.png", panels, title=f"{shared.data}, {shared.model}, {seeds}")
    if as_json:
        content = {"status": "complete", "folder": str(folder), "settings": comparison.to_dict(), **log.summary}
        write_json({**content, "seconds_per_run": [round(row.seconds, 3) for row in made]})
        return
    results(_WIDTH_OF_FILES).print(report.table(comparison, made, seconds=True))
    for line in (verdict, "", *lines):
        write_line(line)
    write_line(f"Picture: {folder / 'comparison.png'}   Statements: {folder / 'statement.txt'}")


def _write_statements(log: Log, said: list[str], made: list[report.Row]) -> None:
    tuned = report.tuning(log)
    once = dict.fromkeys([*said, tuned.words])
    head = "Privacy statement of a comparison\n" + "=" * 33 + "\n\n" + "\n\n".join(once) + "\n"
    parts = [f"\n\n{_heading(row)}\n\n{row.statement.text()}" for row in made]
    log.folder.write("statement.txt", (head + "".join(parts)).encode())
    folders = {_heading(row): str(row.first.path.relative_to(log.folder.path)) for row in made}
    log.folder.write_json("statement.json", {"tuning": tuned.to_dict(), "run_folders": folders})


def _heading(row: report.Row) -> str:
    return f"{row.contestant}, each run at epsilon = {format_number(row.target_epsilon)}"
