"""The running mechanism: state, resume, fork, interruption, and the end of the plan."""

import copy
import itertools
import os
import pickle
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dpcore import accounting, methods
from dpcore.accounting import Adjacency, Event
from dpcore.errors import ArgumentError, DataError, PrivacyError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches, FixedOrderSampler, FixedSizeSampler, PoissonSampler
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.filters import OptimalFIR, ScalarKalman
from dpcore.stages.strategies import NamedStrategy
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import Doubling, WarmupCosine
from tests.refused import refused
from tests.unit.mechanism_tools import NumPyBut, interrupted, started

KEY = bytes(range(32))
SHAPES = [("w", (3, 4)), ("b", (4,))]
METHODS = {
    "dp_sgd": methods.dp_sgd(lr=0.1, base="momentum", noise_multiplier=1.0),
    "doppler": methods.doppler(lr=0.1, filter="second-order", noise_multiplier=1.0),
    "disk": methods.disk(lr=0.1, noise_multiplier=1.0),
    "dp_adam": methods.dp_adam(lr=0.1, noise_multiplier=1.0),
}
BANDS = np.tril(np.triu(np.full((10, 10), 0.4), -2))
np.fill_diagonal(BANDS, 1.0)
# All that a run may keep from step to step.
STATEFUL = METHODS | {
    "doppler, optimal": methods.doppler(lr=0.1, filter=OptimalFIR(2), noise_multiplier=1.0),
    "doppler, galore": methods.doppler(lr=0.1, base="adam", galore=GaLore(2, 3), noise_multiplier=1.0),
    "disk, kalman": methods.disk(lr=0.1, kappa=ScalarKalman(0.1, 0.2, 0.7), base="adam", noise_multiplier=1.0),
    "pmlf": methods.pmlf(lr=0.1, window=4, noise_multiplier=1.0),
    "inner_outer": methods.inner_outer(lr=0.1, window=3, noise_multiplier=1.0),
    "memf, banded": methods.memf(lr=0.1, strategy=BANDS, noise_multiplier=1.0),
    "srg_memf": methods.srg_memf(lr=0.1, noise_multiplier=1.0),
    "accelerated": methods.accelerated_srgd(lr=0.1, noise_multiplier=1.0, radius=2.0),
    "averages": methods.dp_sgd(lr=0.1, averaging=ExponentialAverage(0.8), noise_multiplier=1.0),
    "schedule": methods.dp_sgd(lr=0.1, schedule=WarmupCosine(6), noise_multiplier=1.0),
    "doubling": methods.dp_sgd(schedule=Doubling(confidence=0.3), noise_multiplier=1.0),
    "adaptive clip": methods.dp_sgd(lr=0.1, noise_multiplier=0.7, adaptive_clip=AdaptiveClip()),
    "bias": methods.dp_adam(lr=0.1, variant="bias_corrected", strategy="tree", noise_multiplier=1.0),
    "independent": methods.dp_adam(lr=0.1, variant="independent_moments", strategy=BANDS, noise_multiplier=1.0),
    "scaled": methods.dp_adam(
        lr=0.1, variant="delayed_preconditioner", unscaled_steps=2, scaled_steps=4, noise_multiplier=1.0
    ),
    "dp_adagrad": methods.dp_adagrad(lr=0.1, variant="scale_then_privatize", noise_multiplier=1.0),
    "everything": methods.disk(
        lr=0.1, filter="second-order", base="adam", strategy=BANDS, radius=2.0, schedule=WarmupCosine(2),
        averaging=ExponentialAverage(0.8), galore=GaLore(2, 3), noise_multiplier=1.0,
    ),
}  # fmt: skip


def sampler_of(method):
    if method.noise.strategy is not None or method.update.second_moment == "independent":
        return FixedOrderSampler(dataset_size=50, batch_size=10)
    return PoissonSampler(dataset_size=50, batch_size=10)


def build(
    method: Any, steps: int = 10, sampler: Any = None, dtype: type = np.float32, **options: Any
) -> tuple[Mechanism, list[np.ndarray]]:
    plan = Plan(method, sampler or sampler_of(method), steps, ("w", "b"))
    return started(plan, SHAPES, dtype, **{"keys": RunKeys.new(KEY, exact_key=True), **options})


