"""The requests of runs to a ledger: runs, rows and forks, each in one transaction, within one budget."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from dpcore.accounting import Adjacency, Event
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.ledger.allowance import Allowance
from dpcore.ledger.book import Book, Draft
from dpcore.ledger.checks import EventAfter, check_plan, event_of
from dpcore.ledger.entries import number_out
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
