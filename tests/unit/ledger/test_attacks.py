"""Attacks on a ledger: a row of noise meets one sum only, and whatever left a process is counted."""

import hashlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import dpcore
import dpcore.torch
from dpcore.accounting import Composed, Event, Gaussian
from dpcore.accounting.branches import Rows, count
from dpcore.cli.reports.verify import ledger_findings
from dpcore.errors import ArgumentError, BudgetError, PrivacyError
from dpcore.ledger import Ledger, LedgerRun
from dpcore.ledger.allowance import Allowance, largest
from dpcore.ledger.state import State
from dpcore.mechanism.ledger_account import LedgerAccount
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.minimize import minimize
from dpcore.methods import dp_sgd, memf
from dpcore.plan.plan import Plan
from dpcore.sampling import PoissonSampler
from dpcore.spec.keys import OPERATING_SYSTEM, Provenance
from dpcore.statement.build import state
from dpcore.statement.verify import holds, verify
from tests.unit.ledger_tools import Coins, begin, full, new, released
from tests.unit.mechanism_tools import started
from tests.unit.torch_runs import model, saved, start
from tests.unit.two_threads import in_two_threads

Sums = dict[tuple[bytes, int], list[str]]
Run = dpcore.torch.PrivateRun
FREE = {"key": None, "exact_key": False, "epochs": 10}


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Digests of the sums that met each row of each key."""
    found: Sums = {}
    take = Mechanism._take

    def watched(self: Mechanism, slots: Any, row: int, *rest: Any) -> None:
        content = b"".join(np.ascontiguousarray(slot.total).tobytes() for slot in slots)
        found.setdefault((self.keys.noise, row), []).append(hashlib.sha256(content).hexdigest())
        take(self, slots, row, *rest)

    monkeypatch.setattr(Mechanism, "_take", watched)
    return found


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return new(tmp_path)


def private(ledger: Ledger, **options: Any) -> Run:
    """A run on the ledger, under a key of its own."""
    return start(model(), options.pop("method", None), **{"ledger": ledger, **FREE, **options})


def go(run: Run, count: int, change: Callable[[Any], Any] = lambda batch: batch) -> None:
    end = run.steps_taken + count
    while run.steps_taken < end:
        for batch in run.loader:
            run.step(change(batch))
            if run.steps_taken == end:
                return


def clean(sums: Sums) -> bool:
    """Whether no row of noise was drawn for a sum twice, be it the same sum."""
    return all(len(seen) == 1 for seen in sums.values())


def by_environment(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss whose code does not show what it computes."""
    return F.cross_entropy(output, target) * float(os.environ.get("DPCORE_TEST_SCALE", "1"))


