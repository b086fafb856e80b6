"""The report of a comparison: rows, a table and the lines below it, a verdict, and the accounting."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from rich.markup import escape

from dpcore import accounting
from dpcore.accounting import Composed, Event
from dpcore.cli.compare.runs import COMPLETE, FINAL, GRADIENTS, Comparison, Log, Plans, Record
from dpcore.cli.intervals import Estimate, difference_interval, mean_interval
from dpcore.cli.plots import Curves
from dpcore.errors import DpcoreError
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, counted, format_epsilon, format_number


@dataclass(frozen=True)
class Row:
    """One contestant at one epsilon, and the records of its final runs, one a seed.

    `settings` are the chosen values of its grids; `gradients` are those per example and step.
    """

    contestant: str
    method: str
    target_epsilon: float
    lr: float
    grid: tuple[float, ...]
    gradients: float
    records: tuple[Record, ...]
    epochs: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Record:
        """The run whose statement represents all: they have the same plan."""
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
        """Held-out accuracy during each run."""
        epochs = [float(item["epoch"]) for item in self.first.evaluations]
        return Curves(epochs, [record.accuracy for record in self.records])

    @property
    def interval(self) -> Estimate:
        """Mean accuracy with its 95 % interval over the seeds."""
        return mean_interval(self.accuracy)

    @property
    def at_edge(self) -> bool:
        """Whether the chosen learning rate is the smallest or largest of several: a better one may be outside."""
        return len(self.grid) > 1 and self.lr in (self.grid[0], self.grid[-1])

    def less(self, baseline: "Row") -> Estimate:
        """Return the mean difference of accuracy over the seeds that both have, paired: they start at equal weights.

        Student's interval of the differences is right whatever the two runs of a pair share.
        """
        other = {record.run.seed: record.accuracy[-1] for record in baseline.records}
        pairs = [(r.accuracy[-1], other[r.run.seed]) for r in self.records if r.run.seed in other]
        return mean_interval([a - b for a, b in pairs]) if pairs else Estimate(math.nan, math.nan)


def composed(log: Log, plans: Plans) -> tuple[float | None, str]:
    """Return the epsilon of all runs together with any choice among them, or None and why it is not known.

    Composition covers the choice because all events were fixed beforehand: what is chosen changes none of them. Where a
    setting does (the batch size), the event of a final run depends on earlier results, and this says nothing.
    """
    by_row: dict[tuple[str, float], set[Event]] = {}
    for (contestant, epsilon, _), plan in plans.items():
        by_row.setdefault((contestant, epsilon), set()).add(plan.event)
    if any(len(events) > 1 for events in by_row.values()):
        return None, "not known, since settings were chosen that change a plan's cost"
    stated = [record.statement for record in log.records if record.statement is not None]
    try:
        event = Composed(tuple(Event.from_dict(statement.event) for statement in stated))
        return accounting.epsilon(event, log.comparison.shared.delta), ""
    except DpcoreError as cause:
        return None, f"not known ({cause})"


def tuning(log: Log, plans: Plans) -> dict[str, Any]:
    """Return whether the search for settings is accounted for: plain values, and a sentence for a person.

    "runs" counts all that released something, even if they were stopped or killed; "search_runs" counts those that
    searched for settings; "composed_epsilon" is that of all of them.
    """
    stated = [record.statement for record in log.records if record.statement is not None]
    searched = sum(record.run.role != FINAL for record in log.records)
    ledgers = {statement.ledger.get("ledger") for statement in stated}
    charged = len(ledgers) == 1 and None not in ledgers  # of two, neither counts all
    counts = f"{len(stated)}, of them {searched} in search of settings"
    together, unknown = composed(log, plans)
    cost = unknown if together is None else f"epsilon = {format_epsilon(together)}"
    words = (
        f"Tuning is NOT accounted for: each run has its guarantee on its own; all runs together ({counts}) with any "
        f"choice among them cost {cost}. On private data that would have to be counted (--ledger)."
    )
    if charged:
        words = (
            f"Tuning is accounted for by the ledger, not here: it paid for every run ({counts}), and its total counts "
            "them all (dpcore ledger show)."
        )
    counted_runs = {"runs": len(stated), "search_runs": searched, "composed_epsilon": together}
    return {"accounted_for": charged, **counted_runs, "words": words}


def rows(log: Log, plans: Plans) -> list[Row]:
    """Return the rows of the table, by epsilon, then in the order of the contestants.

    If the comparison ended early: the rows with a complete run, and their complete runs.
    """
    comparison, accuracy, complete = log.comparison, log.accuracies(), log.complete()
    made = []
    for epsilon in comparison.epsilon:
        for contestant in comparison.contestants:
            name, method = contestant.name, str(contestant.settings["method"])
            if (chosen := comparison.chosen(name, epsilon, accuracy)) is None:
                continue
            setting, lr = chosen
            final = comparison.final(name, epsilon, lr, setting)
            records = tuple(complete[run] for run in final if run in complete)
            if not records:
                continue
            plan = plans[name, epsilon, setting]
            gradients = sum(len(plan.method.query.points(step)) for step in range(plan.steps)) / plan.steps
            epochs, values = comparison.settings_for(final[0]).epochs, comparison.candidates(name)[setting]
            made.append(Row(name, method, epsilon, lr, comparison.grid(name), gradients, records, epochs, values))
    return made


def baselines(comparison: Comparison, made: Sequence[Row]) -> dict[float, Row]:
    """Return the baseline's row at each epsilon that has one."""
    return {row.target_epsilon: row for row in made if row.contestant == comparison.baseline}


