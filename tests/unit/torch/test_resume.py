"""Resumed runs: under fresh noise always, with nothing lost of their state, and charged in full."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import dpcore
import dpcore.torch
from dpcore import accounting
from dpcore.errors import PrivacyError
from dpcore.ledger import Ledger
from dpcore.sampling import FixedBatches
from dpcore.spec.backends import load_backend
from dpcore.spec.stream import Stream
from dpcore.stages.strategies import NamedStrategy
from tests.depth import chosen, pairs
from tests.unit.torch_runs import DATA, KEY, METHODS, as_text, finish, load, model, saved, values
from tests.unit.torch_runs import start_one_by_one as start

PLAIN = {
    "doppler": lambda: dpcore.methods.doppler(lr=0.3, filter="f5", noise_multiplier=1.0, batch_size=8),
    "disk adam": lambda: dpcore.methods.disk(lr=0.03, base="adam", noise_multiplier=1.0, batch_size=8),
}


# One of each kind of state and of noise.
KINDS = [
    "disk adaptive clip", "optimal fir", "galore adam", "disk kalman", "inner_outer",
    "memf banded", "memf tree-optimal", "srg_memf", "accelerated_srgd", "adam independent banded", "adam joint",
    "adam delayed", "adam public", "adagrad corrected", "schedule and average", "doubling", "uniform average",
]  # fmt: skip


@pytest.mark.parametrize("name", chosen(KINDS, list(METHODS)))
def test_every_method_goes_on_bit_for_bit(name: str) -> None:
    """Through recurrences of noise and filter, rows of noise drawn again, cycles of a scale, averages, subspaces."""

    def fresh(key: bytes = KEY) -> dpcore.torch.PrivateRun:
        return start(model(), METHODS[name](8), sampling="fixed_order", steps=8, epochs=None, key=key)

    run, states = fresh(), []
    for stop in (1, 4):
        finish(run, stop=stop)
        states.append(saved(run))
    end, output, want = finish(run), run.output_state_dict(), run._engine.mechanism.state_dict()
    for state in states:
        again = load(fresh(bytes(32)), state)
        assert torch.equal(finish(again), end)
        assert all(torch.equal(again.output_state_dict()[key], value) for key, value in output.items())
        got = again._engine.mechanism.state_dict()
        for part in ("public", "secret"):
            for key, value in want[part]["arrays"].items():
                assert np.array_equal(got[part]["arrays"][key], value), key
        assert got["public"]["statistics"] == want["public"]["statistics"]


STRATEGIES = {
    "tree": "tree",
    "optimal tree": "tree-optimal",
    "square root": "square-root",
    "banded": NamedStrategy("banded-inverse-square-root", 3),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_fork_under_correlated_noise_keeps_the_rows_it_has_drawn(name: str) -> None:
    """Batches without examples, so that a step is noise alone: row t of C^{-1} Z, rows of Z by their branches' keys."""
    steps = 12
    method = dpcore.methods.memf(lr=1.0, base="sgd", strategy=STRATEGIES[name], noise_multiplier=1.5, batch_size=1)
    sampler = FixedBatches([[]] * (steps - 1) + [[0]], dataset_size=30, batch_size=1)
    data = (DATA[0].double(), DATA[1])

    def fresh() -> dpcore.torch.PrivateRun:
        return start(model().double(), method, data=data, sampling=sampler, steps=steps, epochs=None)

    run, keys = fresh(), []
    for stop in (3, 6, 11):
        while run.steps_taken < stop:
            step, before = run.steps_taken, values(run.model)
            finish(run, stop=step + 1)
            keys.append(run._engine.mechanism.keys.noise)
            noise = sum(
                weight * normals(run, keys[row], row) for row, weight in run.plan.method.noise.strategy.rows(step)
            )
            torch.testing.assert_close(before - values(run.model), 1.5 * noise, rtol=1e-6, atol=1e-9)
        state = saved(run)
        run = load(fresh(), state, fork=True)
    assert len(set(keys)) == 3
    assert [row for row, _ in run._engine.mechanism.keys.earlier] == [3, 6, 11]


def normals(run: dpcore.torch.PrivateRun, key: bytes, row: int) -> torch.Tensor:
    draw = load_backend("numpy").normal
    entries = run._engine.mechanism.layout.entries
    drawn = [draw(key, row, Stream.GRADIENT, e.first, e.size) for e in entries]
    return torch.from_numpy(np.concatenate(drawn))


def test_a_branch_of_correlated_noise_is_charged_as_its_rows() -> None:
    method = METHODS["memf tree"](8)
    run = start(model(), method, sampling="fixed_order", stop=2)
    state = saved(run)
    finish(run, stop=3)
    run.optimizer.load_state_dict(state["optimizer"])
    finish(run, stop=4)
    event = run.plan.event_after(4, ((2, 3),))
    assert isinstance(event, accounting.Composed)
    assert run.epsilon() == min(accounting.epsilon(event, 1e-5, name) for name in accounting.accountants_for(event))
    assert run.plan.epsilon(1e-5, steps=4) < run.epsilon() < run.plan.epsilon(1e-5)
    assert run.statement().event == event.to_dict()
    assert run.statement().rows_abandoned == ((2, 3),)