@pytest.mark.parametrize("order", [{}, {"sampling": "fixed_order"}], ids=["poisson", "fixed order"])
def test_a_sum_that_changed_behind_every_digest_meets_fresh_noise(
    ledger: Ledger, sums: Sums, order: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replay under the same keys would give away the difference of the two sums, at no charge."""
    run = private(ledger, loss=by_environment, gradients="one-by-one", **order)
    go(run, 3)
    state = saved(run)
    go(run, 4)
    monkeypatch.setenv("DPCORE_TEST_SCALE", "0.5")
    again = private(ledger, loss=by_environment, gradients="one-by-one", **order)
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    go(again, 4)
    assert clean(sums)
    again.close()
    run.close()
    assert ledger.runs()[0].releases == 11
    assert again.statement().rows_abandoned[0][0] == 3


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_loading_saving_and_changing(ledger: Ledger, sums: Sums, seed: int) -> None:
    """Several objects, their checkpoints and branches in turn, refusals included."""
    choose = random.Random(seed)
    options = [{}, {"sampling": "fixed_order", "method": memf(lr=0.3, noise_multiplier=1.0, batch_size=8)}][seed % 2]
    runs, states = [private(ledger, **options)], []
    for _ in range(14):
        run = choose.choice(runs)
        act = choose.choice(["step", "step", "save", "load", "load", "begin", "close", "rate", "change", "look"])
        try:
            if act == "step":
                go(run, choose.randint(1, 3))
            elif act == "save":
                states.append(saved(run))
            elif act == "load" and states:
                state = choose.choice(states)
                if choose.random() < 0.8:
                    run.model.load_state_dict(state["model"])
                run.optimizer.load_state_dict(state["optimizer"])
                if choose.random() < 0.3:
                    run.model.load_state_dict(choose.choice(states)["model"])
            elif act == "begin":
                runs.append(private(ledger, **options))
                runs[-1].begin()
            elif act == "close":
                run.close()
            elif act == "rate":
                run.optimizer.param_groups[0]["lr"] *= 0.5
            elif act == "change":
                go(run, 1, change=lambda batch: (batch[0] + torch.randn_like(batch[0]), batch[1]))
            else:
                next(iter(run.loader))
        except PrivacyError:
            continue
    assert clean(sums)
    assert sum(run.releases for run in ledger.runs()) >= len(sums)
    assert ledger.verify().valid


# What left is counted


def test_rows_that_left_before_the_ledger_knew_fix_nobody_else(tmp_path: Path) -> None:
    """A plan chosen by their results is not fixed beforehand, even if its run is begun in time."""
    run = start(model(), **FREE)
    go(run, 1)
    state = saved(run)
    ledger = Ledger.create(tmp_path / "ledger", budget=(60.0, 1e-5))
    chosen = begin(ledger, full, steps=4)
    again = private(ledger)
    again.model.load_state_dict(state["model"])
    again.optimizer.load_state_dict(state["optimizer"])
    again.begin()
    assert sum(one.releases for one in ledger.runs()) == 1
    chosen.reserve(0)
    assert ledger.total().fixed_runs == (ledger.runs()[1].run_id,)
    assert ledger.verify().valid
    begin(other := Ledger.create(tmp_path / "other", budget=(3.0, 1e-5)), full, steps=4)
    assert (other.charge(full(1), name="seen", already_released=True),) == other.total().fixed_runs


def test_a_run_whose_earlier_rows_do_not_fit_is_charged_and_refused_again_and_again(tmp_path: Path) -> None:
    """They left: the ledger counts them, and grants nothing more, neither to this run nor to another one."""
    sampler = PoissonSampler(dataset_size=100, batch_size=10)
    plan = Plan(dp_sgd(lr=0.1, noise_multiplier=1.0), sampler, 200)
    before, x = started(plan, [("x", (1,))])
    for _ in range(150):
        before.release(x)
    ledger = Ledger.create(tmp_path / "ledger", budget=(0.05, 1e-5), accept_file_system=True)
    after, _ = started(plan, [("x", (1,))])
    after.account = LedgerAccount(ledger, after, name="on it goes")
    after.load_state_dict(before.state_dict())
    for _ in range(2):
        with pytest.raises(BudgetError):
            after.draw()
        assert after.state_dict()["public"]["ledger"]["run"] == ledger.runs()[0].run_id
    assert [run.releases for run in ledger.runs()] == [150]
    assert ledger.total().spent > ledger.total().limit
    other, _ = started(plan, [("x", (1,))])
    other.account = LedgerAccount(ledger, other, name="another")
    with pytest.raises(BudgetError):
        other.draw()
    assert [run.releases for run in ledger.runs()] == [150]
    (problem,) = ledger.verify().problems
    assert problem.startswith("the budget is exceeded")


def test_abandoned_rows_that_left_before_the_ledger_knew_belong_to_their_run(tmp_path: Path) -> None:
    plan = Plan(dp_sgd(lr=0.1, noise_multiplier=1.0), PoissonSampler(dataset_size=100, batch_size=10), 20)
    before, x = started(plan, [("x", (1,))])
    for _ in range(3):
        before.release(x)
    state = before.state_dict()
    for _ in range(2):
        before.release(x)
    before.load_state_dict(state)  # leaves two rows
    ledger = Ledger.create(tmp_path / "ledger", accept_file_system=True)
    after, y = started(plan, [("x", (1,))])
    after.account = LedgerAccount(ledger, after, name="on it goes")
    after.load_state_dict(before.state_dict())
    after.release(y)
    after.account.close()
    (run,) = ledger.runs()
    assert run.event == plan.event_after(4, ((3, 5),))
    assert after.statement(1e-5).event == run.event.to_dict()
    assert ledger.verify().valid


def left_behind(ledger: Ledger, plan: Plan, steps: int) -> LedgerRun:
    """A run that released six steps, went back behind the sixth, and took so many in all."""
    given: dict[str, Any] = {"event_after": plan.event_after}
    run = ledger.begin(name="", adjacency="add-remove", steps=20, description={}, key_digest="a", **given)
    released(run, 6)
    run.close(6)
    other, _ = ledger.resume(run.run_id, run.branch_id, 5, **given)
    other.reserve(steps - 1)
    other.close(steps)
    return run


def test_a_smaller_plan_is_no_plan_of_the_ledger_whatever_stopped_it(tmp_path: Path) -> None:
    """A statement that counts the whole plan states its event, and abandoned steps on top of it."""
    sampler = PoissonSampler(dataset_size=1000, batch_size=10)
    paid, lie = (Plan(dp_sgd(lr=0.1, noise_multiplier=sigma), sampler, 20) for sigma in (0.6, 6.0))
    ledger = Ledger.create(tmp_path / "ledger", accept_file_system=True)
    run = left_behind(ledger, paid, 11)

    def found(plan: Plan, *, stopped: bool) -> bool:
        told = state(
            plan, 1e-5, steps_taken=11, abandoned=((5, 6),), stopped_by_results=stopped, backend="numpy",
            keys=Provenance(OPERATING_SYSTEM, 1), ledger=ledger.describe(run.run_id, 1e-5),
        )  # fmt: skip
        assert holds(verify(told.to_dict()))
        return holds(ledger_findings(told.to_dict(), ledger.path))

    assert [found(paid, stopped=stopped) for stopped in (False, True)] == [True, True]
    assert [found(lie, stopped=stopped) for stopped in (False, True)] == [False, False]


def test_the_planned_epsilon_of_an_own_sampler_is_not_below_what_the_ledger_charged(tmp_path: Path) -> None:
    plan = Plan(dp_sgd(lr=0.1, noise_multiplier=0.6), Coins(dataset_size=1000, batch_size=10), 20)
    ledger = Ledger.create(tmp_path / "ledger", accept_file_system=True)
    run = left_behind(ledger, plan, 20)
    told = state(
        plan, 1e-5, steps_taken=20, abandoned=((5, 6),), backend="numpy", keys=Provenance(OPERATING_SYSTEM, 1),
        ledger=ledger.describe(run.run_id, 1e-5),
    ).to_dict()  # fmt: skip
    without = state(plan, 1e-5, steps_taken=20, backend="numpy", keys=Provenance(OPERATING_SYSTEM, 1)).to_dict()
    assert holds(ledger_findings(told, ledger.path))
    lie = told | {name: without[name] for name in ("event_planned", "epsilon_planned")}
    assert [f.check for f in ledger_findings(lie, ledger.path) if f.status == "failed"] == ["ledger: event planned"]


def test_a_statement_counts_what_another_process_has_released_meanwhile(tmp_path: Path) -> None:
    plan = Plan(dp_sgd(lr=0.1, noise_multiplier=1.0), PoissonSampler(dataset_size=100, batch_size=10), 20)

    def run(ledger: Ledger) -> tuple[Any, Any]:
        mechanism, x = started(plan, [("x", (1,))])
        mechanism.account = LedgerAccount(ledger, mechanism, name="one")
        return mechanism, x

    def steps(mechanism: Any, x: Any, count: int) -> None:
        for _ in range(count):
            mechanism.draw()
            mechanism.release(x)

    first, x = run(Ledger.create(tmp_path / "ledger", accept_file_system=True))
    steps(first, x, 5)
    state_then = first.state_dict()
    steps(first, x, 5)
    first.account.close()
    second, y = run(Ledger.open(tmp_path / "ledger", accept_file_system=True))
    second.load_state_dict(state_then)
    steps(second, y, 6)
    second.account.close()
    told = first.statement(1e-5)
    assert told.steps_abandoned == 6
    assert holds(ledger_findings(told.to_dict(), tmp_path / "ledger"))


def test_a_handler_of_a_signal_is_told_that_the_ledger_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, append = begin(ledger := new(tmp_path)), Allowance.append

    def interrupted(*args: Any) -> None:
        append(*args)
        with pytest.raises(PrivacyError, match="a signal's handler used it in the middle of another use"):
            ledger.total()

    monkeypatch.setattr(Allowance, "append", interrupted)
    run.reserve(0)
    assert ledger.verify().valid
    assert ledger.runs()[0].releases >= 1


@pytest.mark.parametrize(("act", "commit"), [("reserve", "_reserve"), ("close", "_give_back")])
def test_an_interruption_right_after_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str, commit: str
) -> None:
    """Python raises KeyboardInterrupt when SQLite returns: the file has changed, and the run does not know it."""
    run = begin(ledger := new(tmp_path))
    released(run, 40)
    real, first = getattr(LedgerRun, commit), run.mark if act == "reserve" else 40

    def interrupted(*words: Any) -> int:
        real(*words)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LedgerRun, commit, interrupted)
        with pytest.raises(KeyboardInterrupt):
            getattr(run, act)(first)
    for row in range(first, first + 12):
        run.reserve(row)
        (held,) = Ledger.open(ledger.path).runs()
        assert row < held.releases == run.mark
    assert ledger.verify().valid


def test_an_interruption_amid_an_entry_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reader = begin(new(tmp_path)), Ledger.open(tmp_path / "people.ledger")
    apply = State.apply

    def interrupted(self: State, content: Any) -> None:
        apply(self, content)
        raise KeyboardInterrupt

    released(run, 9)
    with monkeypatch.context() as patch:
        patch.setattr(State, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            reader.runs()
    assert reader.runs()[0].releases == run.mark


@pytest.mark.parametrize(
    ("files", "every", "reached"),
    [
        (("mechanism/ledger_account.py",), 1, {"before_draw", "before_release", "_at_work"}),
        (("mechanism/ledger_account.py", "mechanism/mechanism.py", "ledger/"), 9, {"release", "_reserve", "_at_work"}),
    ],
)
def test_close_from_a_signals_handler_at_any_line_gives_back_no_row_on_its_way(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], every: int, reached: set[str]
) -> None:
    """Before, in and after each reservation, the draw and the release: every row is on disk when its noise is drawn."""
    run = private(ledger, epochs=400)
    take, seen, done = Mechanism._take, [], [False]
    root = str(Path(dpcore.__file__).parent)
    own = tuple(f"{root}/{name}" for name in files)

    def watched(self: Mechanism, slots: Any, row: int, *rest: Any) -> None:
        before, done[0] = done[0], True  # no signal while the test itself reads the ledger
        (held,) = Ledger.open(ledger.path).runs()
        done[0] = before
        assert max(held.marks.values()) > row
        take(self, slots, row, *rest)

    monkeypatch.setattr(Mechanism, "_take", watched)
    go(run, 1)
    lines = 0
    for wanted in range(0, 10**6, every):
        lines, done[0] = 0, False

        def trace(frame: Any, event: str, _: Any, wanted: int = wanted) -> Any:
            nonlocal lines
            if not frame.f_code.co_filename.startswith(own):
                return None
            if event == "line" and not done[0]:
                lines += 1
                if lines > wanted:
                    done[0] = True
                    seen.append(frame.f_code.co_name)
                    run.close()
            return trace

        sys.settrace(trace)
        try:
            go(run, 1)
        finally:
            sys.settrace(None)
        assert Ledger.open(ledger.path).runs()[0].releases >= run.steps_taken
        if not done[0]:
            break
    assert reached <= {*seen}
    run.close()
    assert ledger.runs()[0].releases == run.steps_taken


def test_two_threads_that_step_one_run_release_each_row_once(ledger: Ledger, sums: Sums) -> None:
    """Each takes its batches from an iterator of its own; what one of them cannot have is refused."""
    run, refused = private(ledger, epochs=30, key=bytes(32), exact_key=True), []

    def work() -> None:
        while run.steps_taken < 60:
            try:
                for batch in run.loader:
                    run.step(batch)
                    if run.steps_taken >= 60:
                        break
            except PrivacyError as refusal:
                refused.append(str(refusal))

    in_two_threads(work)
    assert len(sums) == run.steps_taken >= 60
    run.close()
    assert ledger.runs()[0].releases == run.steps_taken
    # Each sum is that of the step's own batch, at the parameters that the releases so far led to.
    met = {row: digests for (_, row), digests in sums.items()}
    alone, now = start(model(), epochs=30, key=bytes(32), exact_key=True), dict(sums)
    sums.clear()
    go(alone, run.steps_taken)
    assert {row: digests for (_, row), digests in sums.items()} == met
    assert now


def test_noise_of_the_callers_is_not_counted_as_private(tmp_path: Path) -> None:
    method = dp_sgd(lr=0.1, noise_multiplier=1.0)
    with pytest.raises(ArgumentError, match="noise with a ledger: the caller's noise hides nothing"):
        minimize(
            lambda x, indices: np.zeros((len(indices), 2)),
            np.zeros(2),
            PoissonSampler(dataset_size=50, batch_size=5),
            method,
            steps=3,
            noise=np.zeros((3, 2)),
            ledger=new(tmp_path),
        )


# The counters of a ledger beside a plain model: sets of rows that have left, under random use.


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
            name="x", adjacency="add-remove", steps=STEPS, event_after=event_after, description=None, key_digest="k"
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