def advance(mechanism: Mechanism, x: list[np.ndarray], steps: int) -> None:
    for _ in range(steps):
        indices = mechanism.plan.sampler.indices(mechanism.keys.sampling, mechanism.step)
        rows = None
        for point in mechanism.points():
            at = mechanism.at(x, point)
            gradient = [np.stack([np.cos(p + np.float32(i)).reshape(-1) for i in indices]) for p in at]
            weighted = [np.float32(point.weight) * g for g in gradient]
            rows = weighted if rows is None else [a + b for a, b in zip(rows, weighted, strict=True)]
        mechanism.add(rows)
        mechanism.release(x)


@pytest.mark.parametrize("name", STATEFUL)
def test_a_resumed_run_is_the_straight_run_bit_for_bit(name: str) -> None:
    straight, x = build(STATEFUL[name])
    advance(straight, x, 9)

    first, y = build(STATEFUL[name])
    advance(first, y, 4)
    saved, saved_y = first.state_dict(), [p.copy() for p in y]
    advance(first, y, 3)
    resumed, _ = build(STATEFUL[name])
    resumed.load_state_dict(saved)
    assert resumed.keys.noise != first.keys.noise
    resumed.keys = RunKeys.from_dict(saved["secret"])  # to compare: nothing else may be missing from the state
    advance(resumed, saved_y, 5)
    for a, b in zip(straight.output(x), resumed.output(saved_y), strict=True):
        assert a.tobytes() == b.tobytes()


OTHER_STATES = {
    "a filter's": ("dp_sgd", METHODS["disk"], "other filter or update state"),
    "an update's": ("dp_sgd", METHODS["dp_adam"], "other filter or update state"),
    "an adaptive clip's": ("adaptive clip", methods.dp_sgd(lr=0.1, noise_multiplier=0.7), "clip norms"),
    "other subspaces'": (
        "doppler, galore",
        methods.doppler(lr=0.1, base="adam", galore=GaLore(1, 3), noise_multiplier=1.0),
        r"vector 'w/filter/0' has shape \(8,\), this run's \(4,\)",
    ),
    "another matrix'": ("memf, banded", methods.memf(lr=0.1, strategy="tree", noise_multiplier=1.0), "correlated by"),
}


@pytest.mark.parametrize("name", OTHER_STATES)
def test_a_state_of_another_method_changes_nothing(name: str) -> None:
    theirs, mine, words = OTHER_STATES[name]
    other, x = build(STATEFUL[theirs])
    advance(other, x, 3)
    run, y = build(mine)
    advance(run, y, 1)
    before = repr(run.state_dict())
    refused(ArgumentError, words, run.load_state_dict, other.state_dict())
    assert repr(run.state_dict()) == before


@pytest.mark.parametrize("missing", ["statistics", "corrections", "rng", "caller_noise"])
def test_a_state_that_lacks_something_changes_nothing(missing: str) -> None:
    run, x = build(METHODS["dp_adam"])
    advance(run, x, 2)
    state = run.state_dict()
    del state["public"][missing]
    advance(run, x, 1)
    before = repr(run.state_dict())
    refused(KeyError, missing, run.load_state_dict, state)
    assert repr(run.state_dict()) == before


def test_a_fork_never_repeats_noise_or_batches() -> None:
    first, x = build(METHODS["dp_sgd"])
    advance(first, x, 2)
    state = first.state_dict()
    branches = []
    for _ in range(2):
        branch, _ = build(METHODS["dp_sgd"])
        branch.load_state_dict(state)
        branches.append(branch)
    keys = [first.keys, *(branch.keys for branch in branches)]
    assert len({k.noise for k in keys}) == len({k.sampling for k in keys}) == 3
    assert [k.forks for k in keys] == [0, 1, 1]
    statement = branches[0].statement(1e-5)
    assert any("resumed 1 time" in caveat for caveat in statement.caveats)


