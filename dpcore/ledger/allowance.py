"""The budget of a ledger: what its runs use, and what it grants them."""

import math
import os
import time
from collections.abc import Callable

from dpcore.accounting import Adjacency, Composed, Event, smallest_epsilon
from dpcore.accounting.branches import Branch
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.ledger.book import Book, Draft
from dpcore.ledger.checks import EventAfter, event_of, outside_plans
from dpcore.ledger.privacy_filter import PrivacyFilter, add, order_for
from dpcore.ledger.state import Run, affords, choose, number_out
from dpcore.spec import validate

# The size of a block of reserved rows: small enough to lose, large enough that writing is cheap.


# A crash counts the rest of a block in vain: this share of the planned rows at most, or `_FEWEST` rows if that is more.
LARGEST_SHARE = 0.01
_FEWEST = 4

# Writes take at most this share of the time between two reservations, as far as the largest block allows.
SHARE = 0.01

# A block may be at most this many times the one before: the first ones are small, since nothing has been measured.
_GROWTH = 4


def largest(steps: int) -> int:
    """Return the rows of the largest block of a plan."""
    return max(_FEWEST, int(LARGEST_SHARE * steps))


class Blocks:
    """Measures the time of rows and durable writes by the clock, and gives the length of the next block."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._largest, self._clock = largest(steps), clock
        self._last: tuple[float, int] | None = None
        self._size, self._writing = 0, 0.0

    def next_size(self, row: int) -> int:
        """Return the size of the block that begins at `row`."""
        if self._last is None:
            self._size = 1
            return 1
        since, before = self._last
        rows = max(1, row - before)
        pace = max((self._clock() - since) / rows, 1e-9)
        wanted = math.ceil(self._writing / SHARE / pace)
        self._size = max(1, min(self._largest, _GROWTH * self._size, wanted))
        return self._size

    def wrote(self, row: int, seconds: float) -> None:
        """Note that a block was written at `row`, and how long that took."""
        self._last, self._writing = (self._clock(), row), seconds

    @property
    def now(self) -> float:
        """The clock's time in seconds."""
        return self._clock()


def after(run: Run, branch_id: str, mark: int, event_after: EventAfter) -> tuple[int, Event]:
    """Return how many rows a run releases once a branch has that mark, and the event of all of them."""
    releases = run.releases + mark - run.branches[branch_id].mark
    return releases, event_of(event_after, mark, run.abandoned(branch_id))


