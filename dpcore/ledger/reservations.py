"""The requests of runs to a ledger: rows and forks, each in one transaction, within one budget."""

from __future__ import annotations

import secrets
from typing import Protocol

from dpcore.accounting import Adjacency, Composed, Event, smallest_epsilon
from dpcore.errors import BudgetError, PrivacyError
from dpcore.ledger.book import Book, Draft
from dpcore.ledger.entries import number_out
from dpcore.ledger.event_after import EventAfter, event_of
from dpcore.ledger.fixed import affords, choose
from dpcore.ledger.privacy_filter import PrivacyFilter, add, order_for
from dpcore.ledger.state import Branch, Run


class Holder(Protocol):
    """Who asks: a `LedgerRun`."""

    run_id: str
    branch_id: str
    token: str
    event_after: EventAfter


class Reservations:
    """What a ledger grants to its runs. Its `budget` is (epsilon, delta)."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._kind, budget = book.state.header["composition"], book.state.header["budget"]
        self.budget = None if budget is None else (float(budget[0]), float(budget[1]))
        self._unplanned = PrivacyFilter.of(self._kind, None, self.budget)
        self._plans: dict[str, float] = {}

    @property
    def filter(self) -> PrivacyFilter:
        """How runs add up; one for the budget alone as long as the order is not fixed."""
        order = self._book.state.order
        return self._unplanned if order is None else PrivacyFilter(self._kind, order)

    @property
    def limit(self) -> float | None:
        """Of the filter's sum; None without a budget."""
        if self.budget is None:
            return None
        limit = self._book.state.limit
        return self.filter.limit(*self.budget) if limit is None else limit

    @property
    def spent(self) -> float:
        """The filter's sum, as of the last time that the file was read."""
        return add(run.charge for run in self._book.state.runs.values())

    def known(self, run_id: str, branch_id: str) -> tuple[Run, Branch]:
        """Return a run and one of its branches, as of the last time that the file was read."""
        return self._book.known(run_id, branch_id)

    def reserve(self, held: Holder, row: int, size: int) -> int:
        """Reserve rows up to about `row` + `size`, at least `row` itself, and return the new mark."""
        with self._book.writing() as draft:
            run, branch = draft.held(held.run_id, held.branch_id, held.token)
            if row >= run.steps:
                raise PrivacyError(f"row={row}: the run was planned for {run.steps} rows, and its guarantee ends there")
            if row < branch.mark:  # an interruption came after the commit and before the holder knew of it
                return branch.mark
            if self._book.state.fixed is None:
                self.fix(draft, run, alone=row > 0)
            most = max(row + 1, min(row + size, run.steps))
            if self._fits(draft, run, held.event_after, branch, most):
                mark = most
            else:
                self.demand_room(draft, run, held.event_after, branch, row + 1)
                mark, beyond = row + 1, most
                while beyond - mark > 1:
                    middle = (mark + beyond) // 2
                    if self._fits(draft, run, held.event_after, branch, middle):
                        mark = middle
                    else:
                        beyond = middle
            self.append_reservation(draft, run, branch, mark, held.event_after)
        return mark

    def fix(self, draft: Draft, first: Run, *, alone: bool = False) -> None:
        """Write which runs are fixed beforehand, and the order: nothing has been reserved, and `first` asks to.

        With `alone`, rows of `first` left before this ledger knew of it. Its plan was fixed before them; whether those
        of the others were, nobody knows.
        """
        plan, runs = Event.from_dict(first.planned), []
        if self.budget is not None:
            known = [] if alone else self._book.state.runs.values()
            others = [run for run in known if run is not first and draft.alive(run)]
            runs = choose(
                (first.run_id, plan), [(run.run_id, Event.from_dict(run.planned)) for run in others], self.budget
            )
        self._write_fixed(draft, runs, plan)

    def _write_fixed(self, draft: Draft, runs: list[str], first: Event) -> None:
        known = self._book.state.runs
        plans = Composed(tuple(Event.from_dict(known[run_id].planned) for run_id in runs))
        order = self._book.state.order
        if order is None:
            order = order_for(plans if runs else first, self.budget)
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

    def _fits(self, draft: Draft, run: Run, event_after: EventAfter, branch: Branch, mark: int) -> bool:
        try:
            self.demand_room(draft, run, event_after, branch, mark)
        except BudgetError:
            return False
        return True

    def demand_room(
        self, draft: Draft, run: Run | None, event_after: EventAfter, branch: Branch | None, mark: int
    ) -> None:
        """Refuse what would cross the budget: a branch of a run with that mark; None is a run that begins."""
        state, limit = self._book.state, self.limit
        if limit is None:
            return
        if run is None or branch is None:
            in_plan, releases, event = False, mark, event_of(event_after, mark)
        else:
            releases, event = self._with(run, branch, mark, event_after)
            in_plan = state.in_plan(run, mark, releases, event)
        if state.fixed is not None and state.fixed.alone:
            if not in_plan:
                raise self._refusal(run, mark, releases)
            return
        charge = self.filter.charge(event)
        others = [
            other.charge if in_plan else self._held(draft, other) for other in state.runs.values() if other is not run
        ]
        if not add([*others, charge]) <= limit:
            raise self._refusal(run, mark, releases)

    def demand_room_to_begin(self, draft: Draft, planned: Event, event_after: EventAfter) -> None:
        """Refuse a run of which nothing can ever be reserved."""
        if self._book.state.fixed is not None:
            self.demand_room(draft, None, event_after, None, 1)
        elif self.budget is not None and not affords(self.budget, planned):
            order = self._book.state.order or order_for(planned, self.budget)
            chosen = PrivacyFilter(self._kind, order)
            if not chosen.charge(event_of(event_after, 1)) <= chosen.limit(*self.budget):
                raise self._refusal(None, 1, 1, planned)

    def counted(self, draft: Draft) -> float:
        """Return the filter's sum, with what is kept free for the plans that were fixed beforehand."""
        return add(self._held(draft, run) for run in self._book.state.runs.values())

    def _held(self, draft: Draft, run: Run) -> float:
        """Return a run's charge, or that of its plan if it is fixed and a living process may still come to the rest."""
        fixed = self._book.state.fixed
        if fixed is None or run.run_id not in fixed.runs or not draft.alive(run):
            return run.charge
        if run.run_id not in self._plans:
            self._plans[run.run_id] = self.filter.charge(Event.from_dict(run.planned))
        return max(run.charge, self._plans[run.run_id])

    def _refusal(self, run: Run | None, mark: int, releases: int, planned: Event | None = None) -> BudgetError:
        assert self.budget is not None
        epsilon, delta = self.budget
        fixed = self._book.state.fixed
        why = ""
        if fixed is not None and fixed.alone:
            if run is not None and run.run_id in fixed.runs:
                why = ": its rows up to there, and those of branches that it left, are more than the plan of the run"
                if releases == mark:
                    why = f": after step {run.planned_steps} they are not in the plan that was fixed beforehand"
            else:
                why = ": it is kept whole by the runs that were fixed before the first release"
            why += (
                f" (their plans cost epsilon={fixed.epsilon:.4g} by the tightest accountant, and more than the Renyi "
                "filter allows, without which nothing chosen later can be added)"
            )
        elif (run is None or run.early) and (fixed is None or run is None or run.run_id not in fixed.runs):
            planned = planned if run is None else Event.from_dict(run.planned)
            if planned is not None:
                whole = smallest_epsilon(planned, delta)[0]
                among = "" if whole > epsilon else ", and does not fit together with the others fixed beforehand"
                why = (
                    f": the whole plan costs epsilon={whole:.4g} of a budget of {epsilon:g}{among}, so that it was "
                    "held to the Renyi filter, step by step"
                )
        return BudgetError(
            f"row={mark - 1}: step {mark} would cross the budget of the ledger {self._book.path}, epsilon={epsilon:g} "
            f"at delta={delta:g} for all its runs; it was not reserved{why}"
        )

    def _with(self, run: Run, branch: Branch, mark: int, event_after: EventAfter) -> tuple[int, Event]:
        """Return how many rows a run releases once a branch has that mark, and the event of all of them."""
        return run.releases + mark - branch.mark, event_of(event_after, mark, run.abandoned(branch.branch_id))

    def append_reservation(
        self, draft: Draft, run: Run, branch: Branch, mark: int, event_after: EventAfter, kind: str = "reserve"
    ) -> None:
        """Write the new mark of a branch, and what all of the run's releases then come to."""
        if (
            self._book.state.fixed is None
        ):  # rows have left that this ledger did not know of: nothing is fixed beforehand
            self._write_fixed(draft, [], Event.from_dict(run.planned))
        releases, event = self._with(run, branch, mark, event_after)
        if event.adjacency is not None:
            self.check_adjacency(str(event.adjacency))
        draft.append(
            kind,
            run=run.run_id,
            branch=branch.branch_id,
            mark=mark,
            releases=releases,
            event=event.to_dict(),
            charge=number_out(self.filter.charge(event)),
        )

    def close(self, held: Holder, mark: int) -> int:
        """Give back the rows from `mark` on, let go of the branch, and return its mark."""
        with self._book.writing() as draft:
            run, branch = draft.held(held.run_id, held.branch_id, held.token)
            if mark < branch.mark:
                self.append_reservation(draft, run, branch, mark, held.event_after, "close")
            draft.release(branch.branch_id)
        return branch.mark

    def branch_off(self, draft: Draft, run: Run, parent: Branch, row: int) -> tuple[Branch, int]:
        """Write a fork, and return the new branch and its number."""
        # Random, not counted: an older copy of the ledger that is put back must not give out a number again.
        number = secrets.randbits(63)
        child = f"{run.run_id}.{len(run.branches)}"
        draft.append("fork", run=run.run_id, branch=parent.branch_id, child=child, row=row, number=number)
        return run.branches[child], number

    def use_key(self, held: Holder, key_digest: str) -> None:
        """Write the digest of a branch's key."""
        with self._book.writing() as draft:
            run, branch = draft.held(held.run_id, held.branch_id, held.token)
            if branch.key_digest == key_digest:
                return
            self.check_key(key_digest)
            draft.append("key", run=run.run_id, branch=branch.branch_id, key_digest=str(key_digest))

    def check_key(self, key_digest: str) -> None:
        """Refuse a key that a branch of this ledger has."""
        if key_digest and key_digest in self._book.state.key_digests:
            other = self._book.state.key_digests[key_digest]
            raise PrivacyError(
                f"key_digest: run {other} of this ledger has the same noise key, and two sums must not share noise; "
                "begin with another key"
            )

    def check_adjacency(self, kind: str | None) -> None:
        """Refuse replace-one beside any other."""
        kinds = {run.adjacency for run in self._book.state.runs.values()} | {kind}
        kinds -= {None}
        if Adjacency.REPLACE_ONE.value in kinds and len(kinds) > 1:
            raise PrivacyError(
                f"adjacency={kind!r}: the ledger holds runs under {', '.join(sorted(map(str, kinds - {kind})))}, and "
                "replace-one does not add up with any other; keep such runs in a ledger of their own"
            )
