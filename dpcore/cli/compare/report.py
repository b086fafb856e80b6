"""The report of a comparison: rows, a table and the lines beneath it, what a paragraph claims, and the accounting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rich.table import Table

from dpcore import accounting
from dpcore.cli.compare.comparison import FINAL, Comparison
from dpcore.cli.compare.runs import COMPLETE, Log, Plans, Record
from dpcore.cli.intervals import Estimate, difference_interval, mean_interval
from dpcore.cli.plots import Curves
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, counted, format_epsilon, format_number

_SAME_SET = (
    "The learning rates were chosen on the held-out set that also measures the accuracy, which flatters every "
    "contestant a little, and longer grids more."
)


@dataclass(frozen=True)
class Row:
    """One contestant at one epsilon, and the records of its final runs, one a seed."""

    contestant: str
    method: str
    settings: str
    target_epsilon: float
    lr: float
    grid: tuple[float, ...]
    gradients: float
    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The run whose statement stands for all: they have the same plan."""
        return self.records[0]

    @property
    def statement(self) -> Statement:
        """The statement of the first run."""
        assert self.first.statement is not None
        return self.first.statement

    @property
    def accuracy(self) -> tuple[float, ...]:
        """Held-out accuracy at the end of each run, in [0, 1]."""
        return tuple(record.accuracy[-1] for record in self.records)

    @property
    def curves(self) -> Curves:
        """The same on the way, with the epsilon spent."""
        epochs, spent = ([float(item[key]) for item in self.first.evaluations] for key in ("epoch", "epsilon"))
        return Curves(tuple(epochs), [record.accuracy for record in self.records], tuple(spent))

    @property
    def seconds(self) -> float:
        """How long a run took, on average; NaN where that is not known."""
        known = [record.seconds for record in self.records if record.seconds is not None]
        return sum(known) / len(known) if known else math.nan

    @property
    def interval(self) -> Estimate:
        """Mean accuracy with its 95 % interval over the seeds."""
        return mean_interval(self.accuracy)

    @property
    def at_edge(self) -> bool:
        """Whether the chosen learning rate is the smallest or largest of several: a better one may lie outside."""
        return len(self.grid) > 1 and self.lr in (self.grid[0], self.grid[-1])


