"""Correlated noise step by step: the same bits straight, resumed, shared out and made anew, however it is streamed."""

from functools import cache
from typing import Any

import numpy as np
import pytest

import dpcore_numpy
from dpcore import methods
from dpcore.errors import ArgumentError
from dpcore.mechanism import noise_state
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.peers import Peers
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler
from dpcore.spec import keys as spent
from dpcore.spec.keys import RunKeys
from dpcore.stages.strategies import (
    BLT,
    Banded,
    BandedToeplitz,
    Dense,
    InBlocks,
    NamedStrategy,
    SquareRoot,
    Strategy,
    Tree,
    TreeOptimal,
    banded_inverse_square_root,
    in_blocks,
    streaming_cost,
)
from tests.depth import chosen, pairs
from tests.refused import refused
from tests.unit.mechanism.test_peers import Forgetful, in_threads
from tests.unit.mechanism_tools import NumPyBut, started
from tests.unit.stages.test_strategies import random_lower

STEPS, SIZES = 72, (7, 3)  # beyond a node of 64 steps of the trees
INVERSE, ROOT = banded_inverse_square_root(4, STEPS), SquareRoot(STEPS)
DENSE = Dense(random_lower(STEPS, STEPS, 5))
STREAMS: dict[str, Strategy] = {
    "banded": Banded.from_matrix(random_lower(STEPS, 5, 1)), "banded toeplitz": BandedToeplitz((3.0, 1.0, -0.5, 0.25)),
    "one band": BandedToeplitz((3.0,)), "banded inverse": INVERSE, "banded inverse redrawn": in_blocks(INVERSE, 1),
    "banded inverse in blocks": in_blocks(INVERSE, 6), "blt": BLT((0.4, 0.15), (0.9, 0.5), STEPS), "dense": DENSE,
    "dense in blocks": in_blocks(DENSE, 16), "tree": Tree(STEPS), "tree in blocks": in_blocks(Tree(STEPS), 8),
    "tree-optimal in blocks": in_blocks(TreeOptimal(STEPS), 30), "square-root in blocks": in_blocks(ROOT, 7),
    "square-root in one block": in_blocks(ROOT, 1000),
}  # fmt: skip


class Counting(NumPyBut):
    """Keeps the rows that it drew, and counts how often it was asked."""

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def normal(self, key: bytes, row: int, stream: int, start: int, size: int, **settings: Any) -> Any:
        self.drawn.append(row)
        return kept_row(key, row, stream, start, size, settings["bits"]).copy()


@cache
def kept_row(key: bytes, row: int, stream: int, start: int, size: int, bits: int) -> Any:
    return dpcore_numpy.normal(key, row, stream, start, size, bits=bits)


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spent, "_begun", Forgetful())


def build(strategy: Any, peers: Any = None, variant: str | None = None) -> tuple[Mechanism, list[Any]]:
    """A run on zero gradients: its parameters show the noise, and nothing else."""
    settings: dict[str, Any] = {"lr": 1.0, "noise_multiplier": 1.5, "strategy": strategy}
    method = methods.memf(base="sgd", **settings) if variant is None else methods.dp_adam(variant=variant, **settings)
    plan = Plan(method, FixedOrderSampler(dataset_size=40, batch_size=10), STEPS, ("p0", "p1"))
    keys = RunKeys(noise=bytes(range(32)), sampling=bytes(32))
    shapes = [(f"p{i}", (size,)) for i, size in enumerate(SIZES)]
    return started(plan, shapes, backend=Counting(), keys=keys, peers=peers)


def take(mechanism: Mechanism, x: list[Any], until: int) -> list[bytes]:
    """Step to `until`; return the parameters' bits after each step."""
    found = []
    while mechanism.step < until:
        mechanism.release(x)
        found.append(b"".join(p.tobytes() for p in x))
    return found


def load(mechanism: Mechanism, state: dict[str, Any], x: list[Any], then: list[Any]) -> None:
    """Load without the fork's own keys, which would hide whether anything else is missing."""
    mechanism.load_state_dict(state)
    mechanism.keys = RunKeys.from_dict(state["secret"])
    for mine, saved in zip(x, then, strict=True):
        mine[...] = saved


@cache
def straight(name: str) -> list[bytes]:
    return take(*build(STREAMS[name]), STEPS)


@pytest.mark.parametrize("name", STREAMS)
def test_a_run_that_stops_anywhere_goes_on_with_the_same_bits(name: str) -> None:
    rng = np.random.default_rng(sum(name.encode()))
    mechanism, x = build(STREAMS[name])
    found = []
    for stop in [*np.sort(rng.choice(np.arange(1, STEPS), 6, replace=False)).tolist(), STEPS]:
        found += take(mechanism, x, stop)
        state, then = mechanism.state_dict(), [p.copy() for p in x]
        assert len(state["secret"]["arrays"]) == len(SIZES) * STREAMS[name].order
        mechanism, x = build(STREAMS[name])
        load(mechanism, state, x, then)
    assert found == straight(name)


@pytest.mark.parametrize("name", chosen(list(STREAMS)[::3], list(STREAMS)))
def test_four_processes_make_the_noise_of_one(name: str) -> None:
    def work(peers: Peers) -> list[bytes]:
        return take(*build(STREAMS[name], peers), STEPS)

    for found in in_threads(4, work):
        assert found == straight(name)


def without_noise(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"secret": state["secret"] | {"arrays": {}}}


