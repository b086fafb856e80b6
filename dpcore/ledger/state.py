"""What the entries of a ledger add up to: runs, their branches, and the rows of each that may have left the process.

The state is nothing but the fold of the entries, so there is no second account that could disagree with them. `apply`
refuses an entry that does not follow from those before it; reading a ledger therefore checks it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from dpcore.ledger.entries import number_in
from dpcore.ledger.fixed import Fixed

FORMAT = 1


@dataclass
class Branch:
    """Rows drawn with one noise key: from `first` on, and those of the parent before it.

    Attributes
    ----------
    branch_id : str
    first : int
        The first row of its own.
    mark : int
        Exclusive: rows from `first` to below it may have left the process.
    number : int or None
        By which its key was derived; None for the branch a run began with.
    key_digest : str
        Of the noise key; empty where it was not told.
    digests : list of (row, str)
        From which row on the sums were shaped by what.
    settings : list of (row, until, str)
        Digest of the update's settings for the rows from `row` to below `until`, ascending and apart from each other.
    """

    branch_id: str
    first: int = 0
    mark: int = 0
    number: int | None = None
    key_digest: str = ""
    digests: list[tuple[int, str]] = field(default_factory=list)
    settings: list[tuple[int, int, str]] = field(default_factory=list)

    def settings_at(self, row: int) -> str | None:
        """Return the digest of the settings in force at a row; None if the row was never about to be released."""
        place = bisect_right(self.settings, row, key=itemgetter(0))
        if not place:
            return None
        _, until, digest = self.settings[place - 1]
        return digest if row < until else None

    def digests_between(self, row: int, end: int) -> set[str]:
        """Return all digests in force at the rows from `row` to below `end`."""
        ends = [start for start, _ in self.digests[1:]] + [end]
        return {
            digest
            for (start, digest), until in zip(self.digests, ends, strict=True)
            if max(start, row) < min(until, end)
        }

    def note_digest(self, row: int, digest: str) -> None:
        """Say that from `row` on the sums are shaped by what `digest` stands for."""
        self.digests = [item for item in self.digests if item[0] < row] + [(row, digest)]

    def note_settings(self, row: int, until: int, digest: str) -> None:
        """Say that the rows from `row` to below `until` are settled; what was settled from `row` on is void."""
        kept = self.settings  # changed in place: with a schedule it is as long as the run
        while kept and kept[-1][0] >= row:
            kept.pop()
        if kept:
            start, end, known = kept.pop()
            if end >= row and known == digest:
                row = start
            else:
                kept.append((start, min(end, row), known))
        kept.append((row, until, digest))


@dataclass
class Run:
    """A run as the entries tell it; see `dpcore.ledger.records.RunRecord`."""

    run_id: str
    name: str
    begun: str
    adjacency: str | None
    steps: int
    planned: dict[str, Any]
    event: dict[str, Any]
    charge: float
    description: Any
    dataset: str
    planned_steps: int  # at the beginning; `steps` may grow
    early: bool  # begun before anything was reserved by anybody
    releases: int = 0
    at: tuple[int, int, int] = (0, 0, 0)  # the steps, the abandoned rows and the forks that `event` is for
    branches: dict[str, Branch] = field(default_factory=dict)

    @property
    def forks(self) -> int:
        """How often a branch was left for another."""
        return len(self.branches) - 1


@dataclass
class State:
    """A ledger as its entries tell it."""

    header: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    key_digests: dict[str, str] = field(default_factory=dict)  # to the run that uses the key
    fixed: Fixed | None = None  # None until the first row is reserved
    entries: int = 0

    @property
    def order(self) -> float | None:
        """The filter's order; None as long as it is not fixed."""
        return self.header["order"] if self.fixed is None else self.fixed.order

    @property
    def limit(self) -> float | None:
        """Of the filter's sum; None without a budget, or as long as it is not fixed."""
        return self.header["limit"] if self.fixed is None else self.fixed.limit

    def in_plan(self, run: Run, mark: int, releases: int) -> bool:
        """Whether a branch up to `mark`, with so many rows of the run in all, is a part of a plan fixed beforehand."""
        fixed = self.fixed is not None and run.run_id in self.fixed.runs
        return fixed and releases == mark <= run.planned_steps

    def apply(self, content: Mapping[str, Any]) -> None:
        """Take an entry into account; a ValueError says what is wrong if it does not follow from those before it."""
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


def _begin(state: State, content: Mapping[str, Any]) -> None:
    run_id, branch_id = content["run"], content["branch"]
    if run_id in state.runs:
        raise ValueError(f"begins the run {run_id!r} a second time")
    run = Run(
        run_id,
        content["name"],
        content["time"],
        content["adjacency"],
        content["steps"],
        content["planned"],
        content["event"],
        number_in(content["charge"]),
        content["description"],
        content["dataset"],
        content["steps"],
        state.fixed is None,
    )
    run.branches[branch_id] = Branch(branch_id, digests=[(0, content["digest"])])
    state.runs[run_id] = run
    _key(state, {**content, "kind": "key"})


def _key(state: State, content: Mapping[str, Any]) -> None:
    _, branch = state.branch(content)
    if content["key_digest"]:
        if content["key_digest"] in state.key_digests:
            raise ValueError("uses a noise key that another branch has")
        branch.key_digest = content["key_digest"]
        state.key_digests[branch.key_digest] = content["run"]


def _resume(state: State, content: Mapping[str, Any]) -> None:
    run, branch = state.branch(content)
    run.steps = content["steps"]
    branch.note_digest(content["row"], content["digest"])


def _fork(state: State, content: Mapping[str, Any]) -> None:
    run, parent = state.branch(content)
    row, child = content["row"], content["child"]
    if child in run.branches or any(item.number == content["number"] for item in run.branches.values()):
        raise ValueError(f"makes the branch {child!r} a second time")
    run.branches[child] = Branch(
        child,
        first=row,
        mark=row,
        number=content["number"],
        digests=[item for item in parent.digests if item[0] < row] + [(row, content["digest"])],
        settings=[(start, min(end, row), digest) for start, end, digest in parent.settings if start < row],
    )


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
    state.fixed = Fixed(
        tuple(content["runs"]),
        content["event"],
        number_in(content["charge"]),
        number_in(content["epsilon"]),
        order,
        None if limit is None else number_in(limit),
    )


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
    charge = number_in(content["charge"])
    branch.mark, run.releases = content["mark"], content["releases"]
    run.event, run.charge = content["event"], charge
    run.at = branch.mark, run.releases - branch.mark, run.forks


def _settings(state: State, content: Mapping[str, Any]) -> None:
    _, branch = state.branch(content)
    branch.note_settings(content["row"], content["until"], content["digest"])


_HANDLERS: dict[str, Callable[[State, Mapping[str, Any]], None]] = {
    "create": _create,
    "begin": _begin,
    "key": _key,
    "resume": _resume,
    "fork": _fork,
    "fix": _fix,
    "reserve": _reserve,
    "close": _reserve,
    "settings": _settings,
}