@dataclass(frozen=True)
class Tuning:
    """How the search for learning rates is accounted for.

    `runs` are all that released something, also those that were stopped or killed; `searched` of them looked for a
    learning rate. `epsilon` is that of all together, by accountant, or None where it is not stated, and `adjacency`
    that of their composition. `charged` says whether a ledger paid for every run.
    """

    runs: int
    searched: int
    epsilon: dict[str, float] | None
    delta: float
    adjacency: str = ""
    charged: bool = False

    @property
    def words(self) -> str:
        """The same for a person."""
        if self.epsilon is not None:
            best = format_epsilon(min(self.epsilon.values()))
            begun = f"{self.runs}, of them {self.searched} in search of learning rates; also what was stopped or killed"
            return (
                f"Tuning is accounted for: all runs that were begun since this folder was last begun anew ({begun}) "
                f"are together ({best}, {format_number(self.delta)})-differentially private under {self.adjacency} "
                "adjacency, by composition of their events."
            )
        if self.charged:
            return (
                f"Tuning is accounted for by the ledger, not here: it paid for every run ({self.runs}, of them "
                f"{self.searched} in search of learning rates), and its total counts them all, also as chosen by "
                "looking at earlier ones (dpcore ledger show). The guarantee of each run is its own."
            )
        what = (
            f"the {counted(self.searched, 'run')} in search of learning rates and the choice among them"
            if self.searched
            else "how the learning rates were found"
        )
        spend = f"{what} spends more" if self.runs == 1 else f"{what}, and the {self.runs} runs together, spend more"
        return (
            f"Tuning is NOT accounted for: each run has its guarantee on its own; {spend}. On private data that would "
            "have to be counted (--account-for-tuning, or --ledger)."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        stated = None if self.epsilon is None else {"epsilon": self.epsilon, "delta": self.delta}
        return {"accounted_for": self.epsilon is not None or self.charged, "by_ledger": self.charged,
            "runs": self.runs, "search_runs": self.searched, "together": stated and {**stated,
            "adjacency": self.adjacency}, "words": self.words}  # fmt: skip


def together(events: Sequence[accounting.Event], delta: float) -> dict[str, float]:
    """Return epsilon of all events together by accountant."""
    whole = accounting.Composed(tuple(events))
    return accounting.epsilons(whole, delta)


def tuning(log: Log) -> Tuning:
    """Return what is said about all runs so far."""
    stated = [record.statement for record in log.records if record.statement is not None]
    searched = sum(record.run.role != FINAL for record in log.records)
    events, delta = log.events(), log.comparison.shared.delta
    charged = bool(stated) and all(statement.ledger for statement in stated)
    if not log.comparison.account_for_tuning:
        return Tuning(len(events), searched, None, delta, charged=charged)
    adjacency = str(accounting.Composed(tuple(events)).adjacency)
    return Tuning(len(events), searched, together(events, delta), delta, adjacency, charged)


def rows(log: Log, plans: Plans) -> list[Row]:
    """Return the rows of the table, by epsilon, then in the order of the contestants.

    Of a comparison that was ended early: those with a run that is complete, and its complete runs.
    """
    comparison, accuracy, complete = log.comparison, log.accuracies(), log.complete()
    made = []
    for epsilon in comparison.epsilon:
        for name in (contestant.name for contestant in comparison.contestants):
            lr = comparison.chosen(name, epsilon, accuracy)
            final = [] if lr is None else comparison.final(name, epsilon, lr)
            records = tuple(complete[run] for run in final if run in complete)
            if lr is None or not records:
                continue
            plan = plans[name, epsilon, FINAL]
            gradients = sum(len(plan.method.query.points(step)) for step in range(plan.steps)) / plan.steps
            about = (name, comparison.method(name), comparison.words(name), epsilon)
            made.append(Row(*about, lr, comparison.grid(name), gradients, records))
    return made


def to_dict(made: Sequence[Row], tuned: Tuning, verdict: str, lines: Sequence[str]) -> dict[str, Any]:
    """Return the summary as plain values, without durations."""
    return {"rows": [_row(row) for row in made], "verdict": verdict, "remarks": list(lines), "tuning": tuned.to_dict()}


def _row(row: Row) -> dict[str, Any]:
    half = row.interval.half_width
    return {
        "contestant": row.contestant,
        "method": row.method,
        "settings": row.settings,
        "target_epsilon": row.target_epsilon,
        "lr": row.lr,
        "grid": list(row.grid),
        "lr_at_edge_of_grid": row.at_edge,
        "test_accuracy": list(row.accuracy),
        "mean": row.interval.center,
        "half_width_95": None if math.isnan(half) else half,
        "epsilon": row.statement.best_epsilon,
        "delta": row.statement.delta,
        "adjacency": row.statement.adjacency,
        "noise_multiplier": row.statement.noise["noise_multiplier"],
        "gradients_per_example_and_step": row.gradients,
    }


def table(comparison: Comparison, made: Sequence[Row], *, seconds: bool) -> Table:
    """Return the table; `seconds` adds a column that is not covered by the guarantee."""
    seeds = counted(comparison.seeds, "seed")
    result = Table(
        title=f"Held-out accuracy, {comparison.shared.data}, {comparison.shared.model}, {seeds}", title_justify="left"
    )
    named = any(row.contestant != row.method for row in made)
    left: dict[str, Callable[[Row], str]] = {"contestant": lambda row: row.contestant} if named else {}
    left["method"] = lambda row: row.method
    if any(row.settings for row in made):
        left["settings"] = lambda row: row.settings
    right: dict[str, Callable[[Row], str]] = {"lr": lambda row: format_number(row.lr) + ("*" if row.at_edge else "")}
    if any(len(row.accuracy) < comparison.seeds for row in made):
        right["runs"] = lambda row: f"{len(row.accuracy)} of {comparison.seeds}"
    right["accuracy"] = _mean
    right["epsilon"] = lambda row: format_epsilon(row.statement.best_epsilon)
    right["gradients"] = lambda row: f"{row.gradients:.3g}"
    if seconds:
        right["seconds"] = lambda row: f"{row.seconds:.1f}"
    for name in left:
        result.add_column(name)
    for name in right:
        result.add_column(name, justify="right")
    for index, row in enumerate(made):
        last = index + 1 == len(made) or made[index + 1].target_epsilon != row.target_epsilon
        result.add_row(*(cell(row) for cell in (*left.values(), *right.values())), end_section=last)
    return result


def _mean(row: Row) -> str:
    half = row.interval.half_width
    return f"{100 * row.interval.center:.2f}{'' if math.isnan(half) else f' ± {100 * half:.2f}'} %"


def footer(comparison: Comparison, made: Sequence[Row], tuned: Tuning) -> list[str]:
    """Return the sentences beneath the table."""
    lines = ["± is the half width of the 95 % interval over seeds (Student's t)."] if comparison.seeds > 1 else []
    lines[-1:] = [" ".join([*lines, "gradients: per example and step."])]
    sizes = sorted({row.statement.sampler["expected_batch_size"] for row in made})
    expected = ", ".join(format_number(size) for size in sizes)
    lines.append(f"The same for all: {comparison.words()}. Expected batch size: {expected}.")
    grids = {row.grid for row in made}
    for grid in sorted(grids):
        names = sorted({row.contestant for row in made if row.grid == grid}, key=[r.contestant for r in made].index)
        whose = "" if len(grids) == 1 else f" of {'; '.join(names)}"
        if len(grid) == 1:
            lines.append(f"Learning rate{whose}: {format_number(grid[0])}, given, not searched.")
            continue
        values = ", ".join(format_number(lr) for lr in grid)
        length = "" if comparison.search_epochs is None else f", {counted(comparison.search_epochs, 'epoch')} each"
        seeds = f"{counted(comparison.search_seeds, 'other seed')}{length}"
        lines.append(f"Learning rate{whose}: best of {values} by mean held-out accuracy over {seeds}.")
    if any(row.at_edge for row in made):
        lines.append("* at the edge of its grid: a better one may lie outside.")
    rules = _differing(made, lambda row: row.statement.clip["rule"])
    if rules:
        lines.append(f"Clip rules differ, by the methods' defaults or as given ({rules}).")
    kinds = _differing(made, lambda row: row.statement.adjacency)
    if kinds:
        lines.append(f"Neighbors differ ({kinds}): the same epsilon does not mean the same protection across them.")
    if tuned.searched:
        lines.append(_SAME_SET)
    return [*lines, tuned.words]


def _differing(made: Sequence[Row], read: Callable[[Row], str]) -> str:
    """Return who has which value; empty where all have the same."""
    values = sorted({read(row) for row in made})
    who = {value: dict.fromkeys(row.contestant for row in made if read(row) == value) for value in values}
    return "; ".join(f"{value}: {', '.join(names)}" for value, names in who.items()) if len(values) > 1 else ""


def verdict(made: Sequence[Row]) -> str:
    """Return one paragraph: which differences of means exceed their intervals."""
    sentences = []
    for epsilon in dict.fromkeys(row.target_epsilon for row in made):
        panel = [row for row in made if row.target_epsilon == epsilon]
        sentences.append(f"At epsilon = {format_number(epsilon)}: {_panel(panel)}")
    pairs = sum(1 for a, b in combinations(made, 2) if a.target_epsilon == b.target_epsilon)
    if pairs > 1 and len(made[0].accuracy) > 1:
        sentences.append(
            f"Each interval holds 95 % on its own: were all methods equally good, about {pairs / 20:.2g} of the "
            f"{pairs} differences would still exceed theirs by luck."
        )
    return " ".join(sentences)


def _panel(panel: Sequence[Row]) -> str:
    ranked = sorted(panel, key=lambda row: -row.interval.center)
    if len(ranked) == 1:
        return f"{ranked[0].contestant} stands alone, so there is nothing to tell apart."
    if len(ranked[0].accuracy) == 1:
        first, second = ranked[:2]
        points = 100 * (first.interval.center - second.interval.center)
        return (
            f"{first.contestant} came out {points:.2f} points above {second.contestant}, and one seed cannot tell luck "
            "from merit."
        )
    pairs = [(a, b, difference_interval(a.accuracy, b.accuracy)) for a, b in combinations(ranked, 2)]
    clear = [(a, b, gap) for a, b, gap in pairs if gap.excludes_zero]
    if not clear:
        first, second, gap = pairs[0]
        return (
            f"no difference exceeds its interval; the first two are {first.contestant} and {second.contestant}, "
            f"{_points(gap)} apart."
        )
    said = []
    for first in ranked:
        beaten = [f"{b.contestant} by {_points(gap)}" for a, b, gap in clear if a is first]
        if beaten:
            said.append(f"{first.contestant} is above {_listed(beaten)}")
    unclear = len(pairs) - len(clear)
    rest = (
        f" The other {_counted(unclear)} within {'its interval' if unclear == 1 else 'their intervals'}."
        if unclear
        else ""
    )
    return "; ".join(said) + "." + rest


def _points(gap: Estimate) -> str:
    return f"{100 * gap.center:.2f} ± {100 * gap.half_width:.2f} points"


def _counted(number: int) -> str:
    return "difference is" if number == 1 else f"{number} differences are"


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def stopped(log: Log, name: str, *, goes_on: bool = True) -> str:
    """Return what an interrupted comparison spent, and whether the same command goes on from there."""
    parts = [f"Stopped by {name}: {_complete(log)} complete, each at its full epsilon."]
    for record in log.records:
        if record.status != COMPLETE:
            run = f"{record.run.contestant} (lr {format_number(record.run.lr)}, seed {record.run.seed})"
            parts.append(f"{run} {_spent(record)}.")
    events = log.events()
    if log.comparison.account_for_tuning and events:
        delta = log.comparison.shared.delta
        epsilon = format_epsilon(min(together(events, delta).values()))
        parts.append(f"All of them together spent epsilon = {epsilon} at delta = {format_number(delta)}.")
    return " ".join([*parts, "The same command goes on from here."] if goes_on else parts)


def kept(log: Log) -> str:
    """Return what a comparison that failed keeps."""
    said = _complete(log)
    are = said.rpartition(" ")[2]
    return f"{said} complete in {log.folder.path}, and {are} kept; the same command goes on from there"


def _complete(log: Log) -> str:
    complete = len(log.complete())
    return f"{complete} of {counted(log.comparison.total, 'run')} {'is' if complete == 1 else 'are'}"


def _spent(record: Record) -> str:
    statement = record.statement
    if statement is None:
        return "ended before its first step, and spent nothing"
    most = "at most " if statement.note.startswith(WRITTEN_BEFORE) else ""
    return (
        f"spent {most}epsilon = {format_epsilon(statement.best_epsilon)} in {statement.steps_taken:,} of "
        f"{counted(statement.steps_planned, 'step')}"
    )
