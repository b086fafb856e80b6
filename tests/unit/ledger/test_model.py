"""The counters of a ledger beside a plain model: sets of rows that have left, under random use."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpcore.accounting import Composed, Event, Gaussian
from dpcore.accounting.branches import Rows, count
from dpcore.errors import BudgetError
from dpcore.ledger import Ledger
from dpcore.ledger.allowance import largest

STEPS = 400


def event_after(steps: int, abandoned: Sequence[Rows] = ()) -> Event:
    """Each row of the way to the present, and each abandoned one, told apart."""
    assert steps >= 0
    assert all(0 <= first < stop for first, stop in abandoned)
    return Composed((Gaussian(50.0, steps), Gaussian(50.0, count(abandoned))))


class LedgerMachine(RuleBasedStateMachine):
    """One run with its branches; `left` is the truth that the ledger must cover."""

    @initialize(budget=st.sampled_from([None, (0.5, 1e-5), (1.5, 1e-5), (1.7, 1e-5), (4.0, 1e-5)]))
    def start(self, budget: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = Ledger.create(Path(self.folder.name) / "a.ledger", budget=budget)
        self.run = self.ledger.begin(
            name="x",
            adjacency="add-remove",
            steps=STEPS,
            event_after=event_after,
            description=None,
            key_digest="k",
        )
        self.left: set[tuple[str, int]] = set()  # (branch, row) that have left
        self.first = {self.run.branch_id: 0}
        self.row, self.open = 0, True

    @precondition(lambda self: self.open and self.row < STEPS)
    @rule(count=st.integers(1, 60))
    def train(self, count: int) -> None:
        for _ in range(min(count, STEPS - self.row)):
            mark = self.run.mark
            try:
                self.run.reserve(self.row)
            except BudgetError:
                left, total = self.ledger.remaining(), self.ledger.total()
                assert self.run.mark == mark == self.row
                if total.alone:  # the whole plan fits, and no more rows than it has
                    assert self.run.releases >= STEPS
                    return
                assert not left.spent + self.ledger.filter.charge(Gaussian(50.0, 1)) <= left.limit
                return
            key = self.run.branch_id, self.row
            assert key not in self.left, "nothing leaves twice"
            self.left.add(key)
            self.row += 1

    @precondition(lambda self: self.open)
    @rule()
    def close(self) -> None:
        self.run.close(self.row)
        self.open = False

    @rule(share=st.floats(0, 1), pick=st.floats(0, 1, exclude_max=True))
    def resume(self, share: float, pick: float) -> None:
        """After a crash, or after a close; from any row that was ever reached."""
        branch = list(self.first)[int(pick * len(self.first))]
        reached = max([row + 1 for name, row in self.left if name == branch], default=self.first[branch])
        row = self.first[branch] + round(share * (reached - self.first[branch]))
        self.run, _ = self.ledger.resume(self.run.run_id, branch, row, event_after=event_after)
        assert self.run.mark == row
        self.first[self.run.branch_id] = row
        self.row, self.open = row, True

    @invariant()
    def all_that_left_is_covered(self) -> None:
        if not hasattr(self, "ledger"):
            return
        (held,) = Ledger.open(self.ledger.path).runs()
        for branch, row in self.left:
            assert self.first[branch] <= row < held.marks[branch]
        assert held.releases == sum(mark - self.first[branch] for branch, mark in held.marks.items())
        assert held.releases >= len(self.left)
        assert held.releases <= len(self.left) + largest(STEPS) * len(held.marks)
        assert held.event.events[0].count + held.event.events[1].count == held.releases  # type: ignore[attr-defined]
        if self.ledger.budget is not None:
            total = self.ledger.total()
            assert held.releases <= STEPS if total.alone else total.spent <= total.limit
        if not self.open:
            assert held.releases == self.run.releases

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.verify().valid
            self.folder.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)
