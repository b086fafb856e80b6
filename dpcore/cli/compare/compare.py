"""``dpcore compare``: several methods on one data set and model, at the same guarantees, over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dpcore import accounting
from dpcore.cli import options
from dpcore.cli.compare.comparison import Comparison
from dpcore.cli.compare.contestants import from_methods, from_tables
from dpcore.cli.output import remarks, write_json, write_line
from dpcore.cli.train import config_file
from dpcore.cli.train import training_options as shared
from dpcore.cli.train.interrupt import Stopped, deferred
from dpcore.cli.train.training_options import DATA, METHOD, PRIVACY, RUN
from dpcore.cli.values import count, names, reals
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.statement.text import format_epsilon, format_number

if TYPE_CHECKING:
    from dpcore.cli.compare.log import Log
    from dpcore.cli.compare.report import Row
    from dpcore.cli.compare.runs import Plans

_TABLES = "contestants"
_WIDTH_OF_FILES = 120


def _use_file(context: typer.Context, path: Path | None) -> Path | None:
    return config_file.use_with_tables(context, path, (_TABLES,))


def compare(
    context: typer.Context,
    methods: Annotated[
        Any,
        typer.Option(
            parser=names(shared.methods),
            metavar="M1,M2,...",
            help="Methods, all with the options given here; for settings of their own see --config.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    data: shared.Data = "digits",
    data_dir: shared.DataDir = None,
    model: shared.Model = "logistic",
    epsilon: Annotated[
        Any,
        typer.Option(
            parser=reals, metavar="E1,E2,...", help="Targets; each run is calibrated to one.", rich_help_panel=PRIVACY
        ),
    ] = None,
    delta: shared.Delta = 1e-5,
    account_for_tuning: Annotated[
        bool,
        typer.Option(
            "--account-for-tuning",
            metavar=" ",
            help="Also state epsilon of all runs together, search included.",
            rich_help_panel=PRIVACY,
        ),
    ] = False,
    max_grad_norm: shared.MaxGradNorm = 1.0,
    clipping: shared.Clipping = None,
    clipping_groups: shared.ClippingGroups = "flat",
    sampling: shared.Sampling = None,
    max_batch_size: shared.MaxBatchSize = None,
    groups: shared.Groups = None,
    ledger: shared.Ledger = None,
    epochs: shared.Epochs = 10,
    batch_size: shared.BatchSize = None,
    lr: Annotated[
        Any,
        typer.Option(
            parser=reals,
            metavar="R1,R2,...",
            help="Learning rates; of several each contestant takes its best by held-out accuracy.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            parser=count, metavar="N", help="Final runs of each contestant at each epsilon.", rich_help_panel=RUN
        ),
    ] = 3,
    search_seeds: Annotated[
        int,
        typer.Option(parser=count, metavar="N", help="Runs of each learning rate, other seeds.", rich_help_panel=RUN),
    ] = 1,
    search_epochs: Annotated[
        int | None,
        typer.Option(
            parser=count, metavar="N", help="Epochs of a search run; --epochs if not given.", rich_help_panel=RUN
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(parser=count, metavar="N", help="Runs side by side, one thread each.", rich_help_panel=RUN),
    ] = 1,
    backend: shared.Backend = None,
    out: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder; the same command goes on where it stopped.", rich_help_panel=RUN),
    ] = Path("comparison"),
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", metavar=" ", help="Begin anew in that folder.", rich_help_panel=RUN),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=_use_file,
            metavar="FILE",
            help="Settings from a .toml file, one table \\[contestants.NAME] each; options win.",
            rich_help_panel=DATA,
        ),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,  # noqa: ARG001 (read by dpcore.cli.app)
) -> None:
    """Compare methods on one data set at the same epsilon and delta, over several seeds."""
    from dpcore.spec.backends import get_backend

    tables = context.meta.get(_TABLES)
    if jobs < 1:
        raise ArgumentError(f"jobs={jobs}: must be at least 1")
    if tables and methods:
        raise ArgumentError(f"methods={','.join(methods)}: must not be given beside the contestants of {config}")
    common = {
        "max_grad_norm": max_grad_norm,
        "clipping": clipping,
        "clipping_groups": clipping_groups,
        "sampling": sampling,
        "max_batch_size": max_batch_size,
        "groups": groups,
        "epochs": epochs,
        "batch_size": batch_size,
    }
    contestants = from_tables(tables, common, lr or ()) if tables else from_methods(methods or (), common, lr or ())
    comparison = Comparison(
        contestants=contestants,
        epsilon=tuple(epsilon or ()),
        data=data,
        data_dir=None if data_dir is None else str(data_dir),
        model=model,
        delta=delta,
        backend=backend or get_backend(),
        seeds=seeds,
        search_seeds=search_seeds,
        search_epochs=search_epochs,
        account_for_tuning=account_for_tuning,
    )
    status = _run(comparison, out, jobs, overwrite, as_json, ledger)
    if status:
        raise typer.Exit(status)


def _run(comparison: Comparison, out: Path, jobs: int, overwrite: bool, as_json: bool, ledger: Path | None) -> int:
    from dpcore.cli.datasets import load

    dataset = load(comparison.data, comparison.data_dir)
    # After the quick checks: torch takes a second to import.
    from dpcore.cli.compare import budget, report
    from dpcore.cli.compare.log import Log
    from dpcore.cli.compare.runs import Display, accuracies, make_runs, preview
    from dpcore.cli.train.run_folder import locked
    from dpcore.statement.build import versions

    console = remarks()
    warning = accounting.delta_remark(comparison.delta, len(dataset))
    if warning:
        console.print(f"[yellow]remark:[/] {warning}")
    plans = preview(comparison, dataset)
    paying = None if ledger is None else budget.ledger_for(ledger, [plan.event for plan in plans.values()])
    _announce(comparison, plans, console)
    log = Log.open(out, comparison, versions(), overwrite=overwrite)
    with locked(out), deferred() as interruption:
        complete = len(log.complete())
        if complete:
            console.print(f"{complete} of {comparison.total} runs were made before and are kept.")
        if paying is not None:
            due = [plans[run.contestant, run.epsilon, run.role].event for run in comparison.ahead(accuracies(log))]
            remark = budget.remark(paying, due)
            if remark:
                console.print(f"[yellow]remark:[/] {remark}")
        try:
            with Display(console, complete, comparison.total) as display:
                make_runs(comparison, log, dataset, plans, jobs, display, interruption, ledger)
        except Stopped as stop:
            raise Stopped(
                f"{stop}; what was spent is at most what {out / 'results.json'} states", stop.status
            ) from stop
        except BudgetError as end:
            words = report.stopped_words(log, comparison, "the ledger's budget", goes_on=False)
            _write_statements(log, [words], comparison, [])
            raise BudgetError(f"{end}; {out / 'statement.txt'} states what was spent") from end
        if comparison.due(accuracies(log)):
            words = report.stopped_words(log, comparison, interruption.name)
            _write_statements(log, [words], comparison, [])
            if as_json:
                write_json({"status": f"stopped by {interruption.name}", "words": words, "folder": str(out)})
            else:
                write_line(words)
            return interruption.status
        made = report.rows(comparison, log, plans)
        _finish(log, comparison, made)
    _tell(log, comparison, made, as_json)
    return 0


def _announce(comparison: Comparison, plans: Plans, console: Console) -> None:
    """Say how many runs there will be and, where asked, what they cost together; refuse where nobody can say."""
    from dpcore.cli.compare.report import together

    console.print(f"{comparison.total} runs are planned.")
    if not comparison.account_for_tuning:
        return
    events = []
    for epsilon in comparison.epsilon:
        for contestant in comparison.contestants:
            name = contestant.name
            runs = [*comparison.search(name, epsilon), *comparison.final(name, epsilon, comparison.grid(name)[0])]
            events += [plans[name, epsilon, run.role].event for run in runs]
    whole = together(events, comparison.delta)
    if not whole:
        raise PrivacyError(
            "account_for_tuning=True: no accountant covers all runs together (they have different neighbors, or plans "
            "of different kinds); leave the option away, or compare methods with the same sampling"
        )
    stated = f"epsilon = {format_epsilon(min(whole.values()))} at delta = {format_number(comparison.delta)}"
    console.print(f"All of them together will spend {stated}.")


def _finish(log: Log, comparison: Comparison, made: list[Row]) -> None:
    from dpcore.cli.compare import report
    from dpcore.cli.plots.comparison_plots import Curves, by_epsilon

    tuned = report.tuning(comparison, log)
    lines = report.footer(comparison, made, tuned)
    log.summary = report.to_dict(made, tuned, lines)
    log.write()
    log.folder.write("table.txt", _text(comparison, made, lines).encode())
    _write_statements(log, lines[-1:], comparison, made)
    panels: dict[str, dict[str, Curves]] = {}
    for row in made:
        words = f"epsilon = {format_number(row.target_epsilon)}, delta = {format_number(comparison.delta)}"
        panels.setdefault(words, {})[row.contestant] = Curves(row.epochs, row.curves)
    title = f"{comparison.data}, {comparison.model}, {comparison.seeds} seed{'s' if comparison.seeds > 1 else ''}"
    by_epsilon(log.folder.path / "comparison.png", panels, title=title)


def _write_statements(log: Log, words: list[str], comparison: Comparison, made: list[Row]) -> None:
    from dpcore.cli.compare import report

    tuned = report.tuning(comparison, log)
    said = dict.fromkeys([*words, tuned.words])
    head = "Privacy statement of a comparison\n" + "=" * 33 + "\n\n" + "\n\n".join(said) + "\n"
    parts = [f"\n\n{_heading(row)}\n\n{row.statement.text()}" for row in made]
    log.folder.write("statement.txt", (head + "".join(parts)).encode())
    statements = {_heading(row): row.statement.to_dict() for row in made}
    log.folder.write_json("statement.json", {"tuning": tuned.to_dict(), "each_run": statements})


def _heading(row: Row) -> str:
    return f"{row.contestant}, each run at epsilon = {format_number(row.target_epsilon)}"


def _text(comparison: Comparison, made: list[Row], lines: list[str]) -> str:
    from io import StringIO

    from dpcore.cli.compare import report

    file = StringIO()
    Console(file=file, width=_WIDTH_OF_FILES, highlight=False).print(report.table(comparison, made, seconds=False))
    return "\n".join([file.getvalue().rstrip(), "", report.verdict(made), "", *lines]) + "\n"


def _tell(log: Log, comparison: Comparison, made: list[Row], as_json: bool) -> None:
    from dpcore.cli.compare import report

    folder, summary = log.folder.path, log.summary
    assert summary is not None
    if as_json:
        content = {"status": "complete", "folder": str(folder), "settings": comparison.to_dict(), **summary}
        write_json({**content, "seconds_per_run": [round(row.seconds, 3) for row in made]})
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_OF_FILES)
    console.print(report.table(comparison, made, seconds=True))
    for line in (summary["verdict"], "", *summary["remarks"]):
        write_line(line)
    write_line(f"Picture: {folder / 'comparison.png'}   Statements: {folder / 'statement.txt'}")
