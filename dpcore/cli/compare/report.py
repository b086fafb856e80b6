"""The report of a comparison: rows, a table, a paragraph in plain words, and the accounting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpcore import accounting
from dpcore.cli.compare.comparison import FINAL, Comparison
from dpcore.cli.compare.log import Log, Record
from dpcore.cli.compare.runs import Previews
from dpcore.cli.intervals import Estimate, mean_interval
from dpcore.cli.plots.plots import Curves
from dpcore.statement.statement import Statement
from dpcore.statement.text import counted, format_epsilon, format_number


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


def tuning(comparison: Comparison, log: Log) -> Tuning:
    """Return what is said about all runs so far."""
    stated = [record.statement for record in log.records if record.statement is not None]
    searched = sum(record.run.role != FINAL for record in log.records)
    events, delta = log.events(), comparison.shared.delta
    charged = bool(stated) and all(statement.ledger for statement in stated)
    if not comparison.account_for_tuning:
        return Tuning(len(events), searched, None, delta, charged=charged)
    adjacency = str(accounting.Composed(tuple(events)).adjacency)
    return Tuning(len(events), searched, together(events, delta), delta, adjacency, charged)


def rows(comparison: Comparison, log: Log, plans: Previews) -> list[Row]:
    """Return the rows of the table, by epsilon, then in the order of the contestants.

    Of a comparison that was ended early: those with a run that is complete, and its complete runs.
    """
    accuracy, complete = log.accuracies(), log.complete()
    made = []
    for epsilon in comparison.epsilon:
        for name in (contestant.name for contestant in comparison.contestants):
            lr = comparison.chosen(name, epsilon, accuracy)
            final = [] if lr is None else comparison.final(name, epsilon, lr)
            records = tuple(complete[run] for run in final if run in complete)
            if lr is None or not records:
                continue
            gradients = plans[name, epsilon, FINAL].gradients
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
