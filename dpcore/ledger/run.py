"""A run's handle on its ledger: what reserves rows before they leave, and gives back those that never did."""

from __future__ import annotations

import os

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.ledger.blocks import Blocks
from dpcore.ledger.event_after import EventAfter
from dpcore.ledger.reservations import Reservations
from dpcore.ledger.state import Branch, Run
from dpcore.spec import validate

# (ledger, branch) -> token of the one object of this process that may reserve on it: the one made last.
_holders: dict[tuple[str, str], str] = {}


class LedgerRun:
    """One branch of a run, held by this process; made by `Ledger.begin` and `Ledger.resume`.

    Not to be shared with a forked child, and of no use once the same branch was resumed by another object.

    Parameters
    ----------
    reservations : Reservations
        The ledger's.
    run : Run
    branch : Branch
    token : str
        Of its lease.
    event_after : callable
        The plan's: what `steps` rows of this branch and `abandoned` others release.
    row : int
        The first row that is to come.
    replay_until : int
        Rows below it may have left before this object was made.

    Attributes
    ----------
    run_id, branch_id : str
        For the checkpoint: `Ledger.resume` asks for them.
    replay_until : int
    token : str
    event_after : callable
    """

    def __init__(
        self,
        reservations: Reservations,
        run: Run,
        branch: Branch,
        token: str,
        event_after: EventAfter,
        row: int,
        replay_until: int,
    ) -> None:
        self.run_id, self.branch_id, self.replay_until = run.run_id, branch.branch_id, replay_until
        self.token, self.event_after = token, event_after
        self._rows = reservations
        self._process = os.getpid()
        self._mark, self._row, self._floor = branch.mark, row, branch.mark
        self._closed = False
        self._blocks = Blocks(run.steps)
        _holders[reservations.ledger_id, self.branch_id] = token

    def __repr__(self) -> str:
        return f"LedgerRun(run_id={self.run_id!r}, branch_id={self.branch_id!r}, mark={self._mark})"

    @property
    def mark(self) -> int:
        """Rows below it may have left the process, or still may without another reservation."""
        return self._mark

    @property
    def releases(self) -> int:
        """All rows ever reserved in this run and not given back, over all branches."""
        return self._rows.known(self.run_id, self.branch_id)[0].releases

    @property
    def forks(self) -> int:
        """How often this run was forked."""
        return self._rows.known(self.run_id, self.branch_id)[0].forks

    def reserve(self, row: int) -> None:
        """Return once row `row` may be released: it, and some rows after it, are then on disk as released.

        Parameters
        ----------
        row : int
            Of this branch; rows are asked for in ascending order.

        Raises
        ------
        BudgetError
            If the budget does not allow this row. Nothing was reserved.
        PrivacyError
            If the row lies behind the planned steps, the branch was resumed elsewhere, or this process is a fork of the
            one that held it.
        DataError
            If the ledger cannot be written. The row must not be released then.
        """
        self._demand_holder()
        row = validate.integer(row=row, minimum=0)
        if row >= self._mark:
            start = self._blocks.now
            self._mark = self._rows.reserve(self, row, self._blocks.next_size(row))
            self._blocks.wrote(row, self._blocks.now - start)
            self._closed = False
        self._row = max(self._row, row)

    def settings(self, row: int, digest: str) -> None:
        """Write down, before row `row` is released, what settings it moves the parameters by; durable on return.

        To be called before every release. Nothing is written where it is known already: at first for this row alone,
        and for as many more each time as the settings have stayed the same, so that a schedule which changes them at
        every row is told from rows that were never released.

        Parameters
        ----------
        row : int
        digest : str

        Raises
        ------
        PrivacyError
            If the row may have been released with other settings before: the next row would be another sum with the
            same noise. `fork` from the next row on.
        """
        self._demand_holder()
        row = validate.integer(row=row, minimum=0)
        known = self.settings_at(row)
        if known == digest:
            return
        if known is not None and row < self.replay_until:
            raise PrivacyError(
                f"row={row}: may have been released with other settings before, so that what follows is no replay; "
                f"fork from row {row + 1} on"
            )
        start = self._blocks.now
        self._rows.log_settings(self, row, digest)
        self._blocks.wrote_more(self._blocks.now - start)

    def settings_at(self, row: int) -> str | None:
        """Return the digest in force at row `row`; None if unknown: then it was never about to be released."""
        return self._rows.known(self.run_id, self.branch_id)[1].settings_at(row)

    def fork(self, row: int, *, digest: str) -> tuple[LedgerRun, int]:
        """Leave this branch: from `row` on go on under other keys, and be charged for what was left.

        If the batch of a row is drawn already, fork from the next one: one batch under two noises is no two samples.

        Parameters
        ----------
        row : int
            The first row of the new branch.
        digest : str
            Of what shapes its sums.

        Returns
        -------
        tuple of LedgerRun and int
            The new branch, and its number, which is on disk already. This object is of no more use.
        """
        self._demand_holder()
        row = validate.integer(row=row, minimum=0)
        branch, token, number = self._rows.fork(self, row, digest)
        run, _ = self._rows.known(self.run_id, branch.branch_id)
        return LedgerRun(self._rows, run, branch, token, self.event_after, row, row), number

    def use_key(self, key_digest: str) -> None:
        """Write down the digest of this branch's noise key, once it is derived.

        Raises
        ------
        PrivacyError
            If another branch of the ledger has the same key: its rows of noise would be added to other sums.
        """
        self._demand_holder()
        self._rows.use_key(self, key_digest)

    def close(self, row: int) -> None:
        """Give back what was reserved and not released, and let go of the branch.

        Doing it again changes nothing, and reserving once more takes the branch back unless somebody resumed it.

        Parameters
        ----------
        row : int
            How many rows of this branch were released, those of its parents included.

        Raises
        ------
        ArgumentError
            If fewer than were asked for, or more than were reserved.
        """
        if os.getpid() != self._process or self._closed or self._holder() != self.token:
            return
        row = validate.integer(row=row, minimum=0)
        if not self._row <= row <= max(self._mark, self._row):
            raise ArgumentError(f"row={row!r}: must lie between {self._row} and {max(self._mark, self._row)}")
        # Rows that another process may have released before this one came stay counted.
        self._mark = self._rows.close(self, max(row, self._floor))
        self._closed = True

    def _holder(self) -> str | None:
        return _holders.get((self._rows.ledger_id, self.branch_id))

    def _demand_holder(self) -> None:
        if os.getpid() != self._process:
            raise PrivacyError(
                f"run {self.run_id}: belongs to process {self._process}, and this is a fork of it, {os.getpid()}; two "
                "processes must not use one run's noise: resume it from a checkpoint here"
            )
        if self._holder() != self.token:
            raise PrivacyError(
                f"run {self.run_id}: its branch {self.branch_id} was resumed by another object since; use that one"
            )