class Allowance:
    """The budget of a ledger, and what its runs use."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._kind, budget = book.state.header["composition"], book.state.header["budget"]
        self.budget = None if budget is None else (float(budget[0]), float(budget[1]))
        self._unplanned = PrivacyFilter.of(self._kind, None, self.budget)
        self._plans: dict[tuple[str, float | None], float] = {}

    @property
    def filter(self) -> PrivacyFilter:
        """How runs add up; while the order is not fixed, a filter for the budget alone."""
        order = self.book.state.order
        return self._unplanned if order is None else PrivacyFilter(self._kind, order)

    @property
    def limit(self) -> float | None:
        """Limit of the filter's sum; None without a budget."""
        if self.budget is None:
            return None
        limit = self.book.state.limit
        return self.filter.limit(*self.budget) if limit is None else limit

    @property
    def spent(self) -> float:
        """The filter's sum, as of the last time that the file was read."""
        return add(run.charge for run in self.book.state.runs.values())

    def counted(self, draft: Draft) -> float:
        """Return the filter's sum, including the part kept free for the plans that were fixed beforehand."""
        return add(self._counted(draft, run) for run in self.book.state.runs.values())

    def _counted(self, draft: Draft, run: Run) -> float:
        """Return a run's charge, or that of its plan if it is fixed and a living process may still come to the rest."""
        fixed = self.book.state.fixed
        if fixed is None or run.run_id not in fixed.runs or not draft.alive(run):
            return run.charge
        key = run.run_id, self.book.state.order
        if key not in self._plans:
            self._plans[key] = self.filter.charge(run.plan)
        return max(run.charge, self._plans[key])

    def fix(self, draft: Draft, first: Run, *, alone: bool = False) -> None:
        """Write which runs are fixed beforehand, and the order. Nothing is reserved yet; `first` is about to reserve.

        With `alone`, rows of `first` left before this ledger recorded the run. Its plan was fixed before them; for the
        plans of the others that is unknown.
        """
        plan, runs = first.plan, []
        if self.budget is not None:
            known = [] if alone else self.book.state.runs.values()
            others = [run for run in known if run is not first and draft.alive(run)]
            runs = choose((first.run_id, plan), [(run.run_id, run.plan) for run in others], self.budget)
        self.write_fixed(draft, runs, plan)

    def write_fixed(self, draft: Draft, runs: list[str], first: Event) -> None:
        """Write that these runs are fixed beforehand; `first` is the plan that chooses the order if there is none."""
        state = self.book.state
        plans = Composed(tuple(state.runs[run_id].plan for run_id in runs))
        order = order_for(plans if runs else first, self.budget) if state.order is None else state.order
        chosen = PrivacyFilter(self._kind, order)
        draft.append(
            "fix",
            runs=runs,
            event=plans.to_dict(),
            charge=number_out(chosen.charge(plans)),
            epsilon=smallest_epsilon(plans, self.budget[1])[0] if runs and self.budget is not None else 0.0,
            order=order,
            limit=None if self.budget is None else chosen.limit(*self.budget),
        )

    def append(
        self, draft: Draft, run: Run, branch_id: str, mark: int, releases: int, event: Event, kind: str = "reserve"
    ) -> None:
        """Write the new mark of a branch, and the event of all the run's releases then."""
        if self.book.state.fixed is None:  # rows left without this ledger's record: nothing is fixed
            self.write_fixed(draft, [], run.plan)
        if event.adjacency is not None:
            self.check_adjacency(str(event.adjacency))
        draft.append(
            kind,
            run=run.run_id,
            branch=branch_id,
            mark=mark,
            releases=releases,
            event=event.to_dict(),
            charge=number_out(self.filter.charge(event)),
        )

    def check_key(self, key_digest: str) -> None:
        """Refuse a key that a branch of this ledger has."""
        other = self.book.state.key_digests.get(key_digest)
        if other is not None:
            raise PrivacyError(
                f"key_digest: run {other[0]} of this ledger has the same noise key, and two sums must not share noise; "
                "begin with another key"
            )

    def check_adjacency(self, kind: str | None) -> None:
        """Refuse replace-one together with any other adjacency."""
        kinds = ({run.adjacency for run in self.book.state.runs.values()} | {kind}) - {None}
        if Adjacency.REPLACE_ONE.value in kinds and len(kinds) > 1:
            raise PrivacyError(
                f"adjacency={kind!r}: the ledger has runs under {', '.join(sorted(map(str, kinds - {kind})))}, and "
                "replace-one does not add up with any other; keep such runs in a ledger of their own"
            )

    def allows(self, draft: Draft, run: Run | None, mark: int, releases: int, event: Event) -> bool:
        """Whether a run, with a branch up to `mark`, may reach `releases` rows and this event; None is a new run."""
        state, limit = self.book.state, self.limit
        if limit is None:
            return True
        in_plan = run is not None and state.in_plan(run, mark, releases, event)
        if state.fixed is not None and state.fixed.alone:
            # Releases outside the plans, made without asking, are not in the budget that the plans keep whole.
            return in_plan and not outside_plans(state)
        runs = [other for other in state.runs.values() if other is not run]
        others = [other.charge if in_plan else self._counted(draft, other) for other in runs]
        return add([*others, self.filter.charge(event)]) <= limit

    def demand_room_to_begin(self, draft: Draft, planned: Event, event_after: EventAfter) -> None:
        """Refuse a run that can never reserve a row."""
        first = event_of(event_after, 1)
        if self.book.state.fixed is not None:
            if not self.allows(draft, None, 1, 1, first):
                raise self.refusal(None, 1, 1)
        elif self.budget is not None and not affords(self.budget, planned):
            chosen = PrivacyFilter(self._kind, self.book.state.order or order_for(planned, self.budget))
            if not chosen.charge(first) <= chosen.limit(*self.budget):
                raise self.refusal(None, 1, 1, planned)

    def refusal(self, run: Run | None, mark: int, releases: int, planned: Event | None = None) -> BudgetError:
        """Return the error for a row that does not fit, with the reason if there is more to say."""
        assert self.budget is not None
        epsilon, delta = self.budget
        fixed, why = self.book.state.fixed, ""
        is_fixed = fixed is not None and run is not None and run.run_id in fixed.runs
        if fixed is not None and fixed.alone:
            if not is_fixed or run is None:
                why = ": it is kept whole by the runs that were fixed before the first release"
            elif releases == mark:
                why = f": after step {run.planned_steps} they are not in the plan that was fixed beforehand"
            else:
                why = ": its rows up to there, and those of branches that it left, are more than the plan of the run"
            why += (
                f" (their plans cost epsilon={fixed.epsilon:.4g} by the tightest accountant, and more than the Renyi "
                "filter allows, without which nothing chosen later can be added)"
            )
        elif not is_fixed and (run is None or run.early):
            planned = planned if run is None else run.plan
            if planned is not None:
                whole = smallest_epsilon(planned, delta)[0]
                among = "" if whole > epsilon else ", and does not fit together with the others fixed beforehand"
                why = (
                    f": the whole plan costs epsilon={whole:.4g} of a budget of {epsilon:g}{among}, so that it was "
                    "bound by the Renyi filter, step by step"
                )
        return BudgetError(
            f"row={mark - 1}: step {mark} would cross the budget of the ledger {self.book.path}, epsilon={epsilon:g} "
            f"at delta={delta:g} for all its runs; it was not reserved{why}"
        )


