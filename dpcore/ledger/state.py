"""The state that a ledger's entries add up to: runs, branches, and the rows that may have left the process.

The state is nothing but the fold of the entries, so there is no second account that could disagree with them. `apply`
refuses an entry that does not follow from those before it; reading a ledger therefore checks it.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from dpcore.accounting import Composed, Event, PrivateSelection, smallest_epsilon
from dpcore.accounting.branches import Branch, Branches, Rows
from dpcore.accounting.phases import phases
from dpcore.errors import ArgumentError

# Entries: the lines of a ledger, each sealed with all before it.
#
# The seal of entry n is SHA-256(seal of entry n-1, body of entry n). Whoever changes, removes or reorders an entry
# breaks every later seal. (Cutting off the last entries, or rewriting all of them, breaks none: against that, keep the
# last seal somewhere else; statements have one.)


START = "0" * 64


class Entry(NamedTuple):
    """One entry as stored; its body is canonical JSON, which contains the number, too."""

    number: int
    body: str
    seal: str


def write(content: Mapping[str, Any]) -> str:
    """Return the one JSON spelling of an entry's content."""
    for name, value in content.items():
        try:
            json.dumps(value, sort_keys=True, allow_nan=False)
        except (TypeError, ValueError) as cause:
            raise ArgumentError(
                f"{name}: must be made of finite numbers, strings, lists and dicts ({cause})"
            ) from cause
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def seal(previous: str, body: str) -> str:
    """Return the seal of an entry that follows the one sealed by `previous`."""
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def number_out(value: float) -> float | str:
    """Return a charge as JSON has it: infinity becomes "inf"."""
    return "inf" if math.isinf(value) else value


def number_in(value: Any) -> float:
    """Return the charge that `number_out` wrote, or raise `ValueError`."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"has the charge {value!r}")
    return float(value)


# Runs fixed before anything was released: their plans may use the whole budget, as the tightest accountant counts it.
#
# A filter pays for freedom: later runs may be chosen by earlier results. Runs begun before any result need no such
# freedom. When the first row of a ledger is reserved, the runs that have been begun are *fixed*: noise, rates and
# numbers of steps of their plans do not depend on any result. One entry, "fix", lists these runs, the total cost of
# their plans, and the Renyi order at which the ledger adds up from then on. Its transaction is that of the first
# reservation, so all of it is a constant of what follows. Say F for the fixed runs, rho for the sum of the charges of
# their plans, R for the filter's limit.
#
# **F alone.** The rows of F's plans are together as private as the composition of the planned events, in whatever order
# they are interleaved, wherever each run ends, and however parameters and learning rates follow the results. Take two
# neighboring data sets. A step of an event with the pair (P_t, Q_t) that dominates it is, whatever came before, a
# random function of one draw from P_t or Q_t (Blackwell). The rows of a matrix mechanism with sensitivity s and noise
# sigma, whose squared moves add up to at most s^2 with certainty, are random functions of the increments of one
# Brownian motion with drift, hence of one draw from N(0, 1) or N(s / sigma, 1) (Smith and Thakurta 2022 have the same).
# So make all draws of F beforehand, independent of each other, and uncover them on request: the transcript is
# post-processing of the product of the pairs, and draws never uncovered are ignored. (In general: Vadhan and Zhang
# 2023, for concurrent composition of anything that has a trade-off curve.) PLD, or any accountant, may therefore decide
# on F as a whole.
#
# **All others** (begun later; rows after a fork that are in no plan; steps beyond the plan) may depend on results.
#
# * If rho <= R, the filter decides on every row, those of F included, and counts the reserved rows. The charges add up
#   to at most R with certainty, so the transcript is within the budget (`dpcore.ledger.privacy_filter`), however early
#   the runs of F end. Rows of F's plans that a living process may still come to are kept free for it; that is a
#   courtesy.
# * If rho > R, every row of F's plans is granted, and nothing else, ever: the transcript is F's alone. Rows after a
#   fork are granted as far as all that the run releases remains a part of its plan (`within`). The rest of a run that
#   ends early is not given to others: where it ends may depend on results, and no theorem adds up a plan by PLD and
#   what was chosen after it.
#
# **Nothing released.** When the last reserved row of the ledger is given back, as by a run that could not read its
# first batch, no row has ever left: the transcript is empty, and no plan can have followed from a result. The entry
# "unfix" then takes the choice of F back, and the next first reservation makes it again. All of this holds from the
# last "fix" on. (Whether a batch can be read may depend on the data. Like every error, that is for those who have the
# data, and is no release.)
#
# Which of the two holds is known before anything is released. F is found greedily: the run that reserves the first row,
# then the others of living processes, in the order in which they were begun, as long as all fit the budget. If not even
# the first fits, F is empty, and the filter decides.
#
# References
# ----------
# Vadhan, Zhang, "Concurrent Composition Theorems for Differential Privacy", 2023.
# Smith, Thakurta, "Fully Adaptive Composition for Gaussian Differential Privacy", 2022.


@dataclass(frozen=True)
class Fixed:
    """The content of the entry "fix"; `order` and `limit` are the filter's from here on."""

    runs: tuple[str, ...]  # that the budget affords as planned; none in a ledger without a budget
    event: dict[str, object]  # all their plans, as JSON values
    charge: float  # of that, to the filter
    epsilon: float  # of that, by the tightest accountant at the budget's delta
    order: float
    limit: float | None

    @property
    def alone(self) -> bool:
        """Whether only the plans of these runs will ever be granted."""
        return self.limit is not None and self.charge > self.limit


