"""The requests of runs to a ledger: runs, rows and forks, each in one transaction, within one budget."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from dpcore.accounting import Adjacency, Composed, Event, smallest_epsilon
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.ledger.book import Book, Draft
from dpcore.ledger.checks import EventAfter, beside, check_plan, event_of
from dpcore.ledger.entries import number_out
from dpcore.ledger.fixed import affords, choose
from dpcore.ledger.privacy_filter import PrivacyFilter, add, order_for
from dpcore.ledger.state import Run
from dpcore.spec import validate
from dpcore.spec.version import __version__

if TYPE_CHECKING:
    from dpcore.ledger.run import LedgerRun


Leased = tuple[Run, str, str]
"""A run, the id of its branch, and the token of the lease that this process has on it."""


class Reservations:
    """What a ledger grants to its runs."""

    def __init__(self, book: Book) -> None:
        self.book, self.allowance = book, Allowance(book)

    def begin(
        self,
        adjacency: str | None,
        steps: int,
        event_after: EventAfter,
        key_digest: str,
        left: bool,
        released: bool = False,
        **told: Any,
    ) -> Leased:
        """Write down a new run; see `dpcore.ledger.Ledger.begin`.

        With `released` all of it left already: it is written down in the same transaction, whatever the budget says.
        Refusing it would not take it back, and the ledger would go on granting what is spent. It is the entry that
        `resume` writes where an older copy of the ledger was put back, which every reader knows: charges beyond the
        limit leave nothing (`Allowance.allows`), and the total then states the odometer, which holds for releases that
        nobody decided on (`dpcore.ledger.privacy_filter`).
        """
        steps = validate.integer(steps=steps, minimum=1)
        kind = None if adjacency is None else str(validate.choice([str(one) for one in Adjacency], adjacency=adjacency))
        planned, nothing = event_of(event_after, steps), event_of(event_after, 0)
        if planned.adjacency is not None and planned.adjacency != kind:
            raise ArgumentError(f"adjacency={kind!r}: the planned event is described under {str(planned.adjacency)!r}")
        self.allowance.filter.charge(planned)  # refuses what it does not cover, before anything is written
        with self.book.writing() as draft:
            self._check_adjacency(kind)
            self._check_key(key_digest)
            if not released:
                self.allowance.demand_room_to_begin(draft, planned, event_after)
            run_id = f"{self.book.ledger_id[:8]}-{secrets.token_hex(6)}"
            branch_id = f"{run_id}.0"
            draft.append(
                "begin",
                run=run_id,
                branch=branch_id,
                adjacency=kind,
                steps=steps,
                planned=planned.to_dict(),
                event=nothing.to_dict(),
                charge=number_out(self.allowance.filter.charge(nothing)),
                key_digest=str(key_digest),
                software=__version__,
                **told,
            )
            token = draft.lease(branch_id)
            run, _ = self.book.known(run_id, branch_id)
            if (left or released) and self.book.state.fixed is None:
                self.allowance.fix(draft, run, alone=True)
            if released:
                self._append(draft, run, branch_id, steps, *_after(run, branch_id, steps, event_after))
                draft.release(branch_id)
        return run, branch_id, token

    def resume(
        self, run_id: str, branch_id: str, row: int, event_after: EventAfter, steps: int | None
    ) -> tuple[Leased, int]:
        """Write a fork, and return the new branch and its number; see `dpcore.ledger.Ledger.resume`."""
        row = validate.integer(row=row, minimum=0)
        with self.book.writing() as draft:
            run, parent = self.book.known(run_id, branch_id)
            if row < parent.first:
                raise ArgumentError(f"row={row!r}: the branch {branch_id} begins at row {parent.first}")
            steps = run.steps if steps is None else validate.integer(steps=steps, minimum=run.steps)
            check_plan(run, event_after)
            if row > parent.mark:
                # An older copy of the ledger was put back: these rows have left, whatever the budget says.
                self._append(draft, run, branch_id, row, *_after(run, branch_id, row, event_after))
            # Random, not counted: an older copy of the ledger that is put back must not give out a number again.
            number, child = secrets.randbits(63), f"{run_id}.{len(run.branches)}"
            draft.append("fork", run=run_id, branch=branch_id, child=child, row=row, number=number)
            draft.append("resume", run=run_id, branch=child, row=row, steps=steps)
            token = draft.lease(child)
        return (run, child, token), number

    def reserve(self, held: LedgerRun, row: int, size: int) -> int:
        """Reserve rows up to about `row` + `size`, at least `row` itself, and return the new mark."""
        with self.book.writing() as draft:
            run, branch = draft.held(held.run_id, held.branch_id, held.token)
            if row >= run.steps:
                raise PrivacyError(f"row={row}: the run was planned for {run.steps} rows, and its guarantee ends there")
            if row < branch.mark:  # an interruption came after the commit and before the holder knew of it
                return branch.mark
            if self.book.state.fixed is None:
                self.allowance.fix(draft, run, alone=row > 0)
            mark, most = row, max(row + 1, min(row + size, run.steps))
            trial, granted = most, None
            while mark < most:  # look for the largest mark that the budget allows
                after = _after(run, held.branch_id, trial, held.event_after)
                if self.allowance.allows(draft, run, trial, *after):
                    mark, granted = trial, after
                else:
                    most = trial - 1
                trial = (mark + most + 1) // 2
            if granted is None:
                raise self.allowance.refusal(run, row + 1, run.releases + row + 1 - branch.mark)
            self._append(draft, run, held.branch_id, mark, *granted)
        return mark

    def close(self, held: LedgerRun, mark: int) -> int:
        """Give back the rows from `mark` on, let go of the branch, and return its mark."""
        with self.book.writing() as draft:
            run, branch = draft.held(held.run_id, held.branch_id, held.token)
            if mark < branch.mark:
                after = _after(run, held.branch_id, mark, held.event_after)
                self._append(draft, run, held.branch_id, mark, *after, kind="close")
            draft.release(held.branch_id)
        return min(mark, branch.mark)

    def use_key(self, held: LedgerRun, key_digest: str) -> None:
        """Write the digest of a branch's key."""
        with self.book.writing() as draft:
            draft.held(held.run_id, held.branch_id, held.token)
            if key_digest and self.book.state.key_digests.get(key_digest) != (held.run_id, held.branch_id):
                self._check_key(key_digest)
                draft.append("key", run=held.run_id, branch=held.branch_id, key_digest=str(key_digest))

    def _append(
        self, draft: Draft, run: Run, branch_id: str, mark: int, releases: int, event: Event, kind: str = "reserve"
    ) -> None:
        """Write the new mark of a branch, and what all of the run's releases then come to."""
        if self.book.state.fixed is None:  # rows have left that this ledger did not know of: nothing is fixed
            self.allowance.write_fixed(draft, [], run.plan)
        if event.adjacency is not None:
            self._check_adjacency(str(event.adjacency))
        draft.append(
            kind,
            run=run.run_id,
            branch=branch_id,
            mark=mark,
            releases=releases,
            event=event.to_dict(),
            charge=number_out(self.allowance.filter.charge(event)),
        )

    def _check_key(self, key_digest: str) -> None:
        """Refuse a key that a branch of this ledger has."""
        other = self.book.state.key_digests.get(key_digest)
        if other is not None:
            raise PrivacyError(
                f"key_digest: run {other[0]} of this ledger has the same noise key, and two sums must not share noise; "
                "begin with another key"
            )

    def _check_adjacency(self, kind: str | None) -> None:
        """Refuse replace-one beside any other."""
        kinds = ({run.adjacency for run in self.book.state.runs.values()} | {kind}) - {None}
        if Adjacency.REPLACE_ONE.value in kinds and len(kinds) > 1:
            raise PrivacyError(
                f"adjacency={kind!r}: the ledger holds runs under {', '.join(sorted(map(str, kinds - {kind})))}, and "
                "replace-one does not add up with any other; keep such runs in a ledger of their own"
            )


