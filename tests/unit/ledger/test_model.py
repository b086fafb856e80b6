"""The counters of a ledger beside a plain model: sets of rows that have left, under random use."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpcore.accounting import Composed, Event, Gaussian
from dpcore.errors import BudgetError
from dpcore.ledger import Ledger
from dpcore.ledger.blocks import LARGEST

STEPS = 400


def event_after(steps: int, abandoned: int, forks: int = 0) -> Event:
    """Each row of the way to the present, and each abandoned one, told apart."""
    assert steps >= 0
    assert abandoned >= 0
    return Composed((Gaussian(50.0, steps), Gaussian(50.0, abandoned)))


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
            digest="a",
            key_digest="k",
        )
        self.left: set[tuple[str, int]] = set()  # (branch, row) that have left
        self.first = {self.run.branch_id: 0}
        self.parents: dict[str, str] = {}
        self.shaped: dict[tuple[str, int], str] = {}  # by what
        self.row, self.digest, self.open, self.over = 0, "a", True, 0

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
                if total.alone:  # the whole plan fits, and only rows of a fork are refused
                    assert self.run.releases > self.row
                    return
                assert not left.spent + self.ledger.filter.charge(Gaussian(50.0, 1)) <= left.limit
                return
            key = self.run.branch_id, self.row
            # Nothing leaves twice unless it is the very same.
            assert self.shaped.setdefault(key, self.digest) == self.digest
            self.left.add(key)
            self.row += 1

    @precondition(lambda self: self.open)
    @rule()
    def close(self) -> None:
        self.run.close(self.row)
        self.open = False

    @rule(share=st.floats(0, 1), digest=st.sampled_from(["a", "a", "b", ""]), force=st.integers(0, 5))
    def resume(self, share: float, digest: str, force: int) -> None:
        """After a crash, or after a close; from any row of the branch that was ever reached."""
        branch = self.run.branch_id
        reached = max([row + 1 for name, row in self.left if name == branch], default=self.first[branch])
        row = self.first[branch] + round(share * (reached - self.first[branch]))
        mark = Ledger.open(self.ledger.path).runs()[0].marks[branch]
        found = self.ledger.resume(
            self.run.run_id, branch, row, digest=digest, event_after=event_after, fork=force == 0 or None
        )
        later = {self.shaped[key] for key in self.left if key[0] == branch and key[1] >= row}
        if force == 0:
            assert found.kind == "fork"
        elif row >= mark:
            assert found.kind == "continue"
        elif found.kind == "replay":
            assert digest
            assert later <= {digest}
        else:
            assert found.kind == "fork"
        if later - {digest}:
            assert found.kind == "fork"
        if found.kind == "fork":
            self.first[found.run.branch_id] = row
            assert found.run.mark == row
        self.run, self.row, self.digest, self.open = found.run, row, digest or "unknown", True

    @invariant()
    def all_that_left_is_covered(self) -> None:
        if not hasattr(self, "ledger"):
            return
        (held,) = Ledger.open(self.ledger.path).runs()
        for branch, row in self.left:
            assert self.first[branch] <= row < held.marks[branch]
        assert held.releases == sum(mark - self.first[branch] for branch, mark in held.marks.items())
        assert held.releases >= len(self.left)
        assert held.releases <= len(self.left) + LARGEST * len(held.marks)
        assert held.event.events[0].count + held.event.events[1].count == held.releases  # type: ignore[attr-defined]
        if self.ledger.budget is not None:
            total = self.ledger.total()
            plan = [event_after(STEPS, 0)] if total.alone else []
            assert not plan or held.event in [event_after(mark, 0) for mark in held.marks.values()]
            assert plan or total.spent <= total.limit
        if not self.open:
            assert held.releases == self.run.releases

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            assert self.ledger.verify().valid
            self.folder.cleanup()


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=8, stateful_step_count=15, deadline=None)
