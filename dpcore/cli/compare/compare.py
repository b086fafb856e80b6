"""``dpcore compare`` and ``dpcore demo``: methods on one data set and model, at one guarantee, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from dpcore import accounting
from dpcore.cli.compare import report, runs
from dpcore.cli.compare.runs import (
    COMPLETE,
    EPOCHS,
    GRADIENTS,
    ONE_EACH,
    SAME_FOR_ALL,
    Comparison,
    Contestant,
    Log,
    Plans,
    Record,
    check_plans,
    described,
    earlier,
    events_of,
    make_runs,
    preview,
)
from dpcore.cli.datasets import load
from dpcore.cli.interrupt import Stopped, deferred
from dpcore.cli.options import Json, count, flag, names, one_of, option, parsers, real, reals, takes
from dpcore.cli.output import remark, remarks, write_json, write_line, write_table
from dpcore.cli.plots import Curves, by_epsilon
from dpcore.cli.train import train
from dpcore.cli.train.run_folder import RUNS, locked
from dpcore.cli.train.settings import DATA, METHOD, PRIVACY, RUN, Settings
from dpcore.cli.train.train import BUDGET_STATUS, LedgerFile
from dpcore.errors import ArgumentError, BudgetError, MissingPackageError
from dpcore.ledger import Ledger
from dpcore.methods import METHODS
from dpcore.spec.validate import integer, nearest
from dpcore.statement.text import counted, format_number


def run_comparison(
    comparison: Comparison, out: Path, *, jobs: int, overwrite: bool, as_json: bool, ledger: Path | None = None
) -> int:
    """Make the missing runs of a comparison and finish its folder. Return the exit status."""
    integer(1, jobs=jobs)
    shared = comparison.shared
    dataset = load(*shared.source)
    earlier(out, comparison, ledger, overwrite=overwrite)
    check_plans(comparison, dataset, ledger)
    if jobs > 1 and ledger is not None and Ledger.open(ledger).budget is not None:
        raise ArgumentError(f"jobs={jobs}: must be 1 with a ledger that has a budget, which is checked before each run")
    console = remarks()
    remark(accounting.delta_remark(shared.delta, len(dataset)))
    console.print(f"planned: {counted(comparison.total, 'run')}")
    plans, built = preview(comparison, dataset, ledger)
    paying = None if ledger is None else runs.ledger_for(ledger, [plan.event for plan in plans.values()])
    log = Log.open(out, comparison, ledger, overwrite=overwrite)
    with locked(out), deferred() as interruption:
        if complete := len(log.complete()):
            console.print(f"{complete} of {counted(comparison.total, 'run')} were made before and are kept.")
        if part := sum(record.goes_on_after is not None for record in log.records):
            console.print(f"{counted(part, 'run')} will go on where a signal stopped {'it' if part == 1 else 'them'}.")
        ahead = events_of(plans, comparison.ahead(log.accuracies()))
        if not runs.pays_for(paying, ahead):
            remark(
                f"the ledger's budget may not pay for all of the {counted(len(ahead), 'run')} to come; the comparison "
                "stops before the first unpaid run, and keeps those before it"
            )
        try:
            with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
                task = bar.add_task("runs", total=comparison.total, completed=complete)

                def tell(record: Record) -> None:
                    made = len(log.complete())
                    bar.update(task, completed=made)
                    if record.status == COMPLETE:
                        console.print(
                            f"{made} of {counted(comparison.total, 'run')}: {described(record.run)}: held-out accuracy "
                            f"{100 * record.accuracy[-1]:.2f}%",
                            markup=False,
                        )

                def share(done: float) -> None:
                    bar.update(task, completed=len(log.complete()) + done)

                make_runs(log, dataset, jobs, interruption, plans, paying, tell, share, built)
        except Stopped as stop:
            raise Stopped(
                f"{stop}; each run spent at most what its folder in {out / RUNS} states", stop.status
            ) from stop
        except BudgetError as end:
            by, cause = "the ledger's budget", str(end)
            said = f"{report.stopped(log, by, continues=False)} {cause[:1].upper()}{cause[1:]}."
            _finish(log, plans, report.rows(log, plans), as_json, by, said)
            return BUDGET_STATUS
        except OSError:
            remark(report.kept(log))
            raise
        if log.due():
            _finish(log, plans, [], as_json, interruption.name, report.stopped(log, interruption.name))
            return interruption.status
        _finish(log, plans, report.rows(log, plans), as_json)
    return 0


def _finish(log: Log, plans: Plans, made: list[report.Row], as_json: bool, by: str = "", said: str = "") -> None:
    """Write and show the files of a comparison at its end. `by` names what ended it early, in the sentence `said`."""
    comparison, folder, tuned = log.comparison, log.folder.path, report.tuning(log, plans)
    verdict, lines, picture = said, list[str](), ""
    if not by:
        verdict, lines = report.verdict(made, comparison.baseline), report.footer(comparison, made, tuned)
    log.summary = report.to_dict(comparison, made, tuned, verdict, lines) if made else None
    log.write()
    head = "\n\n".join(["Privacy statement of a comparison\n" + "=" * 33, *([said] if by else []), tuned["words"]])
    named = {f"{row.contestant}, each run at epsilon = {format_number(row.target_epsilon)}": row for row in made}
    parts = [f"\n\n{name}\n\n{row.statement.text()}" for name, row in named.items()]
    log.folder.write("statement.txt", "".join([head, "\n", *parts]).encode())
    folders = {name: str(row.first.path.relative_to(folder)) for name, row in named.items()}
    log.folder.write_json("statement.json", {"tuning": tuned, "run_folders": folders})
    if not by:
        write_table(**report.table(comparison, made), file=(table := StringIO()))
        log.folder.write("table.txt", "\n".join([table.getvalue(), verdict, "", *lines, ""]).encode())
        try:
            picture = f"Picture: {_draw(log, made)}   "
        except MissingPackageError as missing:  # the runs are made, and their table does not need one
            remark(str(missing))
    if as_json:
        ended = {"status": f"stopped by {by}" if by else "complete", **({"words": said} if by else {})}
        write_json({**ended, "folder": str(folder), "settings": comparison.to_dict(), **(log.summary or {})})
        return
    if made:
        write_table(**report.table(comparison, made))
        write_line()
    for line in (verdict, *(["", *lines] if lines else [])):
        write_line(line)
    write_line(f"{picture}Statements: {folder / 'statement.txt'}")


def _draw(log: Log, made: list[report.Row]) -> Path:
    """Draw the curves of the runs, and return the picture's path."""
    shared, panels = log.comparison.shared, dict[str, dict[str, Curves]]()
    for row in made:
        panel = f"epsilon = {format_number(row.target_epsilon)}, delta = {format_number(shared.delta)}"
        panels.setdefault(panel, {})[row.contestant] = row.curves
    title = f"{shared.data}, {shared.model}, {counted(log.comparison.seeds, 'seed')}"
    picture = log.folder.path / "comparison.png"
    by_epsilon(picture, panels, title=title)
    return picture