@pytest.mark.parametrize("variant", [None, "independent_moments"])
@pytest.mark.parametrize(("name", "stop"), pairs(STREAMS, [1, 3, 33, 48, 49], 3))
def test_vectors_that_were_lost_are_made_anew(name: str, stop: int, variant: str | None) -> None:
    """Also where rows were drawn under the keys of two branches, and for both releases of a step."""
    mechanism, x = build(STREAMS[name], variant=variant)
    take(mechanism, x, 2 * stop // 3)
    mechanism.load_state_dict(mechanism.state_dict())  # from here on other keys
    take(mechanism, x, stop)
    state, then = mechanism.state_dict(), [p.copy() for p in x]
    ours = take(mechanism, x, stop + 9)
    for damaged in (state, without_noise(state)):
        other, y = build(STREAMS[name], variant=variant)
        load(other, damaged, y, then)
        again = other.state_dict()["secret"]["arrays"]
        assert again.keys() == state["secret"]["arrays"].keys()
        spent_block = isinstance(STREAMS[name], InBlocks) and stop % STREAMS[name].block == 0
        for vector, wanted in () if spent_block else state["secret"]["arrays"].items():
            np.testing.assert_array_equal(again[vector], wanted)
        assert take(other, y, stop + 9) == ours


@pytest.mark.parametrize("name", STREAMS)
def test_an_interrupted_step_leaves_no_gap(name: str) -> None:
    """The vectors of one tensor missed a step, or hold half of it."""
    mechanism, x = build(STREAMS[name])
    take(mechanism, x, 40)
    real = mechanism.backend.step

    def amid(*arguments: Any, **settings: Any) -> None:
        for vector in mechanism.vectors.noise_state[1]:
            vector += 1
        raise KeyboardInterrupt

    mechanism.backend.step = mechanism.backend.update = amid
    with pytest.raises(KeyboardInterrupt):
        mechanism.release(x)
    mechanism.backend.step, mechanism.backend.update = real, dpcore_numpy.update
    assert mechanism.step == 41
    whole, y = build(STREAMS[name])
    take(whole, y, 41)
    for mine, theirs in zip(x, y, strict=True):
        mine[...] = theirs
    assert take(mechanism, x, 60) == take(whole, y, 60)


def test_rings_are_rebuilt_from_the_rows_that_they_need() -> None:
    drawn = {}
    for name in ("banded", "banded inverse", "dense in blocks", "dense"):
        mechanism, x = build(STREAMS[name])
        take(mechanism, x, 50)
        other, _ = build(STREAMS[name])
        load(other, without_noise(mechanism.state_dict()), x, x)
        other.state_dict()
        drawn[name] = other.backend.drawn[: len(other.backend.drawn) // 2]  # of the first tensor
    blocks = [*range(50)]
    assert drawn == {"banded": blocks, "banded inverse": [47, 48, 49], "dense in blocks": blocks, "dense": []}


@pytest.mark.parametrize(("strategy", "blocks"), [(DENSE, (1, 2, 16, 99, 1000)), (INVERSE, (1, 2, 7)), (ROOT, (1, 3))])
def test_the_size_of_a_block_changes_no_bit(strategy: Strategy, blocks: tuple[int, ...]) -> None:
    """And a state saved under one is loaded under another."""
    runs = [build(in_blocks(strategy, block)) for block in blocks]
    found = [take(*run, 45) for run in runs]
    assert all(each == found[0] for each in found)
    states = [(run[0].state_dict(), [p.copy() for p in run[1]]) for run in runs]
    wanted = take(*runs[0], 70)
    for state, then in states:
        for block in blocks:
            other, x = build(in_blocks(strategy, block))
            load(other, state, x, then)
            assert take(other, x, 70) == wanted


def test_the_pieces_of_a_block_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are added up a few coordinates at a time."""
    for piece in (1, 2, 7):
        monkeypatch.setattr(noise_state, "_PIECE", piece)
        assert take(*build(STREAMS["dense in blocks"]), STEPS) == straight("dense in blocks")


def test_a_ring_of_rows_and_the_rows_drawn_again_are_one_noise() -> None:
    ring, again = (
        np.frombuffer(b"".join(straight(name)), np.float32) for name in ("banded inverse", "banded inverse redrawn")
    )
    np.testing.assert_allclose(ring, again, atol=1e-4)


@pytest.mark.parametrize("name", STREAMS)
def test_a_run_draws_the_rows_that_its_cost_says(name: str) -> None:
    mechanism, x = build(STREAMS[name], variant="independent_moments")  # which composes its steps
    take(mechanism, x, STEPS)
    cost = streaming_cost(STREAMS[name], STEPS)
    assert len(mechanism.backend.drawn) == pytest.approx(2 * len(SIZES) * STEPS * cost.rows_drawn)
    assert [len(vectors) for vectors in mechanism.vectors.noise_state] == [cost.vectors] * 2


def test_a_state_of_another_matrix_is_refused() -> None:
    mechanism, x = build(STREAMS["banded toeplitz"])
    take(mechanism, x, 3)
    state = mechanism.state_dict()
    for other, words in (
        (
            BandedToeplitz((3.0, 1.0, -0.5, 0.2)),
            r"correlated by banded-toeplitz \w+, this run's by banded-toeplitz \w+;",
        ),
        (NamedStrategy("tree"), "the rows of one matrix cannot follow those of another"),
        (None, "this run's by no strategy"),
    ):
        run, _ = build(other)
        for damaged in (state, without_noise(state)):
            refused(ArgumentError, words, run.load_state_dict, damaged)
