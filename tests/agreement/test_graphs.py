"""Launches that are recorded once and repeated: every bit is that of a run that makes them anew.

In the interpreter a recording is made again call by call, with the arguments it was recorded with; on a device it is a
CUDA graph. So what these tests show of recordings holds for both, and on a device they show the graphs.
"""

import gc
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import torch

import dpcore
import dpcore_triton
from dpcore import methods, sampling
from dpcore.errors import ArgumentTypeError, BackendError, PrivacyError, SpeedWarning
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import NoiseRow, Slot, UpdateSettings
from dpcore.stages.clipping.blocks import Embedding, Linear, Rows, Tied
from dpcore.stages.clipping.clip import Grouping
from dpcore.stages.clipping.clipped_sum import add_clipped, add_sums
from dpcore.stages.filters import ScalarKalman
from dpcore.stages.updates.schedules import WarmupCosine
from dpcore_triton import launch
from dpcore_triton.graphs import FREE_CAPTURES, Graphs
from dpcore_triton.kept import Kept
from dpcore_triton.recording import recording
from tests.agreement.runs import METHODS as TRAINED
from tests.agreement.runs import RNG, train
from tests.agreement.test_methods import METHODS, STEPS
from tests.depth import chosen
from tests.refused import refused

few = settings(max_examples=chosen(1, 10))
LONG, SHAPES = 5, [("w", (5, 3)), ("b", (17,))]
NOISE = {"noise_multiplier": 0.7, "batch_size": 6, "max_grad_norm": 0.5}


step_module = sys.modules["dpcore_triton.step"]


class Run:
    """A run whose blocks lie at one place, as a captured model's do."""

    def __init__(self, method: Any, backend: Any, seed: int, steps: int = STEPS, rng: str = RNG) -> None:
        draw, names = np.random.default_rng(seed), tuple(name for name, _ in SHAPES)
        size = 1 if method.update.second_moment == "joint" else 6
        sampler = sampling.FixedOrderSampler(dataset_size=size * LONG, batch_size=size)
        plan = Plan(replace(method, batch_size=size), sampler, steps, names)
        self.x = [backend.from_numpy(draw.normal(size=shape).astype(np.float32)) for _, shape in SHAPES]
        keys = RunKeys.new(seed.to_bytes(4, "little") * 8, exact_key=True)
        self.mechanism = Mechanism(plan, Layout.of(SHAPES), self.x, backend=backend, keys=keys, rng=rng)
        self.sizes = [p.numel() for p in self.x]
        self.rows = [[backend.from_numpy(np.zeros((size, d), np.float32)) for d in self.sizes] for _ in range(2)]
        self.square = [backend.from_numpy(np.full(d, 2.0, np.float32)) for d in self.sizes]
        self.draw, self.backend = draw, backend

    def step(self) -> list[torch.Tensor]:
        """Take a step of two micro-batches; return what it left."""
        for rows in self.rows:
            for block in rows:
                block.copy_(torch.from_numpy(self.draw.normal(size=block.shape).astype(np.float32)))
            self.mechanism.add(rows)
        public = self.square if self.mechanism.plan.method.update.second_moment == "public" else None
        self.mechanism.release(self.x, public=public)
        vectors = self.mechanism.vectors
        kept = [*vectors.filter_state, *vectors.noise_state, *vectors.moments]
        return [array.clone().cpu() for array in (*self.x, *(vector for one in kept for vector in one))]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(one, other, strict=True))


def replays(graphs: Graphs) -> list[int]:
    return sorted(graph.replays for graph in graphs.kept.values())


# Other steps than those of the next test, which compares bits, too.
@pytest.mark.parametrize("name", chosen(["disk"], list(METHODS)))
def test_replayed_runs_have_the_bits_of_others(name: str) -> None:
    @few
    @given(METHODS[name], st.integers(0, 2**32 - 1))
    def check(method: Any, seed: int) -> None:
        assume(seed)
        graphs = Graphs(dpcore_triton)
        plain, replayed = Run(method, dpcore_triton, seed), Run(method, graphs, seed)
        for step in range(STEPS):
            assert same_bits(plain.step(), replayed.step()), step
        # An adapted norm is another number in every step, and three steps of phases need not hold three of one kind.
        if getattr(method.clip, "adaptive", None) is None and method.preconditioning is None:
            assert sum(replays(graphs)) > 0

    check()