def to_dict(
    comparison: Comparison, made: Sequence[Row], tuned: dict[str, Any], verdict: str, lines: Sequence[str]
) -> dict[str, Any]:
    """Return the summary as plain values."""
    base = baselines(comparison, made)
    shown = [
        {
            "contestant": row.contestant,
            "method": row.method,
            "target_epsilon": row.target_epsilon,
            "lr": row.lr,
            "grid": list(row.grid),
            "lr_at_edge_of_grid": row.at_edge,
            "test_accuracy": list(row.accuracy),
            "test_loss": [record.evaluations[-1]["test_loss"] for record in row.records],
            "mean": row.interval.center,
            "half_width_95": None if math.isnan(row.interval.half_width) else row.interval.half_width,
            "epsilon": row.statement.best_epsilon,
            "delta": row.statement.delta,
            "adjacency": row.statement.adjacency,
            "noise_multiplier": row.statement.noise["noise_multiplier"],
            "gradients_per_example_and_step": row.gradients,
            "epochs": row.epochs,
            "settings": row.settings,
            "less_baseline": _plain(row.less(base[row.target_epsilon])) if row.target_epsilon in base else None,
        }
        for row in made
    ]
    return {"rows": shown, "verdict": verdict, "remarks": list(lines), "tuning": tuned}


def _plain(estimate: Estimate) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in estimate._asdict().items()}


def table(comparison: Comparison, made: Sequence[Row]) -> dict[str, Any]:
    """Return the table, as `dpcore.cli.output.write_table` takes it."""
    base = baselines(comparison, made)
    columns: dict[str, tuple[bool, Callable[[Row], str]]] = {
        "contestant": (any(row.contestant != row.method for row in made), lambda row: row.contestant),
        "method": (True, lambda row: row.method),
        "settings": (
            any(row.settings for row in made),
            lambda row: ", ".join(f"{name} {value}" for name, value in row.settings.items()) or "-",
        ),
        "lr": (True, lambda row: format_number(row.lr) + ("*" if row.at_edge else "")),
        "runs": (
            any(len(row.accuracy) < comparison.seeds for row in made),
            lambda row: f"{len(row.accuracy)} of {comparison.seeds}",
        ),
        "accuracy": (True, lambda row: f"{_points(row.interval)} %"),
        f"less {comparison.baseline}": (
            bool(base),
            lambda row: (
                "-" if (other := base.get(row.target_epsilon)) in (None, row) else _points(row.less(other), "+")
            ),
        ),
        "epsilon": (True, lambda row: format_epsilon(row.statement.best_epsilon)),
        "epochs": (len({row.epochs for row in made}) > 1, lambda row: str(row.epochs)),
        "gradients": (True, lambda row: f"{row.gradients:.3g}"),
    }
    cells = {name: cell for name, (shown, cell) in columns.items() if shown}
    shared = comparison.shared
    return {
        "head": tuple(cells),
        "rows": [tuple(escape(cell(row)) for cell in cells.values()) for row in made],
        "title": f"Held-out accuracy, {shared.data}, {shared.model}, {counted(comparison.seeds, 'seed')}"
        f"{', equal gradients' if comparison.equal == GRADIENTS else ''}",
        "right": len(cells) - list(cells).index("lr"),
    }


def _points(estimate: Estimate, sign: str = "") -> str:
    half = "" if math.isnan(estimate.half_width) else f" ± {100 * estimate.half_width:.2f}"
    return f"{100 * estimate.center:{sign}.2f}{half}"


