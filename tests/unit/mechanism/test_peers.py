"""Several processes take a run's steps: the same noise bits, and the same parameters where sums are exact."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpcore_numpy as backend
from dpcore import methods
from dpcore.errors import ArgumentError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.peers import Peers
from dpcore.plan.plan import Plan
from dpcore.sampling import PoissonSampler, UserSampler
from dpcore.sampling.base import shard
from dpcore.spec import keys as spent
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout, Piece
from tests.depth import pairs
from tests.unit.mechanism.test_mechanism import STATEFUL, sampler_of
from tests.unit.mechanism_tools import started

STEPS = 5
# Sums over the coordinates of all processes, whose order depends on how many there are; or sums that are not exact.
ROUNDED = {"doppler, optimal", "accelerated", "scaled", "dp_adagrad", "disk, kalman", "doubling"}


class Forgetful(dict[str, int]):
    """The rows that were released: none, since every thread, and every number of them, releases the same ones."""

    def get(self, digest: str, default: Any = None) -> Any:
        return default


@pytest.fixture(autouse=True, scope="module")
def _rows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spent, "_begun", Forgetful())
        yield


class InThreads(Peers):
    """Processes that are threads of this one."""

    def __init__(self, rank: int, world_size: int, shared: dict[str, Any]) -> None:
        self.rank, self.world_size, self.shared = rank, world_size, shared

    def _all(self, value: Any) -> list[Any]:
        self.shared["values"][self.rank] = value
        self.shared["barrier"].wait(60)
        found = list(self.shared["values"])
        self.shared["barrier"].wait(60)
        return found

    def totals(self, like: Sequence[Any], backend: Any) -> list[Any]:
        return Peers().totals(like, backend)

    def reduced(self, totals: list[Any], pieces: Sequence[Piece]) -> list[Any]:
        every = self._all([total.copy() for total in totals])
        return [sum(of[i] for of in every)[start:stop] for i, start, stop in pieces]

    def whole(self, parts: Sequence[Any], pieces: Sequence[Piece], layout: Layout) -> list[Any]:
        flat = np.concatenate(self._all(np.concatenate([part.copy() for part in parts])))
        return np.split(flat, np.cumsum([entry.size for entry in layout.entries])[:-1])

    def added(self, values: Sequence[float]) -> list[float]:
        return [float(x) for x in np.sum(self._all(list(values)), axis=0)]

    def same(self, value: Any) -> Any:
        return self._all(value)[0]

    def agree(self, failed: bool, state: str = "", settings: str = "") -> None:
        assert not any(self._all(failed))
        # Branches and keys that a load makes are each thread's own here.
        assert len(set(self._all(settings))) == 1


def run(method: Any, sampler: Any, shapes: Sequence[tuple[int, ...]], dtype: str, peers: Any, state: Any = None) -> Any:
    """Take steps with vectors of small numbers whose sums are exact in any order, from a state if one is given."""
    layout = Layout.of((f"p{i}", shape) for i, shape in enumerate(shapes))
    plan = Plan(method, sampler, 2 * STEPS, tuple(entry.name for entry in layout.entries))
    parameters = [np.full(shape, 0.25, dtype) for shape in shapes]
    mechanism = Mechanism(
        plan, layout, parameters, backend=backend, keys=RunKeys(noise=bytes(32), sampling=bytes(32)), peers=peers
    )
    if state is not None:
        keys = mechanism.keys
        mechanism.load_state_dict(state[1])
        mechanism.keys = keys  # a load forks, by chance
        for parameter, kept in zip(parameters, state[0], strict=True):
            parameter[...] = kept
    drawn = []
    for _ in range(STEPS):
        indices = mechanism.draw()
        for point in mechanism.points():
            assert [p.shape for p in mechanism.at(parameters, point)] == list(shapes)
        drawn.append(indices)
        rows = [(indices[:, None] * 7 + np.arange(entry.size) * 3 + mechanism.step) % 5 - 2 for entry in layout.entries]
        blocks = [(block / 1024).astype(dtype) for block in rows]
        units = mechanism.share.units(mechanism.keys.sampling, mechanism.step)
        if units is not None:
            owner = np.repeat(np.arange(len(units)), units)
            summed = [np.zeros((len(units), block.shape[1]), dtype) for block in blocks]
            for total, block in zip(summed, blocks, strict=True):
                np.add.at(total, owner, block)
            blocks = summed
        mechanism.add(blocks)
        mechanism.release(parameters)
    released = [p.copy() for p in parameters], [o.copy() for o in mechanism.output(parameters)]
    return *released, mechanism.state_dict(), drawn, mechanism


def in_threads(world: int, work: Callable[[Peers], Any]) -> list[Any]:
    """Return what each of `world` threads found."""
    shared = {"barrier": threading.Barrier(world), "values": [None] * world}
    found: list[Any] = [None] * world

    def one(rank: int) -> None:
        try:
            found[rank] = work(InThreads(rank, world, shared))
        except Exception as cause:  # noqa: BLE001
            found[rank] = cause
            shared["barrier"].abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    failures = [each for each in found if isinstance(each, Exception)]
    for failure in sorted(failures, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        raise failure
    return found


def together(world: int, *arguments: Any) -> list[Any]:
    """Return what each of `world` threads found in a run."""
    method, sampler, shapes, dtype, *state = arguments
    return in_threads(world, lambda peers: run(method, sampler, shapes, dtype, peers, *state))


def assert_same(alone: Any, found: list[Any], exact: bool) -> None:
    same = np.testing.assert_array_equal if exact else np.testing.assert_allclose
    options = {} if exact else {"rtol": 1e-9, "atol": 1e-12}
    for rank, (parameters, output, state, _, mechanism) in enumerate(found):
        for ours, theirs in zip([*parameters, *output], [*alone[0], *alone[1]], strict=True):
            same(ours, theirs, **options)
        for part in ("public", "secret"):
            ours, theirs = (of[part]["arrays"] for of in (state, alone[2]))
            assert ours.keys() == theirs.keys()
            for name, array in ours.items():
                same(array, theirs[name], err_msg=f"{name} of rank {rank}", **options)
        assert mechanism.clip_norms == alone[4].clip_norms
    drawn = [np.concatenate(shares) for shares in zip(*(each[3] for each in found), strict=True)]
    for joined, whole in zip(drawn, alone[3], strict=True):
        np.testing.assert_array_equal(joined, whole)


SOME = {name: method for name, method in STATEFUL.items() if method.galore is None}
SOME["disk"] = methods.disk(lr=0.1, noise_multiplier=1.0, clipping="standard")  # factors of 1: sums are exact
SHAPES = ((3, 5), (1,), (0,), (4097,), (2, 2))


@pytest.mark.parametrize(("name", "world"), pairs(SOME, [2, 3, 4], 2))
def test_every_method(name: str, world: int):
    arguments = SOME[name], sampler_of(SOME[name]), SHAPES, "float64"
    assert_same(run(*arguments, Peers()), together(world, *arguments), name not in ROUNDED)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any),
    world=st.integers(1, 6),
    dtype=st.sampled_from(["float32", "float64"]),
    name=st.sampled_from(["disk", "memf, banded", "adaptive clip", "averages"]),
)
def test_sizes_that_do_not_divide(sizes: list[int], world: int, dtype: str, name: str):
    """Some processes own nothing, some have no example."""
    arguments = SOME[name], sampler_of(SOME[name]), [(size,) for size in sizes], dtype
    assert_same(run(*arguments, Peers()), together(world, *arguments), True)


@pytest.mark.parametrize("world", [2, 3])
def test_users_and_per_layer_clipping(world: int):
    method = methods.dp_sgd(lr=0.5, noise_multiplier=1.0, clipping_groups="per_tensor")
    users = UserSampler(PoissonSampler(dataset_size=10, batch_size=4), np.arange(30) % 10, 3)
    arguments = method, users, SHAPES, "float64"
    assert_same(run(*arguments, Peers()), together(world, *arguments), True)


@pytest.mark.parametrize(
    ("name", "worlds"),
    pairs(["disk", "memf, banded", "averages", "adaptive clip", "dp_adam"], [(4, 1), (4, 3), (1, 2)], 2),
)
def test_a_state_goes_on_in_another_number_of_processes(name: str, worlds: tuple[int, int]):
    before, after = worlds
    arguments = SOME[name], sampler_of(SOME[name]), SHAPES, "float64"
    alone = run(*arguments, Peers())
    expected = run(*arguments, Peers(), (alone[0], alone[2]))
    saved = together(before, *arguments)[0]
    assert_same(expected, together(after, *arguments, (saved[0], saved[2])), True)


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5), world=st.integers(1, 9))
def test_pieces_cut_all_coordinates_once(sizes: list[int], world: int):
    layout = Layout.of((f"p{i}", (size,)) for i, size in enumerate(sizes))
    found = [layout.pieces(rank, world) for rank in range(world)]
    places = [(tensor, k) for pieces in found for tensor, start, stop in pieces for k in range(start, stop)]
    assert places == [(i, k) for i, size in enumerate(sizes) for k in range(size)]
    lengths = [sum(stop - start for _, start, stop in pieces) for pieces in found]
    assert max(lengths) == lengths[0] == -(-layout.dimension // world)
    for pieces in found:
        for entry, (tensor, start, stop) in zip(layout.of_pieces(pieces).entries, pieces, strict=True):
            assert (entry.first, entry.size) == (layout.entries[tensor].first + start, stop - start)


@given(step=st.integers(0, 20), world=st.integers(1, 6))
def test_the_place_of_a_share(step: int, world: int):
    for sampler in (
        PoissonSampler(dataset_size=20, batch_size=6),
        UserSampler(PoissonSampler(dataset_size=10, batch_size=4), np.arange(30) % 10, 3),
    ):
        before = 0
        for rank in range(world):
            share = shard(sampler, rank, world)
            assert share.first(bytes(32), step) == before
            before += len(share.indices(bytes(32), step))


def test_state_and_noise_are_shared_out():
    """Each process keeps and draws its own part of all that a step makes after the sum."""
    drawn: list[int] = []
    real = backend.step

    def counting(slots: Any, *arguments: Any, **options: Any) -> None:
        drawn.append(sum(slot.parameter.size for slot in slots))
        real(slots, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "step", counting)
        found = together(4, SOME["dp_adam"], PoissonSampler(dataset_size=50, batch_size=10), [(4096,)], "float32")
    assert drawn == [1024] * 4 * STEPS
    assert [sum(v.size for m in each[4].vectors.moments for v in m) for each in found] == [2048] * 4


def test_what_needs_whole_matrices_is_refused():
    with pytest.raises(ArgumentError, match=r"galore.*2 processes"):
        together(2, STATEFUL["doppler, galore"], PoissonSampler(dataset_size=50, batch_size=10), [(3, 4)], "float32")


class Interrupted(Peers):
    """Its third sum does not arrive."""

    calls = 0

    def reduced(self, totals: list[Any], pieces: Sequence[Piece]) -> list[Any]:
        self.calls += 1
        if self.calls == 3:
            raise KeyboardInterrupt
        return totals


def test_a_sum_that_does_not_arrive_spends_its_row_and_keeps_the_noise_in_step():
    method = SOME["memf, banded"]
    found = []
    for peers in (Peers(), Interrupted()):
        plan = Plan(method, sampler_of(method), 2 * STEPS, ("p0",))
        keys = RunKeys(noise=bytes(32), sampling=bytes(32))
        mechanism, x = started(plan, [("p0", (10,))], np.float64, keys=keys, peers=peers)
        spent._begun.clear()
        for step in range(STEPS):
            assert mechanism.step == step
            mechanism.add([np.zeros((1, 10))])
            try:
                mechanism.release(x)
            except KeyboardInterrupt:
                assert (mechanism.step, step) == (3, 2)
        found.append(mechanism.vectors.noise_state[0])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