LONG_STRATEGIES = {
    "banded": lambda: dpcore.strategies.BandedToeplitz([1.0, 0.5, 0.25]),
    "blt": lambda: dpcore.strategies.BLT([0.4, 0.1], [0.9, 0.3], LONG),
}
STEADY: dict[str, Callable[[], Any]] = {
    "momentum": lambda: methods.dp_sgd(lr=0.3, base="momentum", schedule=WarmupCosine(2, 0.1), **NOISE),
    "adam": lambda: methods.dp_adam(lr=0.05, variant="bias_corrected", eps=0.05, **NOISE),
    "independent moments": lambda: methods.dp_adam(lr=0.05, variant="independent_moments", eps=0.05, **NOISE),
    "disk": lambda: methods.disk(lr=0.3, kappa=ScalarKalman(0.1, 0.2, 0.7), filter="second-order", **NOISE),
    "phases": lambda: methods.dp_adam(
        lr=0.05, variant="delayed_scale", unscaled_steps=1, scaled_steps=1, scale_eps=0.1, eps=0.01, **NOISE),
    "banded": lambda: methods.memf(lr=0.3, strategy=LONG_STRATEGIES["banded"](), **NOISE),
    "blt": lambda: methods.memf(lr=0.3, strategy=LONG_STRATEGIES["blt"](), **NOISE),
}  # fmt: skip


@pytest.mark.parametrize("name", chosen(["phases", "banded"], list(STEADY)))
def test_launches_of_one_key_are_the_same_and_are_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a replay right: all arguments are the same, addresses included; only the numbers' memory changes."""
    seen: dict[Any, list[Any]] = {}
    sent: list[bytes] = []

    def watched(planned: Any, numbers: torch.Tensor) -> None:
        calls: list[Any] = []
        with launch.told(calls):
            start(planned, numbers)
        told = [(*call[:3], call.meta, tuple(_address(arg, numbers) for arg in call.args)) for call in calls]
        assert len(told) == 1
        assert seen.setdefault(planned.key, told) == told

    def asked(*args: Any) -> Any:
        planned = plan(*args)
        sent.append(planned.numbers[:2].tobytes())
        return planned

    start, plan, graphs = step_module.start, step_module.plan, Graphs(dpcore_triton)
    monkeypatch.setattr(step_module, "start", watched)  # of the run without graphs
    monkeypatch.setattr(sys.modules["dpcore_triton.graphs"], "plan", asked)
    plain, replayed = (Run(STEADY[name](), backend, 5, LONG) for backend in (dpcore_triton, graphs))
    for step in range(LONG):
        assert same_bits(plain.step(), replayed.step()), step
    kinds = 2 if name == "phases" else 1
    assert len(seen) == kinds
    # Each kind of two micro-batches and of a step is seen once and recorded once. The last step of five is of one kind.
    assert sum(replays(graphs)) == (3 * (LONG - 2) if kinds == 1 else 3)
    assert len(set(sent)) == LONG  # no two steps draw one row


def _address(argument: Any, numbers: torch.Tensor) -> Any:
    if argument is numbers:
        return "numbers"
    return argument.data_ptr() if isinstance(argument, torch.Tensor) else argument


class Closed:
    """An account that lets no release through."""

    def before_release(self, row: int) -> None:
        raise PrivacyError(f"step={row + 1}: the budget is spent")


def test_a_release_that_its_account_refuses_replays_nothing() -> None:
    graphs = Graphs(dpcore_triton)
    plain, replayed = (Run(STEADY["momentum"](), backend, 5, LONG) for backend in (dpcore_triton, graphs))
    for _ in range(3):
        plain.step()
        replayed.step()
    before, made = [x.clone() for x in replayed.x], replays(graphs)[0]
    replayed.mechanism.account = Closed()  # type: ignore[assignment]
    refused(PrivacyError, "the budget is spent", replayed.mechanism.release, replayed.x)
    assert all(torch.equal(now, then) for now, then in zip(replayed.x, before, strict=True))
    assert replays(graphs)[0] == made
    replayed.mechanism.account = None
    assert same_bits(plain.step(), replayed.step())
    assert replays(graphs)[0] > made


def one_slot(size: int = 20) -> Slot[torch.Tensor]:
    ones = np.ones(size, dtype=np.float32)
    return Slot(dpcore_triton.from_numpy(ones), dpcore_triton.from_numpy(ones.astype(np.float64)), 0)