# The same model, clip, batch size and epochs for all. The learning rates come from one search over one grid for all
# three, with other seeds, by the accuracy on the test images that also measure here. Nobody counts what it cost.
COMMON = {"data": "digits", "model": "mlp", "epochs": 10, "batch_size": 64, "clipping": "automatic"}
CONTESTANTS = (
    Contestant("DP-SGD", {"method": "dp_sgd"}, (0.35,)),
    Contestant("DOPPLER", {"method": "doppler"}, (0.7,)),
    Contestant("DiSK", {"method": "disk"}, (0.35,)),
)


@takes(Settings, without=("noise_multiplier", "allow_nonprivate"))
def compare(
    context: typer.Context,
    methods: Annotated[Any, option(names(METHODS), "M1,M2,...",
        "Methods, all with the options given here; --config gives each its own settings.", METHOD)] = None,
    epsilon: Annotated[Any, option(reals, "E1,E2,...", "Targets; each run is calibrated to one.", PRIVACY)] = None,
    ledger: LedgerFile = None,
    lr: Annotated[Any, option(reals, "R1,R2,...",
        "Learning rates; of several, each contestant uses its best by held-out accuracy.", METHOD)] = None,
    seeds: Annotated[int, option(count, "N", "Final runs of each contestant at each epsilon.", RUN)] = 3,
    search_seeds: Annotated[int, option(count, "N",
        "Search runs of each rate and setting; final runs have other seeds.", RUN)] = 1,
    equal: Annotated[str, option(one_of((EPOCHS, GRADIENTS)), "WHAT",
        "epochs, or gradients: then methods with several gradients per example have fewer epochs.", RUN)] = EPOCHS,
    baseline: Annotated[Any, option(str, "NAME",
        "Contestant to which differences are taken, paired by seed.", RUN)] = None,
    jobs: Annotated[int, option(count, "N", "Runs side by side, one thread each.", RUN)] = 1,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder; the same command continues where it stopped.",
        rich_help_panel=RUN)] = Path("comparison"),
    overwrite: Annotated[bool, flag("--overwrite", "Start again in that folder.", RUN)] = False,
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=train.use_config, metavar="FILE",
        help="Settings from a .toml file, one table \\[contestants.NAME] each; options win.",
        rich_help_panel=DATA)] = None,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Compare methods on one data set at the same epsilon and delta, over several seeds."""
    tables = context.meta.get(train.TABLES)
    if tables and methods:
        raise ArgumentError(f"methods={','.join(methods)}: must not be given with the contestants of {config}")
    comparison = Comparison(
        contestants=from_tables(tables, lr or ()) if tables else from_methods(methods or (), lr or ()),
        epsilon=tuple(epsilon or ()),
        common={name: value for name, value in given.items() if value is not None},
        seeds=seeds,
        search_seeds=search_seeds,
        equal=equal,
        baseline=baseline,
    )
    return run_comparison(comparison, out, jobs=jobs, overwrite=overwrite, as_json=as_json, ledger=ledger)


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER",
        help="Folder; the same command continues where it stopped.")] = Path("demo"),
    seeds: Annotated[int, option(count, "N", "Runs of each method.")] = 6,
    epsilon: Annotated[float, option(real, "EPSILON", "Epsilon of each run.")] = 1.0,
    delta: Annotated[float, option(real, "DELTA", "Delta, well below 1/1438.")] = 1e-5,
    overwrite: Annotated[bool, flag("--overwrite", "Start again in that folder.")] = False,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Compare DP-SGD, DOPPLER and DiSK on the built-in digits, at the same epsilon and delta."""
    comparison = Comparison(CONTESTANTS, (epsilon,), {**COMMON, "delta": delta}, seeds=seeds)
    status = run_comparison(comparison, out, jobs=1, overwrite=overwrite, as_json=as_json)
    remark("the learning rates are from a search that saw the same test images: accuracies are a little too high")
    return status