def test_a_row_that_was_released_is_never_drawn_again_in_this_process() -> None:
    """Also not after a fork in between, and not by another object that loads the same checkpoint."""
    first, x = build(METHODS["dp_sgd"], keys=RunKeys.new())
    advance(first, x, 2)
    state = first.state_dict()
    advance(first, x, 3)
    first.load_state_dict(state)
    other, y = build(METHODS["dp_sgd"], keys=RunKeys.new())
    for mechanism, parameters in ((first, x), (other, y)):
        mechanism.load_state_dict(state)
        mechanism.keys = RunKeys.from_dict(state["secret"])  # as no public function does it
        refused(PrivacyError, "step 3 was already released", advance, mechanism, parameters, 1)


def test_abandoned_steps_are_counted() -> None:
    mechanism, x = build(METHODS["dp_sgd"], keys=RunKeys.new())
    advance(mechanism, x, 2)
    state = mechanism.state_dict()
    for times in (1, 2, 3):
        advance(mechanism, x, 5)
        mechanism.load_state_dict(state)
        assert (mechanism.step, mechanism.releases, mechanism.keys.forks) == (2, 2 + 5 * times, times)
    drawn = mechanism.plan.sampler.event(mechanism.plan.noise_multiplier, 17)
    assert mechanism.statement(1e-5).epsilon["pld"] == accounting.epsilon(drawn, 1e-5, "pld")
    assert any("counts 15 further" in caveat for caveat in mechanism.statement(1e-5).caveats)

    later, y = build(METHODS["dp_sgd"], keys=RunKeys.new())
    advance(later, y, 4)
    later.load_state_dict(mechanism.state_dict())
    assert (later.step, later.releases) == (2, 4 + 17)


def test_what_a_run_went_back_behind_is_known_row_by_row() -> None:
    """Also to another object that loads the state, and where a branch that was left is gone on with."""
    mechanism, x = build(METHODS["dp_sgd"], keys=RunKeys.new(), steps=20)
    advance(mechanism, x, 4)
    early = mechanism.state_dict()
    advance(mechanism, x, 5)
    late = mechanism.state_dict()
    mechanism.load_state_dict(early)
    assert mechanism.abandoned == ((4, 9),)
    advance(mechanism, x, 3)
    mechanism.load_state_dict(late)
    assert (mechanism.step, mechanism.abandoned) == (9, ((4, 7),))
    advance(mechanism, x, 1)
    mechanism.load_state_dict(early)
    assert mechanism.abandoned == ((4, 7), (4, 9), (9, 10))
    other, _ = build(METHODS["dp_sgd"], keys=RunKeys.new(), steps=20)
    other.load_state_dict(mechanism.state_dict())
    assert (other.step, other.abandoned) == (4, mechanism.abandoned)
    blank, _ = build(METHODS["dp_sgd"], keys=RunKeys.new(), steps=20)
    blank.load_state_dict(early)
    assert blank.abandoned == ()  # nobody told it


class Recorded(Mechanism):
    """Keeps which sum met each row of each key."""

    met: dict[tuple[bytes, int], list[bytes]]

    def _take(self, slots: list[Any], row: int, *rest: Any) -> None:
        content = b"".join(np.ascontiguousarray(slot.total).tobytes() for slot in slots)
        self.met.setdefault((self.keys.noise, row), []).append(content)
        super()._take(slots, row, *rest)


def recorded(steps: int) -> tuple[Recorded, list[np.ndarray]]:
    sampler = FixedOrderSampler(dataset_size=64, batch_size=1)
    found, x = build(methods.dp_sgd(lr=1.0, noise_multiplier=0.0), steps, sampler, kind=Recorded)
    found.met = {}
    return found, x


def one_step(mechanism: Mechanism, x: list[np.ndarray]) -> None:
    """Each example has a direction of its own, and its rows come in two pieces."""
    (example,) = mechanism.draw()
    for half in (0, 1):
        rows = np.zeros((1, 12), np.float32)
        rows[0, example % 12] = example + 1 + half
        mechanism.add([rows, np.zeros((1, 4), np.float32)])
        time.sleep(0)
    mechanism.release(x)