def affords(budget: tuple[float, float], event: Event) -> bool:
    """Whether an event that is fixed beforehand is (epsilon, delta)-private."""
    return smallest_epsilon(event, budget[1])[0] <= budget[0]


def within(planned: Event, event: Event) -> bool:
    """Whether a run's releases are a part of its plan in spite of abandoned rows, as fixed beforehand as the rest.

    They are if they have the planned kind of step, no more often: each row draws its pair independently, whichever
    branch it belongs to. For Gaussian mechanisms they are if mu is at most that of the plan: whatever their queries,
    their rows are increments of the one Brownian motion that the plan uncovers.
    """
    if event.adjacency != planned.adjacency:
        return False
    if isinstance(event, PrivateSelection):  # one release, of the winner
        return event == planned
    if type(event) is type(planned) and "steps" in {item.name for item in fields(planned)}:
        steps: int = event.steps  # type: ignore[attr-defined]
        if steps <= planned.steps and replace(planned, steps=steps) == event:  # type: ignore[attr-defined, call-arg]
            return True
    whole, part = phases(planned), phases(event)
    if whole is None or part is None or whole.steps or part.steps:
        return False
    return part.mu <= whole.mu


def choose(first: tuple[str, Event], others: Iterable[tuple[str, Event]], budget: tuple[float, float]) -> list[str]:
    """Return which runs are fixed beforehand: the first, and of the others as many as the budget affords; see above."""
    if not affords(budget, first[1]):
        return []
    runs, plans = [first[0]], [first[1]]
    for run_id, plan in others:
        if affords(budget, Composed((*plans, plan))):
            runs.append(run_id)
            plans.append(plan)
    return runs


FORMAT = 1


@dataclass
class Run:
    """A run according to the entries; see `dpcore.ledger.checks.RunRecord`."""

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
    early: bool  # begun before anything was reserved by anybody and not given back
    steps: int
    branches: dict[str, Branch]
    releases: int = 0
    mark: int = 0  # of the branch that `event` was written for
    numbers: set[int] = field(default_factory=set)  # of the forks

    @property
    def plan(self) -> Event:
        """The event of all of it, as it was planned."""
        return Event.from_dict(self.planned)

    def settled(self, branch_id: str) -> int:
        """Return the rows of a branch that stay released: checkpoints from which others continued came after them."""
        branch = self.branches[branch_id]
        firsts = [child.first for child in self.branches.values() if child.parent == branch_id]
        return max((first for first in firsts if first <= branch.mark), default=branch.first)

    def abandoned(self, branch_id: str) -> tuple[Rows, ...]:
        """Return the rows that do not lead to a branch."""
        return Branches(branch_id, self.branches).abandoned