def from_methods(methods: Iterable[str], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return one contestant for each method, all with the same learning rates."""
    return tuple(Contestant(method, {"method": method}, lr) for method in methods)


def from_tables(tables: Mapping[str, Any], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return the contestants of a configuration file; `lr` is for those whose table has none."""
    contestants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ArgumentError(f"contestants: {name!r} must be a table, as in [contestants.{name}]")
        read = {key.replace("-", "_"): value for key, value in table.items()}
        if isinstance(read.get("lr"), (int, float)):
            read["lr"] = [read["lr"]]
        grids = {key: tuple(read.pop(key)) for key in list(read) if _is_grid(key, read[key])}
        for key, values in {**grids, **{key: (value,) for key, value in read.items()}}.items():
            try:
                parsed = tuple(map(_parser(name, key), values))
            except typer.BadParameter as error:
                raise ArgumentError(f"contestant {name!r}: {key}: {error.message}") from error
            if not parsed:
                raise ArgumentError(f"contestant {name!r}: {key}=[]: must have at least one value")
            if key in grids:
                grids[key] = parsed
            else:
                read[key] = parsed[0]
        for key in sorted(ONE_EACH & set(grids)):
            raise ArgumentError(f"contestant {name!r}: {key!r} must be one value; give each a table of its own")
        if "method" not in read:
            raise ArgumentError(f"contestant {name!r}: names no method, such as method = 'disk'")
        contestants.append(Contestant(name, read, read.pop("lr", lr), grids))
    return tuple(contestants)


# A list of these is one value; a list of lists is a grid.
LISTS = ("filter_b", "filter_a", "betas")


def _is_grid(key: str, value: Any) -> bool:
    """Whether a table's value has several values to try."""
    if key == "lr" or not isinstance(value, list):
        return False
    return key not in LISTS or any(isinstance(item, list) for item in value)


def _parser(contestant: str, key: str) -> Callable[[Any], Any]:
    own = {name: read for name, read in parsers(Settings).items() if name not in SAME_FOR_ALL}
    known: dict[str, Callable[[Any], Any]] = {**own, "lr": reals}
    if key in SAME_FOR_ALL:
        raise ArgumentError(f"contestant {contestant!r}: {key!r} is the same for all; set it outside of the table")
    if key not in known:
        near = nearest(key, known)
        hint = f"did you mean {near!r}?" if near else f"known keys are {', '.join(sorted(known))}"
        raise ArgumentError(f"contestant {contestant!r}: has the unknown key {key!r}; {hint}")
    return known[key]