def test_a_batch_whose_step_another_thread_took_is_refused() -> None:
    mechanism, x = recorded(9)
    mechanism.draw()
    other = threading.Thread(target=one_step, args=(mechanism, x))
    other.start()
    other.join()
    with pytest.raises(PrivacyError, match="another thread took the step that this batch was drawn for"):
        mechanism.add([np.ones((1, 12), np.float32), np.ones((1, 4), np.float32)])
    mechanism.draw()
    mechanism.add([np.ones((1, 12), np.float32), np.ones((1, 4), np.float32)])

    def release() -> None:
        refused(PrivacyError, "another thread is summing this step", mechanism.release, x)

    other = threading.Thread(target=release)
    other.start()
    other.join()
    mechanism.release(x)
    assert mechanism.step == 2


@pytest.mark.parametrize("call", ["draw", "release", "state_dict", "discard"])
def test_a_signals_handler_cannot_step_inside_of_a_step(call: str) -> None:
    mechanism, x = recorded(9)
    arguments = {"release": (x,)}.get(call, ())

    def normals(row: int, stream: int) -> list[np.ndarray]:
        with pytest.raises(PrivacyError, match=f"{call}: called while a step is under way"):
            getattr(mechanism, call)(*arguments)
        return [np.zeros(12, np.float32), np.zeros(4, np.float32)]

    mechanism.release(x, normals=normals)
    assert mechanism.step == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here")
def test_a_forked_process_cannot_go_on_with_the_same_noise() -> None:
    mechanism, x = build(METHODS["dp_sgd"], keys=RunKeys.new())
    advance(mechanism, x, 1)
    child = os.fork()
    if child == 0:
        try:
            advance(mechanism, x, 1)
        except PrivacyError as refusal:
            os._exit(0 if "forked" in str(refusal) else 1)
        except BaseException:  # noqa: BLE001 - a child of a test must end here
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_keys_are_neither_pickled_nor_copied() -> None:
    for write in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(PrivacyError, match="not pickled"):
            write(RunKeys.new())


def test_an_exact_key_that_is_none_is_refused() -> None:
    refused(ArgumentError, "together with a key", RunKeys.new, exact_key=True)


def test_a_fork_keeps_a_fixed_order() -> None:
    """Under another order an example could be met once more than the event says."""
    mechanism, _ = build(
        METHODS["dp_sgd"], keys=RunKeys.new(), sampler=FixedOrderSampler(dataset_size=50, batch_size=10)
    )
    before = mechanism.keys
    mechanism.load_state_dict(mechanism.state_dict())
    assert mechanism.keys.sampling == before.sampling
    assert mechanism.keys.noise != before.noise


def test_a_state_of_other_tensors_is_refused() -> None:
    mechanism, _ = build(METHODS["dp_sgd"])
    state = mechanism.state_dict()
    state["public"]["layout"][0][1] = [4, 3]
    refused(ArgumentError, "layout", mechanism.load_state_dict, state)
    refused(ArgumentError, "format", mechanism.load_state_dict, {})


def test_the_secret_part_is_only_in_the_secret_part() -> None:
    mechanism, _ = build(METHODS["disk"])
    state = mechanism.state_dict()
    assert state["secret"]["noise_key"] == KEY
    public = repr(state["public"]) + repr(mechanism.keys)
    assert KEY.hex() not in public
    assert repr(KEY) not in public
    assert repr(mechanism.keys.sampling) not in public


def test_no_step_beyond_the_plan() -> None:
    mechanism, x = build(METHODS["dp_sgd"], steps=2)
    advance(mechanism, x, 2)
    before = [p.copy() for p in x]
    refused(PrivacyError, "end at step 2", mechanism.release, x)
    for a, b in zip(x, before, strict=True):
        assert a.tobytes() == b.tobytes()