@dataclass
class State:
    """A ledger according to its entries."""

    header: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    key_digests: dict[str, tuple[str, str]] = field(default_factory=dict)  # to the run and branch that use the key
    fixed: Fixed | None = None  # None until the first row is reserved
    winners: dict[str, str] = field(default_factory=dict)  # of selections, by their ids: digests
    entries: int = 0
    file_systems: tuple[str, ...] = ()  # that the owner accepted, of those that are not known to be safe

    @property
    def order(self) -> float | None:
        """The filter's order; None as long as it is not fixed."""
        return self.header["order"] if self.fixed is None else self.fixed.order

    @property
    def limit(self) -> float | None:
        """Limit of the filter's sum; None without a budget, or as long as it is not fixed."""
        return self.header["limit"] if self.fixed is None else self.fixed.limit

    def in_plan(self, run: Run, mark: int, releases: int, event: Event) -> bool:
        """Whether a fixed run with `releases` rows, a branch up to `mark` and abandoned ones, is a part of its plan."""
        if self.fixed is None or run.run_id not in self.fixed.runs:
            return False
        return releases == mark <= run.planned_steps or within(run.plan, event)

    def apply(self, content: Mapping[str, Any]) -> None:
        """Take an entry into account, or raise `ValueError` if it does not follow from the entries before it."""
        kind = content.get("kind")
        handler = _HANDLERS.get(str(kind))
        if content.get("entry") != self.entries:
            raise ValueError(f"has number {content.get('entry')!r} instead of {self.entries}")
        if handler is None or (kind == "create") != (self.entries == 0):
            raise ValueError(f"is of the kind {kind!r}, which cannot be there")
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


def _unfix(state: State, _content: Mapping[str, Any]) -> None:
    if state.fixed is None or any(run.releases for run in state.runs.values()):
        raise ValueError("takes back what was fixed beforehand after rows were released")
    state.fixed = None
    for run in state.runs.values():
        run.early = True


def _reserve(state: State, content: Mapping[str, Any]) -> None:
    run, branch = state.branch(content)
    moved = content["mark"] - branch.mark
    if moved < 0 and content["kind"] != "close":
        raise ValueError("takes reserved rows back")
    if moved > 0 and content["kind"] == "close":
        raise ValueError("reserves rows at a close")
    if moved < 0 and content["mark"] < run.settled(content["branch"]):
        raise ValueError("takes back rows that another branch continued from")
    if content["mark"] < branch.first or content["releases"] != run.releases + moved:
        raise ValueError(f"counts {content['releases']} releases instead of {run.releases + moved}")
    if state.fixed is None:
        raise ValueError("reserves rows before an entry fixes runs beforehand")
    run.event, run.charge = content["event"], number_in(content["charge"])
    run.mark, run.releases = content["mark"], content["releases"]
    run.branches[content["branch"]] = branch._replace(mark=run.mark)


def _winner(state: State, content: Mapping[str, Any]) -> None:
    selection, winner = str(content["selection"]), str(content["winner"])
    if state.winners.setdefault(selection, winner) != winner:
        raise ValueError(f"gives the selection {selection} a second winner")


def _settings(state: State, content: Mapping[str, Any]) -> None:
    state.branch(content)  # written until 0.1: which settings a row had, by which it could be released once more


_HANDLERS: dict[str, Callable[[State, Mapping[str, Any]], None]] = {
    "create": _create, "place": _place, "begin": _begin, "key": _key, "resume": _resume, "fork": _fork, "fix": _fix,
    "unfix": _unfix, "reserve": _reserve, "close": _reserve, "winner": _winner, "settings": _settings,
}  # fmt: skip
