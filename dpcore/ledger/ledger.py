"""The ledger: one data set, all runs on it, and the budget that they share."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcore.accounting import Adjacency, Composed, Event, smallest_epsilon
from dpcore.accounting.branches import Rows, check_rows
from dpcore.accounting.events import check_event
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, PrivacyError
from dpcore.ledger import checks
from dpcore.ledger.allowance import Allowance, LedgerRun, after
from dpcore.ledger.book import Book, now
from dpcore.ledger.checks import EventAfter, Remaining, RunRecord, Total, Verification, event_of
from dpcore.ledger.privacy_filter import PrivacyFilter
from dpcore.ledger.state import FORMAT, START, Entry, number_out, seal, write
from dpcore.ledger.storage import Storage, check_place, check_writable, exists
from dpcore.spec import validate
from dpcore.spec.canonical import plain, read_json
from dpcore.spec.version import __version__


class Ledger:
    """A privacy ledger; made by `Ledger.create`, `Ledger.open` and `Ledger.open_or_create`.

    One ledger is for one data set: its runs are charged to the same people. Many processes of one machine may use it at
    once, and be killed at any moment. It contains no key, but describes runs: only its owner can read the file.
    """

    def __init__(self, storage: Storage) -> None:
        if not isinstance(storage, Storage):
            raise ArgumentTypeError(f"storage={storage!r}: open a ledger with Ledger.open(path)")
        self.path = storage.path
        self._book = Book(storage)
        self._allowance = Allowance(self._book)

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
            Path of a file that does not exist, on a disk of this machine.
        budget : tuple of float, optional
            (epsilon, delta) that all runs together must not cross, however they are chosen.
        order : float, optional
            The Renyi order at which runs add up; by default the best one for the plans of the runs that are begun
            before the first row is reserved.
        name : str
            Name of the data set.
        composition : {"rdp", "gdp"}
            By Renyi divergence, or, for runs without secretly sampled batches, by Gaussian differential privacy, which
            loses nothing.
        accept_file_system : bool
            Accept a file system that is not in `dpcore.ledger.storage.KNOWN`. The ledger records that its owner did so,
            and every statement of a run on it repeats it.

        Raises
        ------
        DataError, ArgumentError
            If the file exists or cannot be written safely there; if the budget leaves nothing to spend.
        """
        target, budget = resolved(path), checked(budget)
        chosen = PrivacyFilter.of(composition, order, budget)
        limit = None if budget is None else chosen.limit(*budget)
        late = chosen.kind == "rdp" and order is None  # fixed with the first row
        if target.exists():
            raise exists(target)
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
        return cls(Storage.create(target, [Entry(0, body, seal(START, body))]))._accept(place)

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
        storage = Storage(resolved(path), read_only=read_only)
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
        """Open the ledger, or make it if there is none: for a script that is run more than once.

        Parameters
        ----------
        path : path
        budget : tuple of float, optional
        name : str
            Settings of a new ledger, as in `create`. One that exists must have the same: they are fixed once.
        accept_file_system : bool
            As in `create`.

        Raises
        ------
        DataError, ArgumentError
            As `open` and `create`, and if the ledger exists with another budget or name.
        """
        target = resolved(path)
        if not target.exists():
            try:
                return cls.create(path, budget=budget, name=name, accept_file_system=accept_file_system)
            except DataError:
                if not target.exists():
                    raise
        ledger = cls.open(path, accept_file_system=accept_file_system)
        for setting, wanted in {"budget": checked(budget), "name": name or None}.items():
            has = getattr(ledger, setting)
            if wanted not in (None, has):
                raise ArgumentError(
                    f"{setting}={wanted!r}: the ledger {ledger.path} has {has!r}, fixed when it was made"
                )
        return ledger

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
        left: int = 0,
        abandoned: Sequence[Rows] = (),
    ) -> LedgerRun:
        """Write down a new run before it releases anything, or one that released rows before this ledger knew of it.

        Parameters
        ----------
        name : str
            The run's name for a person.
        adjacency : str or None
            The adjacency of its event; None if nothing is guaranteed.
        steps : int
            Rows planned.
        event_after : callable
            ``event_after(steps, abandoned)``: the event of the first `steps` rows of a branch, and of the rows of the
            branches that were left, a list of (first, stop).
        description : object
            The settings, as JSON values.
        key_digest : str
            Digest of the noise key, never the key; empty if unknown.
        dataset : str
            Fingerprint of the data.
        left, abandoned : int, sequence of (first, stop)
            Rows that left before this ledger knew of the run: on the way to its present parameters, and on branches
            that it left. They are charged whatever the budget; beyond it nothing is granted any more. Other runs may
            have been chosen by their results, so that none of these is fixed beforehand.

        Raises
        ------
        BudgetError
            If nothing left yet, and not even the first row fits.
        PrivacyError
            If its adjacency does not go with the ledger's, its event cannot be charged, or its key is in use.
        ArgumentError
            If more rows left than are planned, or an abandoned range is none within them.
        """
        words = {"name": str(name), "description": description, "dataset": str(dataset)}
        most = validate.integer(steps=steps, minimum=1)
        if validate.integer(left=left, minimum=0) > most:
            raise ArgumentError(f"left={left!r}: must be at most the planned steps, {most}")
        for rows in abandoned:
            check_rows(rows, most, "abandoned")
        return self._begin(adjacency, steps, event_after, key_digest, left, abandoned, **words)

    def _begin(
        self,
        adjacency: str | None,
        steps: int,
        event_after: EventAfter,
        key_digest: str,
        left: int,
        abandoned: Sequence[Rows] = (),
        **words: Any,
    ) -> LedgerRun:
        """Write a new run, and charge the rows of it that left already.

        They are charged even beyond the budget: a refusal would not take them back, and the ledger would grant their
        part of the budget again. Once the charges exceed the limit, nothing more is granted (`Allowance.allows`), and
        the total states the odometer's epsilon, which does not need a limit fixed beforehand
        (`dpcore.ledger.privacy_filter`).
        """
        steps = validate.integer(steps=steps, minimum=1)
        kind = None if adjacency is None else str(validate.choice([str(one) for one in Adjacency], adjacency=adjacency))
        planned, nothing = event_of(event_after, steps), event_of(event_after, 0)
        if planned.adjacency is not None and planned.adjacency != kind:
            raise ArgumentError(f"adjacency={kind!r}: the planned event is described under {str(planned.adjacency)!r}")
        allowance = self._allowance
        allowance.filter.charge(planned)  # refuses what it does not cover, before anything is written
        with self._book.writing() as draft:
            allowance.check_adjacency(kind)
            allowance.check_key(key_digest)
            if not (left or abandoned):
                allowance.demand_room_to_begin(draft, planned, event_after)
            run_id = f"{self.ledger_id[:8]}-{secrets.token_hex(6)}"
            branch_id = f"{run_id}.0"
            draft.append(
                "begin",
                run=run_id,
                branch=branch_id,
                adjacency=kind,
                steps=steps,
                planned=planned.to_dict(),
                event=nothing.to_dict(),
                charge=number_out(allowance.filter.charge(nothing)),
                key_digest=str(key_digest),
                software=__version__,
                **words,
            )
            token = draft.lease(branch_id)
            run, _ = self._book.known(run_id, branch_id)
            if left or abandoned:
                if self._book.state.fixed is None:
                    allowance.fix(draft, run, alone=True)
                for place, (first, stop) in enumerate(abandoned, 1):
                    child, number = f"{run_id}.{place}", secrets.randbits(63)
                    draft.append("fork", run=run_id, branch=branch_id, child=child, row=first, number=number)
                    allowance.append(draft, run, child, stop, *after(run, child, stop, event_after))
                allowance.append(draft, run, branch_id, left, *after(run, branch_id, left, event_after))
        return LedgerRun(allowance, run, branch_id, token, event_after)

    def resume(
        self, run_id: str, branch_id: str, row: int, *, event_after: EventAfter, steps: int | None = None
    ) -> tuple[LedgerRun, int]:
        """Begin a branch that continues from a checkpoint, under its own key.

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
            If this ledger has no such run or branch: its releases are unknown then, so it must be another run.
        PrivacyError
            If the plan is not the one the run began with.
        """
        row = validate.integer(row=row, minimum=0)
        with self._book.writing() as draft:
            run, parent = self._book.known(run_id, branch_id)
            if row < parent.first:
                raise ArgumentError(f"row={row!r}: the branch {branch_id} begins at row {parent.first}")
            steps = run.steps if steps is None else validate.integer(steps=steps, minimum=run.steps)
            checks.check_plan(run, event_after)
            if row > parent.mark:
                # An older copy of the ledger was put back: these rows have left, whatever the budget says.
                self._allowance.append(draft, run, branch_id, row, *after(run, branch_id, row, event_after))
            # Random, not counted: an older copy of the ledger that is put back must not give out a number again.
            number, child = secrets.randbits(63), f"{run_id}.{len(run.branches)}"
            draft.append("fork", run=run_id, branch=branch_id, child=child, row=row, number=number)
            draft.append("resume", run=run_id, branch=child, row=row, steps=steps)
            token = draft.lease(child)
        return LedgerRun(self._allowance, run, child, token, event_after), number

    def charge(self, event: Event, *, name: str, description: Any = None, already_released: bool = False) -> str:
        """Charge a release that was not made by a run of dpcore, and return the run's id: a count, a salvaged entry.

        Parameters
        ----------
        event : Event
        name : str
        description : object
            JSON values.
        already_released : bool
            Whether it happened: it is written down even if it crosses the budget, and nothing is granted then.

        Raises
        ------
        BudgetError
            If it does not fit, and must not be released.
        """
        check_event(event=event)
        event_after: EventAfter = lambda steps, _abandoned: event if steps else Composed(())  # noqa: E731
        words = {"name": str(name), "description": description, "dataset": ""}
        run = self._begin(event.adjacency, 1, event_after, "", int(already_released), **words)
        run.reserve(0)
        run.close(1)
        return run.run_id

    def release_winner(self, selection: str, winner: str) -> None:
        """Write down the one winner of a selection (ids and digests are texts); a second call with it changes nothing.

        Raises
        ------
        PrivacyError
            If the selection has another winner, as where its folder was copied: one entry pays for one.
        """
        with self._book.writing() as draft:
            known = self._book.state.winners.get(selection)
            if known is None:
                draft.append("winner", selection=selection, winner=winner)
            elif known != winner:
                raise PrivacyError(
                    f"selection {selection}: a copy of its folder has ended with another winner, and the ledger "
                    f"{self.path} was charged for one: keep that one"
                )

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

    @property
    def ledger_id(self) -> str:
        """Random, and the same wherever the file is moved."""
        return self._book.ledger_id

    @property
    def name(self) -> str:
        """The data set's name for a person."""
        return str(self._book.state.header["name"])

    @property
    def file_systems(self) -> tuple[str, ...]:
        """Kinds of file system that are not known to be safe, and that the owner accepted for it."""
        return self._book.state.file_systems

    @property
    def stated_place(self) -> dict[str, Any]:
        """Fields on the ledger's place for every statement of a run on it; empty on file systems known to be safe."""
        return {"file_systems": list(self.file_systems)} if self.file_systems else {}

    def describe(self, run_id: str, delta: float) -> dict[str, Any]:
        """Return what the statement of a run says of its ledger: the names of both, and the ledger's total."""
        total, seal = self._total(delta)
        stated = {"epsilon": plain(total.filter), "epsilon_if_fixed_beforehand": plain(total.fixed), "delta": delta}
        return {"ledger": self.ledger_id, "run": run_id, "seal": seal, "total": stated, **self.stated_place}

    @property
    def budget(self) -> tuple[float, float] | None:
        """(epsilon, delta), or None."""
        return self._allowance.budget

    @property
    def filter(self) -> PrivacyFilter:
        """How runs add up here. As long as no row is reserved, the order may still become another one."""
        return self._allowance.filter

    @property
    def order(self) -> float | None:
        """The Renyi order; None while it is not fixed, and if composition is "gdp"."""
        return None if self.filter.kind == "gdp" else self._book.state.order

    @property
    def salt(self) -> bytes:
        """32 random bytes for fingerprints of the data, so that they cannot be compared with guesses elsewhere."""
        return self._book.storage.salt()

    @property
    def seal(self) -> str:
        """The seal of the last entry, which represents the whole ledger up to now."""
        with self._book.reading():
            return self._book.seal

    def runs(self) -> tuple[RunRecord, ...]:
        """Return all runs in the order in which they were begun."""
        with self._book.reading():
            return tuple(checks.record(run) for run in self._book.state.runs.values())

    def total(self, delta: float | None = None) -> Total:
        """Return the total cost of all runs, at `delta` or that of the budget.

        Raises
        ------
        ArgumentError
            If there is neither a delta nor a budget.
        """
        return self._total(delta)[0]

    def at(self, seal: str) -> Ledger:
        """Return the ledger as it was when the entry with this seal was its last one, to be read only.

        Raises
        ------
        DataError
            If no entry has the seal.
        """
        return Ledger(Storage(self.path, read_only=True, until=seal))

    def _total(self, delta: float | None) -> tuple[Total, str]:
        """Return the total, and the seal of the last entry in it."""
        rows = self._allowance
        with self._book.reading() as draft:
            state, seal = self._book.state, self._book.seal
            runs = tuple(checks.record(run) for run in state.runs.values())
            spent, counted, limit = rows.spent, rows.counted(draft), rows.limit
            fixed, outside = state.fixed, checks.outside_plans(state)
        if delta is None and rows.budget is None:
            raise ArgumentError("delta=None: must be given, since the ledger has no budget to take it from")
        chosen = validate.open_unit(delta=rows.budget[1] if delta is None and rows.budget is not None else delta)
        alone = fixed is not None and fixed.alone
        exceeded = outside if alone else limit is not None and spent > limit
        whole = Composed(tuple(run.event for run in runs if run.releases))
        epsilon, accountant = smallest_epsilon(whole, chosen) if whole.events else (0.0, "")
        plan = smallest_epsilon(Event.from_dict(fixed.event), chosen)[0] if fixed is not None and fixed.runs else None
        odometer = rows.filter.odometer(spent, chosen)
        budget = None if limit is None else rows.filter.epsilon(max(limit, spent), chosen)
        if alone and not outside:
            budget = plan
        elif exceeded and budget is not None:  # nobody fixed the sum's end
            budget = max(budget, odometer)
        total = Total(
            delta=chosen,
            adjacency=None if whole.adjacency is None else str(whole.adjacency),
            runs=len(runs),
            fixed=epsilon,
            accountant=accountant,
            budget=budget,
            plan=plan,
            fixed_runs=() if fixed is None else fixed.runs,
            alone=alone,
            odometer=odometer,
            spent=spent,
            kept=max(0.0, counted - spent) if math.isfinite(counted) else 0.0,
            limit=limit,
            notes=checks.notes(runs, spent, exceeded),
        )
        return total, seal

    def remaining(self) -> Remaining:
        """Return the rest of the budget, to which steps and noise can be calibrated.

        Raises
        ------
        ArgumentError
            If the ledger has no budget.
        """
        rows = self._allowance
        if rows.budget is None:
            raise ArgumentError(f"budget=None: the ledger {self.path} has none, so its rest has no limit")
        with self._book.reading() as draft:
            state, limit = self._book.state, rows.limit
            assert limit is not None
            plans = tuple(run.plan for run in state.runs.values() if draft.alive(run))
            kept = state.fixed is not None and state.fixed.alone
            spent = limit if kept else rows.counted(draft)
            begun = Composed(plans) if state.fixed is None else None
            return Remaining(rows.filter, spent, limit, rows.budget, begun)

    def verify(self, *, seal: str | None = None) -> Verification:
        """Check everything again from the file: SQLite's structure, seals, counters, and each charge from its event.

        With `seal`, from a statement or a note, some entry must have it: this shows that the end was not cut off and
        that not everything was rewritten.
        """
        with self._book.storage.connection() as connection:
            return checks.verify(self._book.storage, connection, seal)

    def export(self) -> dict[str, Any]:
        """Return all entries as JSON values, with their seals. The salt is left out."""
        with self._book.storage.connection() as connection:
            entries = list(self._book.storage.entries(connection, 0))
        return {
            "format": FORMAT,
            "ledger": self.ledger_id,
            "entries": [read_json(entry.body) for entry in entries],
            "seals": [entry.seal for entry in entries],
        }


AnyPath = str | os.PathLike[str]
Budget = tuple[float, float] | None


def checked(budget: Any) -> Budget:
    """Return a budget as two floats."""
    if budget is None:
        return None
    try:
        epsilon, delta = budget
    except (TypeError, ValueError) as cause:
        raise ArgumentTypeError(f"budget={budget!r}: must be (epsilon, delta), such as (3.0, 1e-5)") from cause
    epsilon = validate.positive(budget_epsilon=epsilon)
    return epsilon, validate.open_unit(budget_delta=delta)


def resolved(path: AnyPath) -> Path:
    """Return the path of the file itself, behind all links."""
    try:
        return Path(os.path.realpath(Path(path)))
    except TypeError as cause:
        raise ArgumentTypeError(f"path={path!r}: must be a path") from cause