def after(
    backend: Any, slot: Slot[torch.Tensor], noise: NoiseRow, rate: float = 0.1, unit: float = 1.5 * 2.0**-36
) -> bytes:
    """Take a step from one place, and return where it led."""
    slot.parameter.fill_(1.0)
    backend.step([slot], noise, 2.0, (), "sgd", [UpdateSettings(rate)], 1, unit=unit)
    return slot.parameter.cpu().numpy().tobytes()


def test_another_key_stream_scale_place_or_rate_is_never_the_recorded_one() -> None:
    graphs, slot, other = Graphs(dpcore_triton, most=2), one_slot(), one_slot()
    noise = NoiseRow(bytes(range(32)), 3, 0, 1.5, rng="philox")
    cases = [
        (slot, noise, 0.1), (slot, noise._replace(row=4), 0.1), (slot, noise._replace(row=2**32 - 1), 0.1),
        (slot, noise._replace(scale=1.5 + 2**-10), 0.1, (1.5 + 2**-10) * 2.0**-36), (slot, noise, 0.2),
        (slot, noise._replace(key=bytes(32)), 0.1),
        (slot, noise._replace(stream=3), 0.1), (slot, noise._replace(rng="chacha20"), 0.1), (other, noise, 0.1),
        (slot, noise._replace(scale=0.0), 0.1), (slot._replace(first=4096), noise, 0.1),
    ]  # fmt: skip
    wanted = [after(dpcore_triton, *case) for case in cases]
    assert wanted[0] == after(dpcore_triton, other, noise)  # the same values, elsewhere
    assert len(set(wanted)) == len(cases) - 1
    for _ in range(3):
        assert [after(graphs, *case) for case in cases] == wanted
    # Two graphs are kept: those of cases that share a key are replayed, whatever else is asked for between.
    assert len(graphs.kept.values()) == 2


def test_tensors_take_the_settings_of_their_group_whatever_the_groups_were_before() -> None:
    graphs, slots = Graphs(dpcore_triton), [one_slot()._replace(first=4096 * i) for i in range(3)]
    for rates in ((1.0, 2.0, 1.0), (1.0, 1.0, 2.0), (3.0, 3.0, 3.0), (1.0, 2.0, 1.0), (5.0, 6.0, 5.0)) * 2:
        for slot in slots:
            slot.parameter.fill_(0.0)
        noise, settings_ = NoiseRow(bytes(32), 0, 0, 0.0), [UpdateSettings(r) for r in rates]
        graphs.step(slots, noise, 2.0, (), "sgd", settings_, 1, unit=1.0)
        assert [slot.parameter[-1].item() for slot in slots] == [-rate / 2 for rate in rates]
    assert max(replays(graphs)) >= 3


def columns_of(rows: torch.Tensor, out: torch.Tensor, weight: float) -> torch.Tensor:
    """Operations of every kind: views, new tensors, several at once, in place."""
    values, order = torch.sort(rows, dim=1, stable=True)
    halves = torch.cat([values[:, :2], order.to(values.dtype)], dim=1).split(2, dim=1)
    out += weight * halves[0].sum(0) + torch._foreach_mul([halves[1]], 2.0)[0].sum(0)
    torch._foreach_zero_([rows])
    return out * 2


def test_operations_are_repeated_on_the_same_memory() -> None:
    graphs, draw = Graphs(dpcore_triton), torch.Generator().manual_seed(1)
    rows = dpcore_triton.from_numpy(np.zeros((3, 4), np.float32))
    got, expected = (dpcore_triton.from_numpy(np.zeros(2, np.float32)) for _ in range(2))
    for _ in range(4):
        fresh = torch.randn(3, 4, generator=draw)
        rows.copy_(fresh)
        found = graphs.repeat(columns_of, rows, got, 0.5)
        rows.copy_(fresh)
        wanted = columns_of(rows, expected, 0.5)
        assert same_bits([found.cpu(), got.cpu()], [wanted.cpu(), expected.cpu()])
    assert replays(graphs) == [2]
    assert (graphs.repeat(columns_of, rows, got, -0.0).cpu() == 2 * got.cpu()).all()
    transposed = rows.T  # of the same memory
    graphs.repeat(columns_of, transposed[:, :3], got, 0.5)
    assert replays(graphs) == [2]