def _after(run: Run, branch_id: str, mark: int, event_after: EventAfter) -> tuple[int, Event]:
    """Return how many rows a run releases once a branch has that mark, and the event of all of them."""
    releases = run.releases + mark - run.branches[branch_id].mark
    return releases, event_of(event_after, mark, run.abandoned(branch_id))


class Allowance:
    """The budget of a ledger, and what its runs take of it."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._kind, budget = book.state.header["composition"], book.state.header["budget"]
        self.budget = None if budget is None else (float(budget[0]), float(budget[1]))
        self._unplanned = PrivacyFilter.of(self._kind, None, self.budget)
        self._plans: dict[str, float] = {}

    @property
    def filter(self) -> PrivacyFilter:
        """How runs add up; one for the budget alone as long as the order is not fixed."""
        order = self.book.state.order
        return self._unplanned if order is None else PrivacyFilter(self._kind, order)

    @property
    def limit(self) -> float | None:
        """Of the filter's sum; None without a budget."""
        if self.budget is None:
            return None
        limit = self.book.state.limit
        return self.filter.limit(*self.budget) if limit is None else limit

    @property
    def spent(self) -> float:
        """The filter's sum, as of the last time that the file was read."""
        return add(run.charge for run in self.book.state.runs.values())

    def counted(self, draft: Draft) -> float:
        """Return the filter's sum, with what is kept free for the plans that were fixed beforehand."""
        return add(self._held(draft, run) for run in self.book.state.runs.values())

    def _held(self, draft: Draft, run: Run) -> float:
        """Return a run's charge, or that of its plan if it is fixed and a living process may still come to the rest."""
        fixed = self.book.state.fixed
        if fixed is None or run.run_id not in fixed.runs or not draft.alive(run):
            return run.charge
        if run.run_id not in self._plans:
            self._plans[run.run_id] = self.filter.charge(run.plan)
        return max(run.charge, self._plans[run.run_id])

    def fix(self, draft: Draft, first: Run, *, alone: bool = False) -> None:
        """Write which runs are fixed beforehand, and the order: nothing has been reserved, and `first` asks to.

        With `alone`, rows of `first` left before this ledger knew of it. Its plan was fixed before them; whether those
        of the others were, nobody knows.
        """
        plan, runs = first.plan, []
        if self.budget is not None:
            known = [] if alone else self.book.state.runs.values()
            others = [run for run in known if run is not first and draft.alive(run)]
            runs = choose((first.run_id, plan), [(run.run_id, run.plan) for run in others], self.budget)
        self.write_fixed(draft, runs, plan)

    def write_fixed(self, draft: Draft, runs: list[str], first: Event) -> None:
        """Write that these runs are fixed beforehand; `first` is the plan that chooses the order where none is."""
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

    def allows(self, draft: Draft, run: Run | None, mark: int, releases: int, event: Event) -> bool:
        """Whether a run, with a branch up to `mark`, may come to so many rows and this event; None is one to begin."""
        state, limit = self.book.state, self.limit
        if limit is None:
            return True
        in_plan = run is not None and state.in_plan(run, mark, releases, event)
        if state.fixed is not None and state.fixed.alone:
            # What came beside the plans, without being asked, is not in the budget that they keep whole.
            return in_plan and not beside(state)
        runs = [other for other in state.runs.values() if other is not run]
        others = [other.charge if in_plan else self._held(draft, other) for other in runs]
        return add([*others, self.filter.charge(event)]) <= limit

    def demand_room_to_begin(self, draft: Draft, planned: Event, event_after: EventAfter) -> None:
        """Refuse a run of which nothing can ever be reserved."""
        first = event_of(event_after, 1)
        if self.book.state.fixed is not None:
            if not self.allows(draft, None, 1, 1, first):
                raise self.refusal(None, 1, 1)
        elif self.budget is not None and not affords(self.budget, planned):
            chosen = PrivacyFilter(self._kind, self.book.state.order or order_for(planned, self.budget))
            if not chosen.charge(first) <= chosen.limit(*self.budget):
                raise self.refusal(None, 1, 1, planned)

    def refusal(self, run: Run | None, mark: int, releases: int, planned: Event | None = None) -> BudgetError:
        """Return the error for a row that does not fit, with the reason where there is more to say."""
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
                    "held to the Renyi filter, step by step"
                )
        return BudgetError(
            f"row={mark - 1}: step {mark} would cross the budget of the ledger {self.book.path}, epsilon={epsilon:g} "
            f"at delta={delta:g} for all its runs; it was not reserved{why}"
        )
