"""``dpcore compare`` and ``dpcore demo``: methods on one data set and model, at one guarantee, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dpcore import accounting
from dpcore.cli.compare import report, runs
from dpcore.cli.compare.comparison import SAME_FOR_ALL, Comparison, Contestant
from dpcore.cli.compare.runs import Display, Log, Plans, check_plans, earlier, events_of, make_runs, preview
from dpcore.cli.datasets import load
from dpcore.cli.interrupt import Stopped, deferred
from dpcore.cli.options import Json, count, flag, names, option, parsers, real, reals, takes
from dpcore.cli.output import remark, remarks, results, write_json, write_line
from dpcore.cli.plots import Curves, by_epsilon
from dpcore.cli.train import train
from dpcore.cli.train.run_folder import RUNS, locked
from dpcore.cli.train.settings import DATA, METHOD, PRIVACY, RUN, Settings
from dpcore.cli.train.train import BUDGET_STATUS, LedgerFile
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.methods import METHODS
from dpcore.spec.validate import nearest
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
    paying = None if ledger is None else runs.ledger_for(ledger, [plan.event for plan in plans.values()])
    payer = None if paying is None else runs.Payer(paying)
    _announce(comparison, plans, console)
    log = Log.open(out, comparison, ledger, overwrite=overwrite)
    with locked(out), deferred() as interruption:
        complete = len(log.complete())
        if complete:
            were = "was made before and is" if complete == 1 else "were made before and are"
            console.print(f"{complete} of {counted(comparison.total, 'run')} {were} kept.")
        if paying is not None:
            remark(runs.shortage(paying, events_of(plans, comparison.ahead(log.accuracies()))))
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


# The same model, clip, batch size and epochs for all; learning rates from a search over one grid for all three, with
# other seeds than those shown (docs/command-line.md has its table). That search is not part of the guarantee.
COMMON = {"data": "digits", "model": "mlp", "epochs": 10, "batch_size": 64, "clipping": "automatic"}
CONTESTANTS = (
    Contestant("DP-SGD", {"method": "dp_sgd"}, (0.35,)),
    Contestant("DOPPLER", {"method": "doppler"}, (0.7,)),
    Contestant("DiSK", {"method": "disk"}, (0.35,)),
)


@takes(Settings, without=("noise_multiplier",))
def compare(
    context: typer.Context,
    methods: Annotated[Any, option(names(METHODS), "M1,M2,...",
        "Methods, all with the options given here; for settings of their own see --config.", METHOD)] = None,
    epsilon: Annotated[Any, option(reals, "E1,E2,...", "Targets; each run is calibrated to one.", PRIVACY)] = None,
    account_for_tuning: Annotated[bool, flag("--account-for-tuning",
        "Also state epsilon of all runs together, search included.", PRIVACY)] = False,
    ledger: LedgerFile = None,
    lr: Annotated[Any, option(reals, "R1,R2,...",
        "Learning rates; of several each contestant takes its best by held-out accuracy.", METHOD)] = None,
    seeds: Annotated[int, option(count, "N", "Final runs of each contestant at each epsilon.", RUN)] = 3,
    search_seeds: Annotated[int, option(count, "N", "Runs of each learning rate, other seeds.", RUN)] = 1,
    search_epochs: Annotated[int | None, option(count, "N", "Epochs of a search run; --epochs if not given.",
        RUN)] = None,
    jobs: Annotated[int, option(count, "N", "Runs side by side, one thread each.", RUN)] = 1,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder; the same command goes on where it stopped.",
        rich_help_panel=RUN)] = Path("comparison"),
    overwrite: Annotated[bool, flag("--overwrite", "Begin anew in that folder.", RUN)] = False,
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=train.use_config, metavar="FILE",
        help="Settings from a .toml file, one table \\[contestants.NAME] each; options win.",
        rich_help_panel=DATA)] = None,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Compare methods on one data set at the same epsilon and delta, over several seeds."""
    tables = context.meta.get(train.TABLES)
    if tables and methods:
        raise ArgumentError(f"methods={','.join(methods)}: must not be given beside the contestants of {config}")
    comparison = Comparison(
        contestants=from_tables(tables, lr or ()) if tables else from_methods(methods or (), lr or ()),
        epsilon=tuple(epsilon or ()),
        common={name: value for name, value in given.items() if value is not None},
        seeds=seeds,
        search_seeds=search_seeds,
        search_epochs=search_epochs,
        account_for_tuning=account_for_tuning,
    )
    # After the quick checks: torch takes a second to import.

    return run_comparison(comparison, out, jobs=jobs, overwrite=overwrite, as_json=as_json, ledger=ledger)


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER",
        help="Folder; the same command goes on where it stopped.")] = Path("demo"),
    seeds: Annotated[int, option(count, "N", "Runs of each method.")] = 6,
    epsilon: Annotated[float, option(real, "EPSILON", "The guarantee of each run.")] = 1.0,
    delta: Annotated[float, option(real, "DELTA", "Well below 1/1438.")] = 1e-5,
    overwrite: Annotated[bool, flag("--overwrite", "Begin anew in that folder.")] = False,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Compare DP-SGD, DOPPLER and DiSK on the built-in digits, at the same epsilon and delta."""
    comparison = Comparison(CONTESTANTS, (epsilon,), {**COMMON, "delta": delta}, seeds=seeds)

    return run_comparison(comparison, out, jobs=1, overwrite=overwrite, as_json=as_json)


def from_methods(methods: Iterable[str], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return one contestant for each method, all with the same learning rates."""
    return tuple(Contestant(method, {"method": method}, lr) for method in methods)


def from_tables(tables: Mapping[str, Any], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return the contestants of a configuration file; `lr` is for those whose table has none."""
    contestants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ArgumentError(f"contestants: {name!r} must be a table, as in [contestants.{name}]")
        own = {key.replace("-", "_"): value for key, value in table.items()}
        grid = tuple(_parse(name, "lr", own.pop("lr"), _rates)) if own.get("lr") is not None else lr
        read = {key: _parse(name, key, value, _parser(name, key)) for key, value in own.items()}
        if "method" not in read:
            raise ArgumentError(f"contestant {name!r}: names no method, such as method = 'disk'")
        contestants.append(Contestant(name, read, grid))
    return tuple(contestants)


def _rates(value: Any) -> tuple[float, ...]:
    return reals([value] if isinstance(value, (int, float)) else value)


def _parser(contestant: str, key: str) -> Callable[[Any], Any]:
    known = parsers(Settings)
    if key in SAME_FOR_ALL:
        raise ArgumentError(f"contestant {contestant!r}: {key!r} is the same for all; set it outside of the table")
    if key in known:
        return known[key]
    own = sorted(set(known).difference(SAME_FOR_ALL) | {"lr"})
    near = nearest(key, own)
    hint = f"did you mean {near!r}?" if near else f"known keys are {', '.join(own)}"
    raise ArgumentError(f"contestant {contestant!r}: has the unknown key {key!r}; {hint}")


def _parse(contestant: str, key: str, value: Any, parser: Callable[[Any], Any]) -> Any:
    try:
        return parser(value)
    except typer.BadParameter as error:
        raise ArgumentError(f"contestant {contestant!r}: {key}: {error.message}") from error