def summed(rows: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    dpcore_triton.weighted_sum([rows], [weights], [out])


def test_what_a_graph_reads_lives_as_long_as_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph has addresses, of tables that caches forget: in their memory other tensors would lie by then."""
    module, read = sys.modules["dpcore_triton.graphs"], list[Any]()

    def captured(calls: Any, device: torch.device) -> Any:
        read.extend(weakref.ref(arg) for call in calls for arg in call.args if isinstance(arg, torch.Tensor))
        return lambda: None  # of what it repeats it holds nothing, as a CUDA graph

    monkeypatch.setattr(module, "repeated", captured)
    monkeypatch.setattr(sys.modules["dpcore_triton.clip"], "_kept", Kept(1))
    rows, weights, out = (dpcore_triton.from_numpy(np.zeros(size, kind)) for size, kind in
                          (((2, 3), np.float32), (2, np.float64), (3, np.float64)))  # fmt: skip
    graphs = Graphs(dpcore_triton)
    for _ in range(2):
        graphs.repeat(summed, rows, weights, out)
    summed(rows.clone(), weights, out)  # of which the kernel's own cache keeps the tables now
    launch._table.cache_clear()
    launch._row_of.cache_clear()
    gc.collect()
    assert len(read) == 2
    assert all(tensor() is not None for tensor in read)


def test_a_recording_keeps_what_it_makes_and_no_view_of_an_argument() -> None:
    """A graph that kept a micro-batch's arrays would never meet another at their addresses."""
    x = dpcore_triton.from_numpy(np.ones((2, 4), np.float32))
    with recording() as record:
        half, whole = x.detach()[:, 1:].split(2, dim=1)[0] * 0.5, torch.empty_like(x)
        x += half.sum()
    kept = {tensor.untyped_storage().data_ptr() for tensor in record.kept}
    assert {half.data_ptr(), whole.data_ptr()} < kept  # and a sum
    assert x.data_ptr() not in kept


def test_arrays_that_move_at_every_call_are_not_captured_for_ever() -> None:
    graphs, out = Graphs(dpcore_triton, most=2), dpcore_triton.from_numpy(np.zeros(2, np.float32))
    many = [dpcore_triton.from_numpy(np.ones((3, 4), np.float32)) for _ in range(5)]
    for _ in range(20):
        for rows in many:
            graphs.repeat(columns_of, rows, out, 0.5)
    assert FREE_CAPTURES <= graphs.captured <= FREE_CAPTURES + graphs.found // 16 < 20


def by_value(x: torch.Tensor, out: torch.Tensor) -> None:
    out += 1 if float(x.sum()) > 0 else -1


def by_shape(x: torch.Tensor, out: torch.Tensor) -> None:
    out += len(x.nonzero())


def by_draw(x: torch.Tensor, out: torch.Tensor) -> None:
    out += torch.rand_like(x).sum() * 0 + x.sum()


@pytest.mark.parametrize("work", [by_value, by_shape, by_draw])
def test_what_may_do_something_else_is_not_repeated(work: Callable[..., None]) -> None:
    graphs = Graphs(dpcore_triton)
    x, out, expected = (dpcore_triton.from_numpy(np.zeros(1, np.float32)) for _ in range(3))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for value in (1.0, -1.0, 0.0, 2.0, -2.0):
            x.fill_(value)
            graphs.repeat(work, x, out)
            work(x, expected)
            assert out.item() == expected.item()
    assert [w.category for w in told] == [SpeedWarning]
    assert "cuda_graphs=True: a part of the step is not captured (aten." in str(told[0].message)
    assert replays(graphs) == [0]


def test_what_has_no_description_is_refused() -> None:
    graphs, x = Graphs(dpcore_triton), dpcore_triton.from_numpy(np.zeros(1, np.float32))
    for argument in ({}, lambda: x, x.add_, object(), [object()]):
        refused(ArgumentTypeError, "repeat: an argument of type", graphs.repeat, columns_of, x, argument)
    refused(ArgumentTypeError, "repeat: an argument of type", graphs.repeat, x.add_, x)


@pytest.mark.filterwarnings("ignore:cuda_graphs=True:dpcore.errors.SpeedWarning")
@pytest.mark.parametrize("tables", [False, True])
def test_sums_of_pairs_are_repeated_with_new_values(tables: bool) -> None:
    graphs, draw = Graphs(dpcore_triton), np.random.default_rng(2)

    def array(*shape: int) -> torch.Tensor:
        return dpcore_triton.from_numpy(np.zeros(shape, np.float32))

    tokens = dpcore_triton.from_numpy(np.zeros((2, 4), np.int64))
    floats = [array(2, 3, 5), array(2, 3, 4), array(2, 7), array(2, 4, 3), array(2, 4, 5), array(2, 3, 6)]
    floats.append(array(2, 30))
    linear = Linear((floats[0],), (floats[1],), (1.0,))
    tied = Tied(Embedding((tokens,), (floats[4],), (1.0,), 6), Linear((floats[0],), (floats[5],), (1.0,)))
    formed = Tied(tied.embedding, Rows(floats[6]))
    blocks = [linear, Rows(floats[2]), Embedding((tokens,), (floats[3],), (1.0,), 6), tied, formed]
    sizes, grouping = [20, 7, 18, 30, 30], Grouping(("a", "b"), ((0, 1, 3, 4), (2,)), (0.5, 0.7))
    if not tables:
        blocks, sizes = [*blocks[:2], tied.linear], [20, 7, 30]
        grouping = Grouping(("a", "b"), ((0,), (1, 2)), (0.5, 0.7))
    got, expected = ([dpcore_triton.from_numpy(np.zeros(size)) for size in sizes] for _ in range(2))
    arguments, least = (blocks, "standard", grouping, (87, 18) if tables else (20, 37)), 2.0**-36
    for unit in (least, least, least, least, 2 * least):  # an adapted grid is another key, as a clip norm is
        for values in floats:
            values.copy_(torch.from_numpy(draw.normal(size=values.shape).astype(np.float32)))
        tokens.copy_(torch.from_numpy(draw.integers(0, 6, size=(2, 4))))
        norms = graphs.repeat(add_clipped, graphs, *arguments, unit, got, [None] * len(blocks), add_sums)
        others = add_clipped(dpcore_triton, *arguments, unit, expected, [None] * len(blocks), add_sums)
        assert same_bits([norms.cpu(), *(x.cpu() for x in got)], [others.cpu(), *(x.cpu() for x in expected)])
    # On the CPU a check reads the largest token: nothing that a graph could hold.
    assert replays(graphs) == [0 if tables and launch.INTERPRETED else 2]


TRAINING = [("memf", torch.float32), ("dp_adam", torch.bfloat16)]


@pytest.mark.parametrize(("method", "dtype"), chosen(TRAINING[1:], [*TRAINING, ("dp_sgd", torch.float32)]))
def test_a_training_run_has_the_same_bits_with_graphs(method: str, dtype: torch.dtype) -> None:
    device = launch.default_device().type
    runs = [train("triton", TRAINED[method](), device, dtype, cuda_graphs=graphs) for graphs in (False, True)]
    assert same_bits(*([value.float() for value in values] for values in runs))


def test_a_backend_without_launches_has_no_graphs() -> None:
    words = r"cuda_graphs=True under backend 'torch': must be False, since only backend 'triton'"
    refused(BackendError, words, train, "torch", TRAINED["dp_sgd"](), "cpu", cuda_graphs=True)


@pytest.mark.cuda
def test_a_graph_is_replayed_on_the_stream_that_it_was_captured_for() -> None:
    graphs, slot, noise = Graphs(dpcore_triton), one_slot(), NoiseRow(bytes(range(32)), 3, 0, 1.5)
    wanted, stream = after(dpcore_triton, slot, noise), torch.cuda.Stream()
    for _ in range(3):
        assert after(graphs, slot, noise) == wanted
    assert replays(graphs) == [1]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):
            assert after(graphs, slot, noise) == wanted
    assert replays(graphs) == [1, 1]


@pytest.mark.cuda
def test_the_numbers_of_a_step_that_waits_are_not_those_of_the_next_one() -> None:
    """The host is far ahead of the device here: what it writes for later steps must not reach this one."""
    graphs, slot, noise = Graphs(dpcore_triton), one_slot(1000), NoiseRow(bytes(range(32)), 0, 0, 1.5)
    found, wanted = [], []
    for backend, released in ((graphs, found), (dpcore_triton, wanted)):
        slot.parameter.fill_(1.0)
        for row in range(20):
            torch.cuda._sleep(10_000_000)
            own = noise._replace(row=row)
            backend.step([slot], own, 2.0, (), "sgd", [UpdateSettings(0.1)], 1, unit=1.5 * 2.0**-36)
            released.append(slot.parameter.clone())
    assert replays(graphs) == [18]
    assert same_bits([x.cpu() for x in found], [x.cpu() for x in wanted])