# A run's handle on its ledger. It reserves rows before they leave, and gives back those that never did.


class LedgerRun:
    """One branch of a run, leased by this process; made by `Ledger.begin` and `Ledger.resume`.

    It must not be shared with a forked child. `Ledger.resume` needs the `run_id` and `branch_id` of a checkpoint.
    """

    def __init__(self, allowance: Allowance, run: Run, branch_id: str, token: str, event_after: EventAfter) -> None:
        self.run_id, self.branch_id = run.run_id, branch_id
        self._token, self._event_after = token, event_after
        self._allowance, self._book = allowance, allowance.book
        self._process = os.getpid()
        self._mark = self._row = run.branches[branch_id].mark
        self._closed = False
        self._blocks = Blocks(run.steps)

    def __repr__(self) -> str:
        return f"LedgerRun(run_id={self.run_id!r}, branch_id={self.branch_id!r}, mark={self._mark})"

    @property
    def mark(self) -> int:
        """Rows below it may have left the process, or still may without another reservation."""
        return self._mark

    @property
    def releases(self) -> int:
        """All rows ever reserved in this run and not given back, over all branches."""
        return self._book.known(self.run_id, self.branch_id)[0].releases

    @property
    def tree(self) -> dict[str, Branch]:
        """All branches of this run, those of other processes included."""
        with self._book.reading():
            return self._book.known(self.run_id, self.branch_id)[0].branches.copy()

    def reserve(self, row: int) -> None:
        """Return once row `row` may be released: it, and some rows after it, are then on disk as released.

        Rows must be reserved in ascending order.

        Raises
        ------
        BudgetError
            If the budget does not allow this row. Nothing was reserved.
        PrivacyError
            If the row is beyond the planned steps, or this process is a fork of the one that made the branch.
        DataError
            If the ledger cannot be written. The row must not be released then.
        """
        self._demand_holder()
        row = validate.integer(row=row, minimum=0)
        if row >= self._mark:
            start = self._blocks.now
            self._mark = self._reserve(row, self._blocks.next_size(row))
            self._blocks.wrote(row, self._blocks.now - start)
            self._closed = False
        self._row = max(self._row, row)

    def use_key(self, key_digest: str) -> None:
        """Write down the digest of this branch's noise key, once it is derived.

        Raises
        ------
        PrivacyError
            If another branch of the ledger has the same key: its rows of noise would be added to other sums.
        """
        self._demand_holder()
        with self._book.writing() as draft:
            draft.leased(self.run_id, self.branch_id, self._token)
            if key_digest and self._book.state.key_digests.get(key_digest) != (self.run_id, self.branch_id):
                self._allowance.check_key(key_digest)
                draft.append("key", run=self.run_id, branch=self.branch_id, key_digest=str(key_digest))

    def close(self, row: int) -> None:
        """Give back rows that were reserved and not released, and end the lease of the branch.

        A second call changes nothing, and another reservation takes the branch back. Rows up to a checkpoint that
        another branch continued from stay reserved.

        Parameters
        ----------
        row : int
            Number of released rows of this branch, those of its parents included: at least those given to `reserve`.
        """
        if os.getpid() != self._process or self._closed:
            return
        row = validate.integer(row=row, minimum=0)
        if row < self._row:
            raise ArgumentError(f"row={row!r}: must be at least {self._row}, the last row that was reserved")
        self._mark = min(self._mark, row)  # first: an interruption after the commit must not leave the rows granted
        self._mark = self._give_back(row)
        self._closed = True

    def _reserve(self, row: int, size: int) -> int:
        """Reserve rows up to about `row` + `size`, at least `row` itself, and return the new mark."""
        with self._book.writing() as draft:
            run, branch = draft.leased(self.run_id, self.branch_id, self._token)
            if row >= run.steps:
                raise PrivacyError(f"row={row}: the run was planned for {run.steps} rows, and its guarantee ends there")
            if row < branch.mark:  # an interruption came after the commit and before the holder knew of it
                return branch.mark
            if self._book.state.fixed is None:
                self._allowance.fix(draft, run, alone=row > 0)
            mark, most = row, max(row + 1, min(row + size, run.steps))
            trial, granted = most, None
            while mark < most:  # look for the largest mark that the budget allows
                outcome = after(run, self.branch_id, trial, self._event_after)
                if self._allowance.allows(draft, run, trial, *outcome):
                    mark, granted = trial, outcome
                else:
                    most = trial - 1
                trial = (mark + most + 1) // 2
            if granted is None:
                raise self._allowance.refusal(run, row + 1, run.releases + row + 1 - branch.mark)
            self._allowance.append(draft, run, self.branch_id, mark, *granted)
        return mark

    def _give_back(self, mark: int) -> int:
        """Give back the rows from `mark` on, end the lease of the branch, and return its mark."""
        with self._book.writing() as draft:
            run, branch = draft.leased(self.run_id, self.branch_id, self._token)
            mark = max(mark, run.settled(self.branch_id))
            if mark < branch.mark:
                outcome = after(run, self.branch_id, mark, self._event_after)
                self._allowance.append(draft, run, self.branch_id, mark, *outcome, kind="close")
                if not any(other.releases for other in self._book.state.runs.values()):
                    draft.append("unfix")  # no row has left: dpcore.ledger.state
            draft.release(self.branch_id)
        return min(mark, branch.mark)

    def _demand_holder(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                f"run {self.run_id}: belongs to process {self._process}, and this is a fork of it, {os.getpid()}; two "
                "processes must not use one run's noise: resume it from a checkpoint here"
            )
