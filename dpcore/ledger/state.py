"""The state that a ledger's entries add up to: runs, branches, and the rows that may have left the process.

The state is nothing but the fold of the entries, so there is no second account that could disagree with them. `apply`
refuses an entry that does not follow from those before it; reading a ledger therefore checks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpcore.accounting import Event
from dpcore.accounting.branches import Branch, Branches, Rows
from dpcore.ledger.entries import number_in
from dpcore.ledger.fixed import Fixed, within

FORMAT = 1


@dataclass
class Run:
    """A run as the entries tell it; see `dpcore.ledger.records.RunRecord`."""

    run_id: str
    name: str
    begun: str
    adjacency: str | None
    planned_steps: int  # at the beginning; `steps` may grow
    planned: dict[str, Any]
    event: dict[str, Any]
    charge: float
    description: Any
    dataset: str
    early: bool  # begun before anything was reserved by anybody
    steps: int
    branches: dict[str, Branch]
    releases: int = 0
    mark: int = 0  # of the branch that `event` was written for
    numbers: set[int] = field(default_factory=set)  # of the forks

    @property
    def plan(self) -> Event:
        """The event of all of it, as it was planned."""
        return Event.from_dict(self.planned)

    def abandoned(self, branch_id: str) -> tuple[Rows, ...]:
        """Return the rows that do not lead to a branch."""
        return Branches(branch_id, self.branches).abandoned


@dataclass
class State:
    """A ledger as its entries tell it."""

    header: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    key_digests: dict[str, tuple[str, str]] = field(default_factory=dict)  # to the run and branch that use the key
    fixed: Fixed | None = None  # None until the first row is reserved
    entries: int = 0
    file_systems: tuple[str, ...] = ()  # that the owner accepted, of those that are not known to be safe

    @property
    def order(self) -> float | None:
        """The filter's order; None as long as it is not fixed."""
        return self.header["order"] if self.fixed is None else self.fixed.order

    @property
    def limit(self) -> float | None:
        """Of the filter's sum; None without a budget, or as long as it is not fixed."""
        return self.header["limit"] if self.fixed is None else self.fixed.limit

    def in_plan(self, run: Run, mark: int, releases: int, event: Event) -> bool:
        """Whether a run of so many rows, a branch up to `mark` and abandoned ones, is a part of its plan if fixed."""
        if self.fixed is None or run.run_id not in self.fixed.runs:
            return False
        return releases == mark <= run.planned_steps or within(run.plan, event)

    def apply(self, content: Mapping[str, Any]) -> None:
        """Take an entry into account, or raise `ValueError` if it does not follow from the entries before it."""
        kind = content.get("kind")
        handler = _HANDLERS.get(str(kind))
        if content.get("entry") != self.entries:
            raise ValueError(f"has number {content.get('entry')!r} where {self.entries} is due")
        if handler is None or (kind == "create") != (self.entries == 0):
            raise ValueError(f"is of the kind {kind!r}, which cannot stand there")
        try:
            handler(self, content)
        except (KeyError, TypeError, AttributeError) as cause:
            raise ValueError(f"of the kind {kind!r} lacks something ({type(cause).__name__}: {cause})") from cause
        self.entries += 1

    def branch(self, content: Mapping[str, Any]) -> tuple[Run, Branch]:
        """Return the run and the branch that an entry is about."""
        run = self.runs.get(content["run"])
        if run is None or content["branch"] not in run.branches:
            raise ValueError(f"is about the unknown branch {content['branch']!r}")
        return run, run.branches[content["branch"]]


def _create(state: State, content: Mapping[str, Any]) -> None:
    if content["format"] != FORMAT:
        raise ValueError(f"has the format {content['format']!r}")
    state.header = dict(content)


def _place(state: State, content: Mapping[str, Any]) -> None:
    state.file_systems = (*state.file_systems, str(content["file_system"]))


def _begin(state: State, content: Mapping[str, Any]) -> None:
    run_id = content["run"]
    if run_id in state.runs:
        raise ValueError(f"begins the run {run_id!r} a second time")
    names = ("name", "adjacency", "steps", "planned", "event", "description", "dataset")
    state.runs[run_id] = Run(
        run_id=run_id,
        begun=content["time"],
        charge=number_in(content["charge"]),
        planned_steps=content["steps"],
        early=state.fixed is None,
        branches={content["branch"]: Branch()},
        **{name: content[name] for name in names},
    )
    _key(state, content)


def _key(state: State, content: Mapping[str, Any]) -> None:
    state.branch(content)
    if content["key_digest"]:
        if content["key_digest"] in state.key_digests:
            raise ValueError("uses a noise key that another branch has")
        state.key_digests[content["key_digest"]] = content["run"], content["branch"]


def _resume(state: State, content: Mapping[str, Any]) -> None:
    run, _ = state.branch(content)
    run.steps = content["steps"]


def _fork(state: State, content: Mapping[str, Any]) -> None:
    run, _ = state.branch(content)
    row, child = content["row"], content["child"]
    if child in run.branches or content["number"] in run.numbers:
        raise ValueError(f"makes the branch {child!r} a second time")
    run.branches[child] = Branch(content["branch"], row, row)
    run.numbers.add(content["number"])


def _fix(state: State, content: Mapping[str, Any]) -> None:
    if state.fixed is not None or any(run.releases for run in state.runs.values()):
        raise ValueError("fixes runs beforehand after rows were reserved")
    if not set(content["runs"]) <= set(state.runs):
        raise ValueError("fixes runs that were not begun")
    order = number_in(content["order"])
    if order <= 1 or order != (state.header["order"] or order):
        raise ValueError(f"has the order {order!r}")
    limit = content["limit"]
    if (limit is None) != (state.header["budget"] is None):
        raise ValueError(f"has the limit {limit!r}")
    charge, epsilon = number_in(content["charge"]), number_in(content["epsilon"])
    limit = None if limit is None else number_in(limit)
    state.fixed = Fixed(tuple(content["runs"]), content["event"], charge, epsilon, order, limit)


def _reserve(state: State, content: Mapping[str, Any]) -> None:
    run, branch = state.branch(content)
    moved = content["mark"] - branch.mark
    if moved < 0 and content["kind"] != "close":
        raise ValueError("takes reserved rows back")
    if moved > 0 and content["kind"] == "close":
        raise ValueError("reserves rows at a close")
    if content["mark"] < branch.first or content["releases"] != run.releases + moved:
        raise ValueError(f"counts {content['releases']} releases where there are {run.releases + moved}")
    if state.fixed is None:
        raise ValueError("reserves rows before it is said which runs are fixed beforehand")
    run.event, run.charge = content["event"], number_in(content["charge"])
    run.mark, run.releases = content["mark"], content["releases"]
    run.branches[content["branch"]] = branch._replace(mark=run.mark)


def _settings(state: State, content: Mapping[str, Any]) -> None:
    state.branch(content)  # written until 0.1: which settings a row had, by which it could be released once more


_HANDLERS: dict[str, Callable[[State, Mapping[str, Any]], None]] = {
    "create": _create, "place": _place, "begin": _begin, "key": _key, "resume": _resume, "fork": _fork, "fix": _fix,
    "reserve": _reserve, "close": _reserve, "settings": _settings,
}  # fmt: skip