def test_an_interrupted_release_never_draws_its_row_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism, x = build(METHODS["dp_sgd"])
    mechanism.add([np.ones((2, 12), np.float32), np.ones((2, 4), np.float32)])
    monkeypatch.setattr(mechanism, "backend", NumPyBut(step=interrupted))
    with pytest.raises(KeyboardInterrupt):
        mechanism.release(x)
    assert mechanism.step == 1
    monkeypatch.setattr(mechanism, "_unit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mechanism.release(x)
    assert mechanism.step == 1, "nothing comes between a row that is spent and its noise"
    monkeypatch.undo()
    mechanism.release(x)  # the sum of the interrupted step is gone, too: an ordinary step of noise alone
    assert mechanism.step == 2


class Written:
    """An account whose ledger refuses the state, or cannot be written once it has taken it."""

    caveats = ()

    def __init__(self, refuses: str) -> None:
        self.refuses, self.tree = refuses, dict[str, Any]()

    def before_release(self, row: int) -> None:
        """Pay."""

    def resume(self, saved: Any, row: int) -> None:
        """Take a branch of the state."""
        if self.refuses == "resume":
            raise DataError("resume")

    def use_key(self, digest: str) -> None:
        """Note the key."""
        raise DataError("use_key")


@pytest.mark.parametrize("cut", ["copy", "resume", "use_key"])
def test_after_a_load_that_was_cut_short_no_step_is_taken_until_one_ends(cut: str, monkeypatch) -> None:
    """The noise's state would be of one run and its keys of another: the next rows would be no rows of the matrix."""
    strategy = NamedStrategy("banded-inverse-square-root", 3)
    method = methods.memf(lr=1.0, base="sgd", strategy=strategy, noise_multiplier=1.5)
    sampler = FixedBatches([[]] * 6 + [[0]], batch_size=1)
    (saved, x), (mechanism, y) = (build(method, 7, sampler) for _ in range(2))
    for _ in range(3):
        saved.release(x)
    mechanism.release(y)
    if cut == "copy":
        monkeypatch.setattr(mechanism, "backend", NumPyBut(from_numpy=interrupted))
    else:
        mechanism.account = Written(cut)
    with pytest.raises((KeyboardInterrupt, DataError)):
        mechanism.load_state_dict(saved.state_dict())
    monkeypatch.undo()
    if cut == "resume":  # a refusal changes nothing
        mechanism.release(y)
        assert mechanism.step == 2
        return
    mechanism.account = None
    for call in (mechanism.draw, mechanism.state_dict, lambda: mechanism.release(y)):
        refused(PrivacyError, "loading a state failed or was interrupted; load one", call)
    mechanism.load_state_dict(saved.state_dict())
    mechanism.release(y)
    assert mechanism.step == 4


@pytest.mark.parametrize("unscaled", [0, 1])
def test_an_interrupted_step_leaves_a_scale_for_the_next(monkeypatch: pytest.MonkeyPatch, unscaled: int) -> None:
    cycle = {"variant": "delayed_preconditioner", "unscaled_steps": unscaled, "scaled_steps": 1}
    mechanism, x = build(methods.dp_adam(lr=0.1, noise_multiplier=1.0, **cycle))
    monkeypatch.setattr(mechanism, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mechanism.release(x)
    monkeypatch.undo()
    advance(mechanism, x, 3)
    assert all(np.isfinite(p).all() for p in x)


@dataclass(frozen=True)
class UnknownEvent(Event):
    """Of a kind that no accountant covers."""

    adjacency = Adjacency.REPLACE_ONE


class UnknownSampler(FixedSizeSampler):
    """Its steps are of that kind."""

    def event(self, noise_multiplier: float, steps: int) -> Any:
        return UnknownEvent()


def test_an_uncovered_sampler_is_refused_before_anything_is_touched() -> None:
    with pytest.raises(PrivacyError, match="UnknownEvent: no accountant of this version covers it"):
        build(METHODS["dp_sgd"], sampler=UnknownSampler(dataset_size=50, batch_size=10))


def test_rows_keep_the_key_they_were_drawn_with_through_forks_of_forks() -> None:
    """Correlated noise draws them again; under another key it would not cancel what was released."""
    first = RunKeys.new()
    second = first.fork(keep_sampling=True, row=5)
    again = second.fork(keep_sampling=True, row=5)  # resumed twice before any step was taken
    third = again.fork(keep_sampling=True, row=8)
    back = third.fork(keep_sampling=True, row=3)
    assert [second.noise_of(row) for row in (4, 5)] == [first.noise, second.noise]
    assert [again.noise_of(row) for row in (0, 4, 5)] == [first.noise, first.noise, again.noise]
    assert [third.noise_of(row) for row in (4, 5, 7, 8)] == [first.noise, again.noise, again.noise, third.noise]
    assert [back.noise_of(row) for row in (2, 3)] == [first.noise, back.noise]
    assert [row for row, _ in third.earlier] == [5, 8]
    assert third.fork(keep_sampling=True, row=0).earlier == ()


@pytest.mark.parametrize("strategy", ["tree", "square-root", BANDS], ids=["tree", "square-root", "banded"])
def test_a_fork_of_correlated_noise_goes_on_from_the_rows_that_were_released(strategy) -> None:
    """Rows of Z before the fork are of the old key, rows from it on of the new one: C times the noise shows them."""
    method = methods.memf(lr=0.1, strategy=strategy, noise_multiplier=1.0)
    mechanism, x = build(method, keys=RunKeys.new())
    released: list[np.ndarray] = []

    def noise_of(steps: int) -> None:
        for _ in range(steps):
            mechanism.release(x, observe=lambda g, y: released.append(np.concatenate(g).astype(np.float64)))

    noise_of(4)
    before = mechanism.keys.noise
    mechanism.load_state_dict(mechanism.state_dict())
    after = mechanism.keys.noise
    assert before != after
    noise_of(6)
    chosen = mechanism.plan.method.noise.strategy
    z = chosen.matrix(10) @ np.stack(released) * mechanism.plan.batch_size
    normal = load_backend("numpy").normal
    for t in range(10):
        key = before if t < 4 else after
        expected = np.concatenate([normal(key, t, 0, 0, 12), normal(key, t, 0, 4096, 4)])
        np.testing.assert_allclose(z[t], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", STATEFUL)
def test_every_method_says_what_it_did_in_a_statement_that_reads_back(name: str) -> None:
    mechanism, x = build(STATEFUL[name])
    advance(mechanism, x, 3)
    statement = mechanism.statement(1e-5)
    assert type(statement).from_json(statement.to_json()) == statement
    assert accounting.Event.from_dict(statement.event) == mechanism.plan.event_after(3)
    assert statement.private
    assert 0 < min(statement.epsilon.values()) < min(statement.epsilon_planned.values()) < np.inf


def test_a_step_that_was_cut_short_leaves_no_gap_in_correlated_noise() -> None:
    """The second tensor's noise of step 2 is never drawn; later steps are rows of C^{-1} Z all the same."""
    method = methods.memf(
        lr=1.0, base="sgd", strategy=NamedStrategy("banded-inverse-square-root", 3), noise_multiplier=1.5
    )
    calls, real, keys = itertools.count(1), load_backend("numpy").normal, RunKeys.new()

    def normal(*arguments: Any, **settings: Any) -> np.ndarray:
        return interrupted() if next(calls) == 6 else real(*arguments, **settings)  # type: ignore[return-value]

    sampler = FixedBatches([[]] * 6 + [[0]], batch_size=1)
    mechanism, x = build(method, 7, sampler, np.float64, keys=keys, backend=NumPyBut(normal=normal))
    for _ in range(2):
        mechanism.release(x, observe=lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        mechanism.release(x, observe=lambda *_: None)
    assert (mechanism.step, mechanism.releases) == (3, 3)
    for step in range(3, 6):
        before = [p.copy() for p in x]
        mechanism.release(x, observe=(lambda *_: None) if step == 4 else None)
        for entry, old, new in zip(mechanism.layout.entries, before, x, strict=True):
            noise = sum(
                weight * real(keys.noise, row, 0, entry.first, entry.size)
                for row, weight in mechanism.plan.method.noise.strategy.rows(step)
            )
            np.testing.assert_allclose((old - new).reshape(-1), 1.5 * noise, atol=1e-9)  # a grid of 2^-36


@pytest.mark.parametrize("ended", [True, False])
def test_the_sum_of_one_step_never_enters_another(ended: bool) -> None:
    """Also where an interruption came between the release and the end of the sum."""
    (mechanism, x), (empty, y) = build(METHODS["dp_sgd"]), build(METHODS["dp_sgd"])
    mechanism.add([np.ones((1, 12), np.float32), np.ones((1, 4), np.float32)])
    for run, parameters in ((mechanism, x), (empty, y)):
        if ended:
            run.release(parameters)
        else:
            run.step += 1
    for p, q in zip(x, y, strict=True):
        p[...] = q
    for run, parameters in ((mechanism, x), (empty, y)):
        for moments in run.vectors.moments:
            for vector in moments:
                vector[...] = 0
        run.release(parameters)
    assert [p.tobytes() for p in x] == [p.tobytes() for p in y]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("variant", ["scale_then_privatize", "independent_moments"])
def test_an_example_that_overflows_is_not_told_of(variant: str, dtype: type) -> None:
    method = methods.dp_adam(lr=0.1, variant=variant, noise_multiplier=1.0)
    mechanism, x = build(method, 1, FixedBatches([[0, 1]]), dtype=dtype)
    largest = np.finfo(dtype).max
    mechanism.add([np.full((2, 12), largest, dtype), np.array([[-np.inf] * 4, [largest] * 4], dtype)])
    mechanism.release(x)
    assert all(np.isfinite(p).all() for p in x)


@pytest.mark.parametrize("norm", [1e-35, 1e35])
def test_noise_that_the_numbers_cannot_hold_is_refused(norm: float) -> None:
    with pytest.raises(ArgumentError, match=r"max_grad_norm=.*standard deviation .* out of the range of float32"):
        build(methods.dp_sgd(lr=0.1, max_grad_norm=norm, noise_multiplier=1.0))
    scaled = methods.dp_adam(lr=0.1, variant="scale_then_privatize", max_scaled_norm=norm, noise_multiplier=1.0)
    refused(ArgumentError, r"max_grad_norm=.*out of the range of float32", build, scaled)


def test_normals_of_the_caller_void_the_guarantee_for_good() -> None:
    mechanism, x = build(METHODS["dp_sgd"])
    advance(mechanism, x, 1)
    assert "supplied by the caller" not in mechanism.statement(1e-5).text()
    mechanism.add([np.zeros((0, p.size), np.float32) for p in x])
    mechanism.release(x, normals=lambda row, stream: [np.zeros(p.size, np.float32) for p in x])
    assert not np.isfinite(mechanism.statement(1e-5).best_epsilon)
    resumed, _ = build(METHODS["dp_sgd"])
    resumed.load_state_dict(mechanism.state_dict())
    assert not np.isfinite(resumed.statement(1e-5).best_epsilon)


@pytest.mark.parametrize("weighting", ["optimal", "paper"])
def test_an_adaptive_filter_counts_the_noise_of_all_tensors(weighting: str) -> None:
    """Cutting the parameters into tensors changes nothing; with 2 of 200 coordinates' noise the weights would."""
    normals = np.random.default_rng(5).normal(size=(4, 200))
    filtered = []
    for shapes in ([("x", (200,))], [("a", (2,)), ("b", (198,))]):
        method = methods.doppler(lr=0.1, filter=OptimalFIR(2, weighting), noise_multiplier=3.0)
        sampler = FixedOrderSampler(dataset_size=4, batch_size=4)
        mechanism, x = started(Plan(method, sampler, 4, tuple(name for name, _ in shapes)), shapes, np.float64)
        cuts = np.cumsum([p.size for p in x])[:-1]
        seen: list[np.ndarray] = []

        def drawn(row: int, _: int, cuts: Any = cuts) -> list[np.ndarray]:
            return np.split(normals[row], cuts)

        def observe(_: Any, outputs: Any, seen: list[np.ndarray] = seen) -> None:
            seen.append(np.concatenate(outputs))

        for _ in range(4):
            mechanism.add(np.split(np.full((4, 200), 0.05), cuts, axis=1))
            mechanism.release(x, normals=drawn, observe=observe)
        filtered.append(np.stack(seen))
    np.testing.assert_allclose(filtered[1], filtered[0], rtol=1e-9, atol=1e-12)