@pytest.mark.parametrize(("name", "dtype"), pairs(PLAIN, [torch.float32, torch.bfloat16], 2))
@pytest.mark.parametrize("stop", chosen([4], [1, 4, 7]))
def test_killed_and_resumed_equals_the_straight_run(name: str, stop: int, dtype: torch.dtype) -> None:
    def fresh(**options: Any) -> tuple[dpcore.torch.PrivateRun, Any]:
        torch.manual_seed(options.pop("seed", 1))
        net = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.3), nn.Linear(9, 3)).to(dtype)
        data = (DATA[0].to(dtype), DATA[1])
        run = start(net, PLAIN[name](), data=data, key=options.pop("key", KEY), gradients="pairs", **options)
        return run, lr_scheduler.CosineAnnealingLR(run.optimizer, 12)

    run, scheduler = fresh(microbatch_size=3)
    finish(run, scheduler, stop=stop)
    state, schedule = saved(run), scheduler.state_dict()
    straight = finish(run, scheduler)
    run, scheduler = fresh(key=bytes(32), seed=2)  # with the saved micro-batches, and so the saved masks
    load(run, state)
    scheduler.load_state_dict(schedule)
    assert (run.steps_taken, run.microbatch_size) == (stop, 3)
    assert torch.equal(finish(run, scheduler), straight)


@pytest.mark.parametrize(
    ("options", "processes", "taken"),
    [({}, 1, True), ({}, 2, False), ({"microbatch_size": 5}, 1, False), ({"max_memory": 1}, 1, False)],
)
def test_a_given_micro_batch_or_that_of_other_processes_stays(
    options: dict[str, Any], processes: int, taken: bool
) -> None:
    state = start(model(), microbatch_size=3).optimizer.state_dict()
    state["dpcore"]["public"]["processes"] = processes
    run = start(model(), **options)
    own = run.microbatch_size
    run.optimizer.load_state_dict(state)
    assert run.microbatch_size == (3 if taken else own)
    assert own != 3


def test_the_statement_keeps_the_sentences_of_earlier_steps() -> None:
    state = saved(start(model(), precision="bf16", stop=1))
    for _ in range(2):  # a second state keeps them, too
        run = load(start(model()), state, fork=True)
        state = saved(run)
    (sentence,) = (one for one in run.statement().caveats if "bfloat16" in one)
    assert load(start(model(), precision="bf16"), state, fork=True).statement().caveats.count(sentence) == 1


def test_a_run_that_a_ledger_pays_for_does_not_go_on_without_it(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l", budget=None)
    state, run = start(model(), ledger=ledger, stop=1).optimizer.state_dict(), start(model())
    before = as_text(run)
    with pytest.raises(PrivacyError, match=f"ledger=None: must be the ledger that pays .*{ledger.ledger_id}"):
        run.optimizer.load_state_dict(state)
    assert as_text(run) == before


@pytest.mark.parametrize("key", [{}, {"key": None, "exact_key": False}], ids=["exact", "own"])
def test_resuming_forks_and_the_statement_says_so(key: dict[str, Any]) -> None:
    """Two runs that go on from one state share noise neither with each other nor with the one that was saved."""
    run = start(model(), **key, stop=5)
    state = saved(run)
    runs, batches, ends = [run], [], [finish(run)]
    for _ in range(2):
        again = load(start(model(), **key), state, fork=True)
        assert again.steps_taken == 5
        batches.append(next(iter(again.loader))[0])
        runs.append(again)
        ends.append(finish(again))
        statement = again.statement()
        assert statement.randomness["forks"] == 1
        assert "resumed 1 time" in " ".join(statement.caveats)
    assert len({run._engine.mechanism.keys.noise for run in runs}) == len({str(end.tolist()) for end in ends}) == 3
    assert batches[0].shape != batches[1].shape or not torch.equal(batches[0], batches[1])


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order"])
def test_abandoned_steps_stay_counted(sampling: str) -> None:
    run = start(model(), sampling=sampling, stop=2)
    state = saved(run)
    finish(run, stop=5)
    run.optimizer.load_state_dict(state["optimizer"])
    spent = {
        name: accounting.epsilon(run.plan.event_after(2, ((2, 5),)), 1e-5, name)
        for name in accounting.accountants_for(run.plan.event_after(2, ((2, 5),)))
    }
    assert run.steps_taken == 2
    assert run.epsilon() == min(spent.values()) > run.plan.epsilon(1e-5, steps=2)
    assert {name: run.epsilon(accountant=name) for name in spent} == spent
    assert run.statement().epsilon == spent
    assert any("3 further steps" in caveat for caveat in run.statement().caveats)


def test_a_fork_under_a_fixed_order_keeps_the_order() -> None:
    """A new order halfway would let an example take part twice in one epoch, more often than is accounted."""
    run = start(model(), sampling="fixed_order")
    order = [run.plan.sampler.indices(run._engine.mechanism.keys.sampling, t).tolist() for t in range(8)]
    finish(run, stop=2)
    state = saved(run)
    again = start(model(), sampling="fixed_order", key=bytes(32))
    again.optimizer.load_state_dict(state["optimizer"])
    keys = again._engine.mechanism.keys
    assert keys.noise != run._engine.mechanism.keys.noise
    assert [again.plan.sampler.indices(keys.sampling, t).tolist() for t in range(8)] == order


def test_the_noise_share_of_a_second_moment_follows_the_saved_noise_multiplier() -> None:
    def fresh(sigma: float, **options: Any) -> dpcore.torch.PrivateRun:
        method = METHODS["adam bias corrected"](8).with_noise_multiplier(sigma)
        return start(model().double(), method, data=(DATA[0].double(), DATA[1]), sampling="fixed_order", **options)

    end = finish(fresh(1.0 - 1e-9))
    run = fresh(1.0 - 1e-9)
    finish(run, stop=2)
    state = saved(run)
    other = fresh(1.0, key=bytes(32))
    finish(other, stop=1)  # which makes it work out the variances of its own noise
    load(other, state)
    assert torch.equal(finish(other), end)
