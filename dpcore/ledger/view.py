"""What a ledger tells: who it is, its runs, what they cost, and whether all of it is whole."""

from __future__ import annotations

import math
from typing import Any

from dpcore.accounting import Composed, Event, smallest_epsilon
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.ledger import checks
from dpcore.ledger.book import Book
from dpcore.ledger.privacy_filter import PrivacyFilter
from dpcore.ledger.records import Remaining, RunRecord, Total, Verification
from dpcore.ledger.reservations import Reservations
from dpcore.ledger.state import FORMAT
from dpcore.ledger.storage import Storage
from dpcore.spec import validate
from dpcore.spec.canonical import read_json


class LedgerView:
    """The part of a `dpcore.ledger.Ledger` that only reads."""

    def __init__(self, storage: Storage) -> None:
        if not isinstance(storage, Storage):
            raise ArgumentTypeError(f"storage={storage!r}: open a ledger with Ledger.open(path)")
        self.path = storage.path
        self._book = Book(storage)
        self._rows = Reservations(self._book)

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r})"

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
        return self._rows.allowance.budget

    @property
    def filter(self) -> PrivacyFilter:
        """How runs add up here. As long as no row is reserved, the order may still become another one."""
        return self._rows.allowance.filter

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

    def check_made_with(self, **given: Any) -> None:
        """Refuse a budget or a name that this ledger was not made with; None stands for any."""
        for setting, wanted in given.items():
            has = getattr(self, setting)
            if wanted is not None and wanted != has:
                raise ArgumentError(f"{setting}={wanted!r}: the ledger {self.path} has {has!r}, fixed when it was made")

    def runs(self) -> tuple[RunRecord, ...]:
        """Return all runs in the order in which they were begun."""
        with self._book.reading():
            return tuple(checks.record(run) for run in self._book.state.runs.values())

    def total(self, delta: float | None = None) -> Total:
        """Return what all runs cost together, at `delta` or that of the budget.

        Raises
        ------
        ArgumentError
            If there is neither a delta nor a budget.
        """
        rows = self._rows.allowance
        with self._book.reading() as draft:
            state = self._book.state
            runs = tuple(checks.record(run) for run in state.runs.values())
            spent, counted, limit = rows.spent, rows.counted(draft), rows.limit
            fixed, beside = state.fixed, checks.beside(state)
        if delta is None and rows.budget is None:
            raise ArgumentError("delta=None: must be given, since the ledger has no budget to take it from")
        chosen = validate.open_unit(delta=rows.budget[1] if delta is None and rows.budget is not None else delta)
        alone = fixed is not None and fixed.alone
        exceeded = beside if alone else limit is not None and spent > limit
        whole = Composed(tuple(run.event for run in runs if run.releases))
        epsilon, accountant = smallest_epsilon(whole, chosen) if whole.events else (0.0, "")
        plan = smallest_epsilon(Event.from_dict(fixed.event), chosen)[0] if fixed is not None and fixed.runs else None
        odometer = rows.filter.odometer(spent, chosen)
        budget = None if limit is None else rows.filter.epsilon(max(limit, spent), chosen)
        if alone and not beside:
            budget = plan
        elif exceeded and budget is not None:  # where the sum stopped was fixed by nobody
            budget = max(budget, odometer)
        return Total(
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

    def remaining(self) -> Remaining:
        """Return what the budget leaves, with which steps and noise can be calibrated to it.

        Raises
        ------
        ArgumentError
            If the ledger has no budget.
        """
        rows = self._rows.allowance
        if rows.budget is None:
            raise ArgumentError(f"budget=None: the ledger {self.path} has none, so there is no end to what is left")
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

        With `seal`, from a statement or a note, some entry must bear it: neither was the end cut off nor all written
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