def footer(comparison: Comparison, made: Sequence[Row], tuned: dict[str, Any]) -> list[str]:
    """Return the sentences beneath the table."""
    interval = "± is the half width of the 95 % interval over seeds (Student's t). " if comparison.seeds > 1 else ""
    lines = [f"{interval}gradients: per example and step."]
    lines.append(
        "Equal gradients: a method that takes w in a step has 1/w of the epochs, rounded down."
        if comparison.equal == GRADIENTS
        else "Epochs are as given, whatever gradients a method takes (--equal gradients)."
    )
    if comparison.baseline is not None:
        lines.append(
            f"less {comparison.baseline}: mean difference, paired by seed. A pair starts at the same weights; batches "
            "and noise are drawn anew, since runs that share them would cost more than the accountant counts."
        )
    grids = {row.contestant: row.grid for row in made}
    for grid in sorted(set(grids.values())):
        names = "; ".join(name for name, own in grids.items() if own == grid)
        whose = "" if len(set(grids.values())) == 1 else f" of {names}"
        rates = f"best of {', '.join(map(format_number, grid))} by mean accuracy in the search"
        if len(grid) == 1:
            rates = f"{format_number(grid[0])}, given, not searched"
        lines.append(f"Learning rate{whose}: {rates}.")
    if any(row.at_edge for row in made):
        lines.append("* at the edge of its grid: a better one may be outside.")
    if rules := _differing(made, lambda row: row.statement.clip["rule"]):
        lines.append(f"Clip rules differ, by the methods' defaults or as given ({rules}).")
    if kinds := _differing(made, lambda row: row.statement.adjacency):
        lines.append(f"Neighbors differ ({kinds}): the same epsilon does not mean the same protection across them.")
    if comparison.searches:
        lines.append("One half of the test set chose settings and rates; the other half measures the accuracy.")
    return [*lines, tuned["words"]]


def _differing(made: Sequence[Row], read: Callable[[Row], str]) -> str:
    """Return the contestants of each value; an empty text if all have the same."""
    values = sorted({read(row) for row in made})
    who = {value: dict.fromkeys(row.contestant for row in made if read(row) == value) for value in values}
    return "; ".join(f"{value}: {', '.join(names)}" for value, names in who.items()) if len(values) > 1 else ""


def verdict(made: Sequence[Row], baseline: str | None = None) -> str:
    """Return one paragraph: which differences exceed their intervals, of all pairs or, paired, to the baseline."""
    sentences = []
    for epsilon in dict.fromkeys(row.target_epsilon for row in made):
        panel = [row for row in made if row.target_epsilon == epsilon]
        sentences.append(f"At epsilon = {format_number(epsilon)}: {_panel(panel, baseline)}")
    pairs = sum(
        1
        for a, b in combinations(made, 2)
        if a.target_epsilon == b.target_epsilon and baseline in (None, a.contestant, b.contestant)
    )
    if pairs > 1 and len(made[0].accuracy) > 1:
        sentences.append(
            f"Each interval has a confidence of 95 % on its own: were all methods equal, about {pairs / 20:.2g} of the "
            f"{pairs} differences would still exceed theirs by luck."
        )
    return " ".join(sentences)


def _panel(panel: Sequence[Row], baseline: str | None) -> str:
    ranked = sorted(panel, key=lambda row: -row.interval.center)
    if len(ranked) == 1:
        return f"{ranked[0].contestant} is the only one, so there is nothing to compare."
    base = next((row for row in panel if row.contestant == baseline), None)
    pairs = [
        (a.contestant, b.contestant, difference_interval(a.accuracy, b.accuracy) if base is None else a.less(b))
        for a, b in combinations(ranked, 2)
        if base is None or base in (a, b)
    ]
    if len(ranked[0].accuracy) == 1:
        first, second, gap = pairs[0]
        points = f"{100 * gap.center:.2f} points above {second}"
        return f"{first} came out {points}, but one seed cannot distinguish luck from merit."
    clear = [
        f"{first} is above {second} by {100 * gap.center:.2f} ± {100 * gap.half_width:.2f} points"
        for first, second, gap in pairs
        if gap.excludes_zero
    ]
    exceed = f"; {len(clear)} of {len(pairs)} differences exceed their intervals" if clear and len(pairs) > 1 else ""
    return f"{'; '.join(clear) or 'no difference exceeds its interval'}{exceed}."


def stopped(log: Log, name: str, *, continues: bool = True) -> str:
    """Return what an interrupted comparison spent, and whether the same command continues it."""
    parts = [f"Stopped by {name}: {_complete(log)} complete, each at its full epsilon."]
    for record in log.records:
        if record.status != COMPLETE:
            run = f"{record.run.contestant} (lr {format_number(record.run.lr)}, seed {record.run.seed})"
            said, stated = "ended before its first step, and spent nothing", record.statement
            if stated is not None:
                most = "at most " if stated.note.startswith(WRITTEN_BEFORE) else ""
                steps = f"{stated.steps_taken:,} of {counted(stated.steps_planned, 'step')}"
                said = f"spent {most}epsilon = {format_epsilon(stated.best_epsilon)} in {steps}"
            parts.append(f"{run} {said}.")
    return " ".join(
        [*parts, "The same command continues: it keeps what is complete, and goes on with what a signal stopped."]
        if continues
        else parts
    )


def kept(log: Log) -> str:
    """Return a sentence on the runs that a failed comparison keeps."""
    said = _complete(log)
    return f"{said} complete in {log.folder.path}, and {said.rpartition(' ')[2]} kept; the same command continues there"


def _complete(log: Log) -> str:
    complete = len(log.complete())
    return f"{complete} of {counted(log.comparison.total, 'run')} {'is' if complete == 1 else 'are'}"
