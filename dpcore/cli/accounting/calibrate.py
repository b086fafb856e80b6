"""``dpcore calibrate``: the one setting of a plan that is not known yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore import accounting
from dpcore.accounting import Composed, Event
from dpcore.cli.accounting import answer
from dpcore.cli.accounting.answer import EventOptions
from dpcore.cli.options import Json, one_of, option, real
from dpcore.cli.output import write_answer
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.ledger import Ledger, Remaining
from dpcore.statement.text import counted, format_epsilon, format_lower, format_number

UNKNOWNS = ("noise-multiplier", "steps", "sample-rate", "batch-size", "delta")


@answer.accounts(", for one trial value after another")
def calibrate(
    epsilon: Annotated[float | None, option(real, "EPSILON", "The target, for example 3.")] = None,
    delta: Annotated[float | None, option(real, "DELTA", "Well below 1/N; for example 1e-5.")] = None,
    solve_for: Annotated[str | None, option(one_of(UNKNOWNS), "NAME",
        f"What is unknown: {', '.join(UNKNOWNS)}. Or leave it out.")] = None,
    ledger: Annotated[Path | None, typer.Option(metavar="FILE",
        help="What this ledger leaves: the target is for its runs and this one together.")] = None,
    accountant: answer.Accountant = None,
    as_json: Json = False,
    **given: Any,
) -> None:  # fmt: skip
    """Say what meets a target epsilon: the noise, the steps, the batch size or the delta, whichever is left out."""
    plan = EventOptions(**given)
    spent = None if ledger is None else spent_of(ledger)
    if spent is not None:
        epsilon, delta = spent.target(epsilon, delta)
    unknown = _unknown(plan, delta, solve_for)
    if epsilon is None:
        raise ArgumentError("epsilon: give the target, as --epsilon 3; dpcore epsilon says what a complete plan costs")
    if unknown == "delta":
        event = _together(spent, plan.event())
        name, bounds = answer.bounds_of(accounting.delta, event, epsilon, accountant)
        value: float = bounds[name]
        known, reached, delta = plan, epsilon, value
    else:
        assert delta is not None
        value, name = _solve(plan, unknown, epsilon, delta, accountant, spent)
        known = plan.with_(unknown, value)
        event = _together(spent, known.event())
        reached = accounting.epsilon(event, delta, name)
    if value == 0 and unknown != "delta":
        raise PrivacyError(
            f"epsilon={format_number(epsilon)}: not even one step meets it at delta={format_number(delta)}; more noise "
            "(--noise-multiplier) is needed, or a larger epsilon"
        )
    remark = answer.remark_on_delta(delta, plan, event) if 0 < delta < 1 else None

    def make_event(found: Any) -> Event:
        return (plan if unknown == "delta" else plan.with_(unknown, found)).event()

    granted = None if spent is None else spent.pays_for(unknown, value, make_event)
    told = {unknown.replace("-", "_"): value, "unknown": unknown, "epsilon": reached,
        "target_epsilon": epsilon, "delta": delta, "accountant": name, **answer.described(event),
        **({} if spent is None else {"ledger": spent.to_dict(granted)}),
        **({} if remark is None else {"remark": remark})}  # fmt: skip
    said = answer.sentence(name, known, event)
    at = _safe(unknown, value) if unknown == "delta" else format_number(delta)
    write_answer(
        as_json,
        told,
        f"{unknown.replace('-', ' ')} = {_safe(unknown, value)}",
        f"gives epsilon = {format_epsilon(reached)} at delta = {at}",
        said.rpartition(", noise")[0] if unknown == "noise-multiplier" else said,
        *(_epochs(int(value), known) if unknown == "steps" else ()),
        *(() if spent is None else spent.words(unknown, value, granted)),
    )


def _epochs(steps: int, known: EventOptions) -> list[str]:
    """Return how many passes over the data so many steps are; nothing where a step is one, or nothing tells it."""
    epoch = known.steps_per_epoch
    if epoch == 1:
        return []
    whole, more = divmod(steps, epoch)
    rest = f", and {more:,} more" if more else ""
    return [f"{counted(steps, 'step')}: {counted(whole, 'epoch')} of {epoch:,} steps{rest}"]


def _unknown(plan: EventOptions, delta: float | None, asked: str | None) -> str:
    """Return the one thing that was left out; with --solve-for, see that it was, and nothing else."""
    open_ = []
    if plan.noise_multiplier is None:
        open_.append("noise-multiplier")
    if plan.steps is None and plan.epochs is None:
        open_.append("steps")
    rateless = plan.sampling == "full-batch" or (
        plan.sampling in ("fixed-order", "shuffled") and plan.dataset_size is None
    )
    if plan.sample_rate is None and plan.batch_size is None and not rateless:
        open_.append("sample-rate" if plan.dataset_size is None else "batch-size")
    if delta is None:
        open_.append("delta")
    if asked in ("sample-rate", "batch-size") and asked not in open_:
        rival = "batch-size" if asked == "sample-rate" else "sample-rate"
        if rival in open_ and asked == "batch-size":
            raise ArgumentError("dataset_size: give --dataset-size, or solve for the sample-rate")
        if rival in open_ and plan.sampling == "poisson":
            open_[open_.index(rival)] = asked
    if asked is not None and asked not in open_:
        raise ArgumentError(f"solve_for={asked!r}: was given as an option already; leave that option out")
    if len(open_) != 1:
        raise ArgumentError(_how_many_are_open(open_))
    if open_ == ["sample-rate"] and plan.sampling not in ("poisson", "truncated-poisson"):
        raise ArgumentError("dataset_size: give --dataset-size, and the batch size is looked for")
    if open_ == ["sample-rate"] and plan.epochs is not None and plan.dataset_size is None:
        raise ArgumentError("epochs: give --steps to look for a sample rate; an epoch has 1/rate steps")
    return open_[0]


def _how_many_are_open(open_: list[str]) -> str:
    asked = f"solve_for: exactly one of {', '.join(UNKNOWNS)} must be left out, and "
    if not open_:
        return f"{asked}none is; dpcore epsilon says what a complete plan costs"
    give = {"noise-multiplier": "--noise-multiplier", "steps": "--steps or --epochs",
        "sample-rate": "--sample-rate, or --dataset-size with --batch-size", "batch-size": "--batch-size",
        "delta": "--delta"}  # fmt: skip
    # Most people look for the noise; without it among them, for the first.
    wanted = open_[0].replace("-", " ")
    rest = "; ".join(give[name] for name in open_[1:])
    return f"{asked}these are: {', '.join(open_)}. For the {wanted}, give {rest}"


def _solve(
    plan: EventOptions, unknown: str, epsilon: float, delta: float, accountant: str | None, spent: Spent | None
) -> tuple[float, str]:
    """Return the value and the accountant that allows most: each epsilon is an upper bound."""
    before = None if spent is None else spent.event
    probe = {"noise-multiplier": 1.0, "steps": 1, "sample-rate": 0.01, "batch-size": 1}[unknown]

    def make_event(value: Any) -> Event:
        return plan.with_(unknown, value).event()

    def solved(candidate: str) -> float:
        named, size = unknown.replace("-", "_"), plan.dataset_size or 1
        return accounting.calibrate(named, epsilon, delta, make_event, candidate, spent=before, dataset_size=size)

    names = [accountant] if accountant else accounting.accountants_for(_together(spent, make_event(probe)))
    found: list[tuple[float, str]] = []
    refusals: list[Exception] = []
    for candidate in names or ["rdp"]:
        try:
            found.append((solved(candidate), candidate))
        except (ArgumentError, PrivacyError) as refusal:  # another accountant may certify the target
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    # Of equal values the first, whose accountant comes first in a statement.
    best = min if unknown == "noise-multiplier" else max
    return best(found, key=lambda pair: pair[0])


def _together(spent: Spent | None, event: Event) -> Event:
    return event if spent is None else accounting.Composed((*spent.event.events, event))


def _safe(unknown: str, value: float) -> str:
    """Return the value so rounded that typing it in again keeps the target."""
    if unknown in ("steps", "batch-size"):
        return f"{int(value)}"
    if unknown == "sample-rate":
        return format_lower(value, digits=6)
    return format_epsilon(value, digits=6)


@dataclass(frozen=True)
class Spent:
    """The runs of a ledger, as one event: all that they release at most.

    `left` is what the budget leaves; None where there is no budget, or where nothing is left of it for another run.
    """

    name: str
    runs: int
    event: Composed
    budget: tuple[float, float] | None
    left: Remaining | None

    def target(self, epsilon: float | None, delta: float | None) -> tuple[float | None, float | None]:
        """Return the target: as given, or where neither was, the ledger's budget."""
        if epsilon is None and delta is None and self.budget is not None:
            return self.budget
        if epsilon is None:
            raise ArgumentError("epsilon: give the target for all runs together, for the ledger has no budget")
        return epsilon, delta

    def pays_for(self, unknown: str, value: float, make_event: Callable[[Any], Event]) -> float | None:
        """Return what the ledger itself pays for: the value that was found, another one, or None.

        The value was found as if all runs had been fixed beforehand. What begins after a release may have been chosen
        by looking at it, and the ledger holds it to its filter, which allows less. `make_event` makes the run's event
        of a value of the `unknown`, which is written as an option.
        """
        if self.budget is None:
            return value
        if self.left is None:
            return None
        if self.left.fits(make_event(value)):
            return value
        if unknown == "steps":
            return self.left.steps(make_event, int(value)) or None
        if unknown == "noise-multiplier":
            try:
                return self.left.noise_multiplier(make_event)
            except BudgetError:
                return None
        return None

    def words(self, unknown: str, found: float, granted: float | None) -> list[str]:
        """Return the same for a person, and what the value holds for."""
        held = counted(self.runs, "run")
        ends = "" if self.budget is None else _budget(self.budget)
        first = f"together with the {held} of the ledger {self.name}{ends}, as if all had been fixed beforehand"
        if self.budget is None:
            return [first, "it has no budget and stops nothing (dpcore ledger show)"]
        if granted is None:
            return [first, "the ledger does NOT pay for this run as a whole (dpcore ledger show)"]
        if granted == found:
            return [first, "the ledger pays for this run as a whole"]
        less = f"pays for {counted(int(granted), 'step')} only"
        if unknown != "steps":
            less = f"asks for noise multiplier = {format_epsilon(granted, digits=6)}"
        return [first, f"the ledger itself {less}: it covers runs that are chosen by looking at earlier ones, too"]

    def to_dict(self, granted: float | None) -> dict[str, Any]:
        """Return the same for JSON."""
        budget = None if self.budget is None else list(self.budget)
        return {"ledger": self.name, "runs": self.runs, "budget": budget, "pays_for": granted}


def _budget(budget: tuple[float, float]) -> str:
    return f" (budget: epsilon = {format_epsilon(budget[0])} at delta = {format_number(budget[1])})"


def spent_of(path: Path) -> Spent:
    """Read a ledger, without changing it; PrivacyError where one of its runs has no guarantee."""
    ledger = Ledger.open(path, read_only=True)
    runs = ledger.runs()
    lost = [run.name for run in runs if run.event.adjacency is None and run.releases]
    if lost:
        raise PrivacyError(f"ledger: its run {lost[0]!r} has no guarantee, so that nothing is left for another one")
    left = None if ledger.budget is None or ledger.total().alone else ledger.remaining()
    event = Composed(tuple(run.event for run in runs))
    return Spent(ledger.name or path.name, len(runs), event, ledger.budget, left)
