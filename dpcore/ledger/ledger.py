"""The ledger: one data set, all runs on it, and the budget that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpcore.accounting import Composed, Event
from dpcore.errors import ArgumentTypeError, DataError
from dpcore.ledger import making
from dpcore.ledger.checks import EventAfter
from dpcore.ledger.making import AnyPath, Budget
from dpcore.ledger.places import check_place, check_writable
from dpcore.ledger.run import LedgerRun
from dpcore.ledger.storage import Storage
from dpcore.ledger.view import LedgerView


class Ledger(LedgerView):
    """A privacy ledger; made by `Ledger.create`, `Ledger.open` and `Ledger.open_or_create`.

    One ledger stands for one data set: its runs are charged to the same people. Many processes of one machine may use
    it at once, and be killed at any moment. It holds no key, but it tells of runs: only its owner can read the file.
    """

    @classmethod
    def create(
        cls,
        path: AnyPath,
        *,
        budget: Budget = None,
        order: float | None = None,
        name: str = "",
        composition: str = "rdp",
        accept_file_system: bool = False,
    ) -> Ledger:
        """Make a new ledger.

        Parameters
        ----------
        path : path
            Of a file that does not exist, on a disk of this machine.
        budget : tuple of float, optional
            (epsilon, delta) that all runs together must not cross, however they are chosen.
        order : float, optional
            The Renyi order at which runs add up; by default the best one for the plans of the runs that are begun
            before the first row is reserved.
        name : str
            Of the data set.
        composition : {"rdp", "gdp"}
            By Renyi divergence, or, for runs without secretly sampled batches, by Gaussian differential privacy, which
            loses nothing.
        accept_file_system : bool
            The owner's word that it may lie on a file system that is not in `dpcore.ledger.places.KNOWN`. It is written
            into the ledger, and every statement of a run on it repeats it.

        Raises
        ------
        DataError, ArgumentError
            If the file exists or cannot be written safely there; if the budget leaves nothing to spend.
        """
        storage, place = making.create(path, budget, order, name, composition, accept_file_system)
        return cls(storage)._accept(place)

    @classmethod
    def open(cls, path: AnyPath, *, read_only: bool = False, accept_file_system: bool = False) -> Ledger:
        """Open a ledger, checking that each of its entries follows from those before it.

        Parameters
        ----------
        path : path
        read_only : bool
            To look at one that cannot be written: an archived copy.
        accept_file_system : bool
            As in `create`; once for each kind of file system that it is moved to.

        Raises
        ------
        DataError
            If there is none, it is damaged or of a newer version, or it could not be written safely there.
        """
        storage = Storage(making.resolved(path), read_only=read_only)
        storage.check()
        if read_only:
            return cls(storage)
        check_writable(storage.path)
        ledger = cls(storage)
        return ledger._accept(check_place(storage.path, accept_file_system, ledger.file_systems))

    @classmethod
    def open_or_create(
        cls, path: AnyPath, budget: Budget = None, *, name: str = "", accept_file_system: bool = False
    ) -> Ledger:
        """Open the ledger, or make it where there is none: for a script that is run more than once.

        Parameters
        ----------
        path : path
        budget : tuple of float, optional
        name : str
            Of a new ledger, as in `create`. One that exists must have the same: they are fixed once.
        accept_file_system : bool
            As in `create`.

        Raises
        ------
        DataError, ArgumentError
            As `open` and `create`, and if the ledger exists with another budget or name.
        """
        target = making.resolved(path)
        if not target.exists():
            try:
                return cls.create(path, budget=budget, name=name, accept_file_system=accept_file_system)
            except DataError:
                if not target.exists():
                    raise
        ledger = cls.open(path, accept_file_system=accept_file_system)
        ledger.check_made_with(budget=making.checked(budget), name=name or None)
        return ledger

    @classmethod
    def restore(cls, path: AnyPath, exported: Mapping[str, Any], *, accept_file_system: bool = False) -> Ledger:
        """Make a ledger file, of a `path` where none is, from what `export` returned; see `create`.

        Raises
        ------
        DataError
            If an entry does not follow from those before it.
        """
        storage, place = making.restore(path, exported, accept_file_system)
        return cls(storage)._accept(place)

    def _accept(self, place: str | None) -> Ledger:
        """Write down once that the owner accepted a file system."""
        if place is not None:
            with self._book.writing() as draft:
                if place not in self.file_systems:
                    draft.append("place", file_system=place)
        return self

    def begin(
        self,
        *,
        name: str,
        adjacency: str | None,
        steps: int,
        event_after: EventAfter,
        description: Any,
        key_digest: str,
        dataset: str = "",
        left: bool = False,
    ) -> LedgerRun:
        """Write down a new run before it releases anything.

        Parameters
        ----------
        name : str
            What a person calls it.
        adjacency : str or None
            Of its event; None where nothing is guaranteed.
        steps : int
            Rows planned.
        event_after : callable
            ``event_after(steps, abandoned)``: what the first `steps` rows of a branch release, and the rows of the
            branches that were left, a list of (first, stop).
        description : object
            The settings, as JSON values.
        key_digest : str
            Of the noise key, never the key; empty if unknown.
        dataset : str
            Fingerprint of the data.
        left : bool
            Whether rows of it left before this ledger knew of it: others may have been chosen by their results, and
            none of them is fixed beforehand any more.

        Raises
        ------
        BudgetError
            If not even the first row fits.
        PrivacyError
            If its adjacency does not go with the ledger's, its event cannot be charged, or its key is in use.
        """
        told = {"name": str(name), "description": description, "dataset": str(dataset)}
        leased = self._rows.begin(adjacency, steps, event_after, key_digest, left, **told)
        return LedgerRun(self._rows, *leased, event_after)

    def resume(
        self, run_id: str, branch_id: str, row: int, *, event_after: EventAfter, steps: int | None = None
    ) -> tuple[LedgerRun, int]:
        """Begin a branch that goes on from a checkpoint, under a key of its own.

        Rows of the checkpoint's branch from `row` on that may have left stay charged, as abandoned ones.

        Parameters
        ----------
        run_id, branch_id : str
            From the checkpoint.
        row : int
            The checkpoint's: that many rows were released on the way to it.
        event_after : callable
            As in `begin`; it must describe the same plan.
        steps : int, optional
            If more rows are planned now than at first.

        Returns
        -------
        tuple of LedgerRun and int
            The new branch, and the number to derive its key from, on disk already. It is fresh from the operating
            system, so that it is not given out again even if an older copy of the ledger is put back.

        Raises
        ------
        DataError
            If this ledger has no such run or branch: it cannot know then what was released, so it is another run.
        PrivacyError
            If the plan is not the one the run began with.
        """
        leased, number = self._rows.resume(run_id, branch_id, row, event_after, steps)
        return LedgerRun(self._rows, *leased, event_after), number

    def charge(
        self, event: Event, *, name: str, description: Any = None, left: bool = False, already_released: bool = False
    ) -> str:
        """Charge a release that was not made by a run of dpcore, and return the run's id: a count, a salvaged entry.

        Parameters
        ----------
        event : Event
        name : str
        description : object
            JSON values.
        left : bool
            Whether others may have been chosen by its result before this ledger knew of it.
        already_released : bool
            Whether it happened: it is written down even if it crosses the budget, and nothing is granted then.

        Raises
        ------
        BudgetError
            If it does not fit, and must not be released.
        """
        if not isinstance(event, Event):
            raise ArgumentTypeError(f"event={event!r}: must be an event of dpcore.accounting")
        event_after: EventAfter = lambda steps, _abandoned: event if steps else Composed(())  # noqa: E731
        told = {"name": str(name), "description": description, "dataset": ""}
        known = self._rows.begin(event.adjacency, 1, event_after, "", left, already_released, **told)
        if not already_released:
            (run := LedgerRun(self._rows, *known, event_after)).reserve(0)
            run.close(1)
        return known[0].run_id
