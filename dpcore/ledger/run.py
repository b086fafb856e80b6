"""A run's handle on its ledger: what reserves rows before they leave, and gives back those that never did."""

from __future__ import annotations

import os

from dpcore.accounting.branches import Branch
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.ledger.allowance import Allowance, after
from dpcore.ledger.blocks import Blocks
from dpcore.ledger.checks import EventAfter
from dpcore.ledger.state import Run
from dpcore.spec import validate


class LedgerRun:
    """One branch of a run, held by this process; made by `Ledger.begin` and `Ledger.resume`.

    Not to be shared with a forked child. `Ledger.resume` asks a checkpoint for its `run_id` and `branch_id`.
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
        """All branches of this run, as of the last time that the file was read."""
        return self._book.known(self.run_id, self.branch_id)[0].branches.copy()

    def reserve(self, row: int) -> None:
        """Return once row `row` may be released: it, and some rows after it, are then on disk as released.

        Rows are asked for in ascending order.

        Raises
        ------
        BudgetError
            If the budget does not allow this row. Nothing was reserved.
        PrivacyError
            If the row lies behind the planned steps, or this process is a fork of the one that made the branch.
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
            draft.held(self.run_id, self.branch_id, self._token)
            if key_digest and self._book.state.key_digests.get(key_digest) != (self.run_id, self.branch_id):
                self._allowance.check_key(key_digest)
                draft.append("key", run=self.run_id, branch=self.branch_id, key_digest=str(key_digest))

    def close(self, row: int) -> None:
        """Give back what was reserved and not released, and let go of the branch.

        Doing it again changes nothing, and reserving once more takes the branch back.

        Parameters
        ----------
        row : int
            How many rows of this branch were released, those of its parents included: at least those asked for.
        """
        if os.getpid() != self._process or self._closed:
            return
        row = validate.integer(row=row, minimum=0)
        if row < self._row:
            raise ArgumentError(f"row={row!r}: must be at least {self._row}, the last row that was asked for")
        self._mark = min(self._mark, row)  # first: an interruption after the commit must not leave the rows granted
        self._mark = self._give_back(row)
        self._closed = True

    def _reserve(self, row: int, size: int) -> int:
        """Reserve rows up to about `row` + `size`, at least `row` itself, and return the new mark."""
        with self._book.writing() as draft:
            run, branch = draft.held(self.run_id, self.branch_id, self._token)
            if row >= run.steps:
                raise PrivacyError(f"row={row}: the run was planned for {run.steps} rows, and its guarantee ends there")
            if row < branch.mark:  # an interruption came after the commit and before the holder knew of it
                return branch.mark
            if self._book.state.fixed is None:
                self._allowance.fix(draft, run, alone=row > 0)
            mark, most = row, max(row + 1, min(row + size, run.steps))
            trial, granted = most, None
            while mark < most:  # look for the largest mark that the budget allows
                found = after(run, self.branch_id, trial, self._event_after)
                if self._allowance.allows(draft, run, trial, *found):
                    mark, granted = trial, found
                else:
                    most = trial - 1
                trial = (mark + most + 1) // 2
            if granted is None:
                raise self._allowance.refusal(run, row + 1, run.releases + row + 1 - branch.mark)
            self._allowance.append(draft, run, self.branch_id, mark, *granted)
        return mark

    def _give_back(self, mark: int) -> int:
        """Give back the rows from `mark` on, let go of the branch, and return its mark."""
        with self._book.writing() as draft:
            run, branch = draft.held(self.run_id, self.branch_id, self._token)
            if mark < branch.mark:
                found = after(run, self.branch_id, mark, self._event_after)
                self._allowance.append(draft, run, self.branch_id, mark, *found, kind="close")
            draft.release(self.branch_id)
        return min(mark, branch.mark)

    def _demand_holder(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                f"run {self.run_id}: belongs to process {self._process}, and this is a fork of it, {os.getpid()}; two "
                "processes must not use one run's noise: resume it from a checkpoint here"
            )
