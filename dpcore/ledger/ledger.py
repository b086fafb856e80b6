"""The ledger: one data set, all runs on it, and the budget that they share."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpcore.accounting import Adjacency, Composed, Event
from dpcore.accounting.branches import Rows
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.ledger import checks
from dpcore.ledger.book import Book, now
from dpcore.ledger.entries import START, Entry, number_out, seal, write
from dpcore.ledger.event_after import EventAfter, event_of
from dpcore.ledger.places import check_place, check_writable
from dpcore.ledger.privacy_filter import PrivacyFilter
from dpcore.ledger.records import Remaining, RunRecord, Total, Verification
from dpcore.ledger.reservations import Reservations
from dpcore.ledger.run import LedgerRun
from dpcore.ledger.state import FORMAT
from dpcore.ledger.storage import Storage
from dpcore.ledger.totals import remaining, total
from dpcore.spec import validate
from dpcore.spec.canonical import read_json
from dpcore.spec.version import __version__


class Ledger:
    """A privacy ledger; made by `Ledger.create`, `Ledger.open` and `Ledger.open_or_create`.

    One ledger stands for one data set: all its runs are charged to the same people. It may be used by many processes
    of one machine at once, and survives being killed at any moment. Nothing in it is a key, but it tells which runs
    were made, so the file can be read by its owner only.

    Parameters
    ----------
    storage : Storage
        The file, checked.

    Attributes
    ----------
    path : Path
    """

    def __init__(self, storage: Storage) -> None:
        if not isinstance(storage, Storage):
            raise ArgumentTypeError(f"storage={storage!r}: open a ledger with Ledger.open(path)")
        self.path = storage.path
        self._book = Book(storage)
        self._rows = Reservations(self._book)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str],
        *,
        budget: tuple[float, float] | None = None,
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
            What a person calls the data set.
        composition : {"rdp", "gdp"}
            By Renyi divergence, or, for runs without secretly sampled batches, by Gaussian differential privacy, which
            loses nothing.
        accept_file_system : bool
            The owner's word that the ledger may lie on a file system that is not in `dpcore.ledger.places.KNOWN`. It
            is written into the ledger, and every statement of a run on it repeats it.

        Raises
        ------
        DataError
            If the file exists, cannot be written, or would lie on a file system that is neither known nor accepted.
        ArgumentError
            If the budget leaves nothing to spend.
        """
        target = _resolved(path)
        if budget is not None:
            budget = _budget(budget)
        chosen = PrivacyFilter.of(composition, order, budget)
        limit = None if budget is None else chosen.limit(*budget)
        late = chosen.kind == "rdp" and order is None  # fixed with the first row
        if target.exists():
            raise DataError(f"ledger {target}: exists already, and a ledger is never overwritten; open it instead")
        place = check_place(target, accept_file_system)
        check_writable(target)
        body = write(
            {
                "entry": 0,
                "kind": "create",
                "time": now(),
                "format": FORMAT,
                "ledger": secrets.token_hex(8),
                "name": str(name),
                "composition": chosen.kind,
                "order": None if late else chosen.order,
                "budget": None if budget is None else list(budget),
                "limit": None if late else limit,
                "software": __version__,
            }
        )
        return cls(Storage.create(target, Entry(0, body, seal(START, body)), secrets.token_bytes(32)))._accept(place)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, read_only: bool = False, accept_file_system: bool = False) -> Ledger:
        """Open a ledger, checking that each of its entries follows from those before it.

        Parameters
        ----------
        path : path
        read_only : bool
            To look at one that cannot be written: an archived copy.
        accept_file_system : bool
            As in `create`; needed once for each kind of file system that the ledger is moved to.

        Raises
        ------
        DataError
            If there is none, it is damaged or of a newer version, or it could not be written safely there.
        """
        target = _resolved(path)
        storage = Storage(target, read_only=read_only)
        storage.check()
        if read_only:
            return cls(storage)
        check_writable(target)
        ledger = cls(storage)
        return ledger._accept(check_place(target, accept_file_system, ledger.file_systems))

    @classmethod
    def open_or_create(
        cls,
        path: str | os.PathLike[str],
        budget: tuple[float, float] | None = None,
        *,
        accept_file_system: bool = False,
    ) -> Ledger:
        """Open the ledger, or make it where there is none.

        Parameters
        ----------
        path : path
        budget : tuple of float, optional
            Of a new ledger. One that exists must have the same: a budget is fixed once.
        accept_file_system : bool
            As in `create`.

        Raises
        ------
        ArgumentError
            If the ledger exists with another budget.
        DataError
            As `open` and `create`.
        """
        if not _resolved(path).exists():
            try:
                return cls.create(path, budget=budget, accept_file_system=accept_file_system)
            except DataError:
                if not _resolved(path).exists():
                    raise
        ledger = cls.open(path, accept_file_system=accept_file_system)
        if budget is not None and _budget(budget) != ledger.budget:
            raise ArgumentError(
                f"budget={budget!r}: the ledger {ledger.path} has {ledger.budget!r}, fixed when it was made"
            )
        return ledger

    @classmethod
    def restore(
        cls, path: str | os.PathLike[str], exported: Mapping[str, Any], *, accept_file_system: bool = False
    ) -> Ledger:
        """Make a ledger file from what `export` returned.

        Parameters
        ----------
        path : path
            Of a file that does not exist.
        exported : mapping
        accept_file_system : bool
            As in `create`.

        Raises
        ------
        DataError
            If an entry does not follow from those before it, or the file cannot be made.
        """
        target = _resolved(path)
        place = check_place(target, accept_file_system)
        check_writable(target)
        return cls(checks.restore(target, exported))._accept(place)

    def _accept(self, place: str | None) -> Ledger:
        """Write down once that the owner accepted a file system."""
        if place is not None:
            with self._book.writing() as draft:
                if place not in self._book.state.file_systems:
                    draft.append("place", file_system=place)
        return self

    # What it is

    @property
    def ledger_id(self) -> str:
        """Random, and the same wherever the file is moved."""
        return self._book.ledger_id

    @property
    def name(self) -> str:
        """What a person calls the data set."""
        return str(self._book.state.header["name"])

    @property
    def file_systems(self) -> tuple[str, ...]:
        """Kinds of file system that are not known to be safe, and that the owner accepted for it."""
        return self._book.state.file_systems

    @property
    def stated_place(self) -> dict[str, Any]:
        """What every statement of a run on it must say of where it lies: nothing on file systems known to be safe."""
        return {"file_systems": list(self.file_systems)} if self.file_systems else {}

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta), or None."""
        return self._rows.budget

    @property
    def filter(self) -> PrivacyFilter:
        """How runs add up here. As long as no row is reserved, the order may still become another one."""
        return self._rows.filter

    @property
    def order(self) -> float | None:
        """The Renyi order; None as long as it is not fixed, and where composition is "gdp"."""
        return None if self.filter.kind == "gdp" else self._book.state.order

    @property
    def salt(self) -> bytes:
        """32 random bytes for fingerprints of the data, so that they cannot be compared with guesses elsewhere."""
        return self._book.storage.salt()

    @property
    def seal(self) -> str:
        """The seal of the last entry: it stands for all of the ledger up to now."""
        with self._book.reading():
            return self._book.seal

    # Runs

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
            Whether rows of it left before this ledger knew of the run: the others may have been chosen by their
            results, and none of them is fixed beforehand any more.

        Raises
        ------
        BudgetError
            If not even the first row fits.
        PrivacyError
            If its adjacency does not go with the ledger's, its event cannot be charged, or its key is in use.
        """
        steps = validate.integer(steps=steps, minimum=1)
        kind = None if adjacency is None else str(validate.choice([str(one) for one in Adjacency], adjacency=adjacency))
        planned, nothing = event_of(event_after, steps), event_of(event_after, 0)
        if planned.adjacency is not None and planned.adjacency != kind:
            raise ArgumentError(f"adjacency={kind!r}: the planned event is described under {str(planned.adjacency)!r}")
        self._rows.filter.charge(planned)  # refuses what it does not cover, before anything is written
        with self._book.writing() as draft:
            self._rows.check_adjacency(kind)
            self._rows.check_key(key_digest)
            self._rows.demand_room_to_begin(draft, planned, event_after)
            run_id = f"{self.ledger_id[:8]}-{secrets.token_hex(6)}"
            branch_id = f"{run_id}.0"
            draft.append(
                "begin",
                run=run_id,
                branch=branch_id,
                name=str(name),
                adjacency=kind,
                steps=steps,
                planned=planned.to_dict(),
                event=nothing.to_dict(),
                charge=number_out(self._rows.filter.charge(nothing)),
                description=description,
                key_digest=str(key_digest),
                dataset=str(dataset),
                software=__version__,
            )
            token = draft.lease(branch_id)
            run = self._book.state.runs[run_id]
            if left and self._book.state.fixed is None:
                self._rows.fix(draft, run, alone=True)
        return LedgerRun(self._rows, run, run.branches[branch_id], token, event_after)

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
            The new branch, and the number to derive its key from. It is on disk already, and fresh from the operating
            system, so that it is not given out again even if an older copy of the ledger is put back.

        Raises
        ------
        DataError
            If this ledger has no such run or branch: it cannot know then what was released, so it is another run.
        PrivacyError
            If the plan is not the one the run began with.
        """
        row = validate.integer(row=row, minimum=0)
        with self._book.writing() as draft:
            run, branch = self._book.known(run_id, branch_id)
            if row < branch.first:
                raise ArgumentError(f"row={row!r}: the branch {branch_id} begins at row {branch.first}")
            steps = run.steps if steps is None else validate.integer(steps=steps, minimum=run.steps)
            checks.check_plan(run, event_after)
            if row > branch.mark:
                # An older copy of the ledger was put back: these rows have left, whatever the budget says.
                self._rows.append_reservation(draft, run, branch, row, event_after)
            child, number = self._rows.branch_off(draft, run, branch, row)
            draft.append("resume", run=run_id, branch=child.branch_id, row=row, steps=steps)
            token = draft.lease(child.branch_id)
        return LedgerRun(self._rows, run, child, token, event_after), number

    def charge(self, event: Event, *, name: str, description: Any = None, left: bool = False) -> str:
        """Charge a release that was not made by a run of dpcore: a published count, a salvaged entry.

        Parameters
        ----------
        event : Event
        name : str
        description : object
            JSON values.
        left : bool
            Whether it was released already; see `begin`.

        Returns
        -------
        str
            The run's id.

        Raises
        ------
        BudgetError
            If it does not fit. It must not be released then.
        """

        def event_after(steps: int, abandoned: Sequence[Rows]) -> Event:  # noqa: ARG001
            return event if steps else Composed(())

        if not isinstance(event, Event):
            raise ArgumentTypeError(f"event={event!r}: must be an event of dpcore.accounting")
        run = self.begin(
            name=name,
            adjacency=event.adjacency,
            steps=1,
            event_after=event_after,
            description=description,
            key_digest="",
            left=left,
        )
        run.reserve(0)
        run.close(1)
        return run.run_id

    # What it tells

    def runs(self) -> tuple[RunRecord, ...]:
        """Return all runs in the order in which they were begun."""
        with self._book.reading():
            return tuple(checks.record(run) for run in self._book.state.runs.values())

    def total(self, delta: float | None = None) -> Total:
        """Return what all runs cost together.

        Parameters
        ----------
        delta : float, optional
            That of the budget by default.

        Raises
        ------
        ArgumentError
            If there is neither a delta nor a budget.
        """
        return total(self._book, self._rows, delta)

    def remaining(self) -> Remaining:
        """Return what the budget leaves, with which steps and noise can be calibrated to it.

        Raises
        ------
        ArgumentError
            If the ledger has no budget.
        """
        return remaining(self._book, self._rows)

    def verify(self, *, seal: str | None = None) -> Verification:
        """Check everything again from the file: SQLite's structure, seals, counters, and each charge from its event.

        Parameters
        ----------
        seal : str, optional
            From a statement or a note: some entry must bear it, so that neither the end was cut off nor all written
            anew.
        """
        with self._book.storage.connection() as connection:
            return checks.verify(self._book.storage, connection, seal)

    def export(self) -> dict[str, Any]:
        """Return all entries as JSON values, with their seals: what `restore` takes. The salt is left out."""
        with self._book.storage.connection() as connection:
            entries = list(self._book.storage.entries(connection, 0))
        return {
            "format": FORMAT,
            "ledger": self.ledger_id,
            "entries": [read_json(entry.body) for entry in entries],
            "seals": [entry.seal for entry in entries],
        }


def _budget(budget: Any) -> tuple[float, float]:
    try:
        epsilon, delta = budget
    except (TypeError, ValueError) as cause:
        raise ArgumentTypeError(f"budget={budget!r}: must be (epsilon, delta), such as (3.0, 1e-5)") from cause
    epsilon = validate.positive(budget_epsilon=epsilon)
    return epsilon, validate.open_unit(budget_delta=delta)


def _resolved(path: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.realpath(Path(path)))
    except TypeError as cause:
        raise ArgumentTypeError(f"path={path!r}: must be a path") from cause
