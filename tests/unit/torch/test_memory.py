"""Memory: what the machine has left, the peak of a step's sum, and what happens when it is not enough."""

import gc
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dpcore
from dpcore.errors import ArgumentError, ArgumentTypeError, SpeedWarning
from dpcore.sampling import PoissonSampler, UserSampler
from dpcore.spec import free_memory
from dpcore.stages.clipping.blocks import Linear, Rows
from dpcore.torch import memory
from dpcore.torch.doctor.audit_run import add_up
from dpcore.torch.gradients.proved import Program
from dpcore.torch.memory import microbatch_size
from tests.depth import pairs
from tests.unit.torch.models import Called
from tests.unit.torch.peak import peak_bytes, peak_of_sum
from tests.unit.torch_runs import DATA, METHODS, finish, model, saved, sgd, start, values

MIB = 2**20
USERS = UserSampler(PoissonSampler(dataset_size=10, batch_size=4), np.arange(30) % 10, max_examples_per_user=2)
CPU = torch.device("cpu")


def test_memory_sizes() -> None:
    for text, want in (("1 GiB", 2**30), ("512MB", 512 * 10**6), (1000, 1000), ("1.5 KiB", 1536)):
        assert memory.parse_memory(text) == want
        assert memory.limit_of(text, CPU).bytes == want
    for bad in ("lots", "1 GiBs", "", 0, -1, "0 GB", 1.5, True):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="max_memory="):
            memory.parse_memory(bad)
    assert [free_memory.words(n) for n in (5, 2048, 3.5 * MIB, 2**34, 2**50)] == [
        "5 B",
        "2 KiB",
        "3.5 MiB",
        "16 GiB",
        "1048576 GiB",
    ]


def test_the_default_is_half_of_what_the_tightest_bound_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    for bounds, want in (
        ([(6000, "this machine"), (4000, "this control group"), (None, "this control group")], 2000),
        ([(6000, "this machine"), (0, "this process's RLIMIT_AS")], 1),
        ([], memory.UNKNOWN),
    ):
        monkeypatch.setattr(free_memory, "_bounds", lambda found=bounds: iter(found))
        limit = memory.limit_of(None, CPU)
        assert limit.bytes == want
    monkeypatch.undo()
    here = memory.free_memory(CPU)[0]
    assert here is None or here > MIB
    assert start(model())._engine.limit.source.startswith("half of the ") or here is None


def test_control_groups_of_both_versions_and_all_their_parents(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert list(free_memory._control_groups(tmp_path)) == []
    write("proc/self/cgroup", "4:cpu:/x\n3:memory:/old/one\n0::/new/one\n")
    for name, value in (("memory.max", "max"), ("memory.current", "10")):
        write(f"sys/fs/cgroup/new/one/{name}", value)
    for name, value in (
        ("memory.max", "1000"),
        ("memory.current", "700"),
        ("memory.stat", "inactive_file 50\n"),
    ):
        write(f"sys/fs/cgroup/new/{name}", value)
    write("sys/fs/cgroup/memory/old/one/memory.limit_in_bytes", "900")
    write("sys/fs/cgroup/memory/old/one/memory.usage_in_bytes", "1000")
    write("sys/fs/cgroup/memory/old/one/memory.stat", "inactive_file 9\ntotal_inactive_file 70\n")
    assert [left for left in free_memory._control_groups(tmp_path) if left is not None] == [0, 350]
    write("sys/fs/cgroup/memory/old/one/memory.usage_in_bytes", "600")
    assert [left for left in free_memory._control_groups(tmp_path) if left is not None] == [309, 350]


def test_microbatches_follow_the_limit_and_are_nearly_equal() -> None:
    def size(most: int, limit: int) -> int:
        # Whatever the number of examples 400 bytes, for each 100 more.
        return microbatch_size(limit, lambda examples: 400 + 100 * examples, most)

    assert size(1000, 2000) == 16
    assert size(20, 2000) == 10  # not 16 and 4, which is filled up to 16
    assert size(9, 2000) == 9
    assert size(996, 50_000) == 336  # of whole registers, where that is little more than a third
    assert size(1000, 25_500) == 250  # 256 do not fit
    assert size(9, 1) == 1
    assert microbatch_size(1000, lambda _: 0, most=9) == 9


def wide(width: int = 20_000) -> nn.Module:
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


@pytest.mark.parametrize("way", ["pairs", "one-by-one"])
def test_the_microbatch_of_every_way_fits_the_limit_and_uses_it(way: str) -> None:
    run = start(wide(), sgd(batch_size=30), sampling="fixed-order", gradients=way, max_memory="10 MB")
    peak = peak_of_sum(run, run.microbatch_size)
    assert 5e6 < peak < 10.2e6
    assert run.microbatch_size < 30


def language(tied: bool) -> nn.Module:
    mix = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
    parts = {"embed": nn.Embedding(500, 64), "mix": mix, "out": nn.Linear(64, 500, bias=False)}
    net = Called(lambda m, tokens: m.out(m.mix(m.embed(tokens))).transpose(1, 2), **parts)
    if tied:
        net.out.weight = net.embed.weight
    return net


def recurrent() -> nn.Module:
    parts = {"embed": nn.Embedding(500, 64), "mix": nn.LSTM(64, 96, batch_first=True), "out": nn.Linear(96, 3)}
    return Called(lambda m, tokens: m.out(m.mix(m.embed(tokens))[0][:, -1]), **parts)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.GroupNorm(4, 32), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 3),
    )  # fmt: skip


def tokens(length: int) -> torch.Tensor:
    return torch.arange(30 * length).reshape(30, length) % 499


ESTIMATED = {
    "MLP": (lambda: wide(8000), DATA, "two points"),
    "CNN": (cnn, (torch.ones(30, 3, 32, 32), DATA[1]), "one point"),
    # Inner products of a unit are of all its positions: seen only where there are many, of no tile.
    "transformer": (lambda: language(False), (tokens(30), tokens(30)), "users"),
    "tied": (lambda: language(True), (tokens(8), tokens(8)), "users"),
    "LSTM": (recurrent, (tokens(60), DATA[1]), "two points"),
    "transformer, bf16": (lambda: language(False), (tokens(48), tokens(48)), "one point"),
}


@pytest.mark.parametrize("name", ESTIMATED)
def test_what_follows_from_the_graph_is_what_a_sum_takes(name: str) -> None:
    make, data, way = ESTIMATED[name]
    users, method = way == "users", METHODS["disk" if way == "two points" else "dp_sgd"](4 if way == "users" else 8)
    options = {"sampling": USERS if users else "fixed-order", "precision": "bf16" if "bf16" in name else None}
    run = start(make(), method, data=data, microbatch_size=24, **options)
    peak_of_sum(run, 24)  # a first call imports
    needed, taken = run._rehearsal.needed(24), peak_of_sum(run, 24)
    assert 0.93 * taken < needed < (1.7 if users else 1.25) * taken, needed / taken


def test_copies_of_16_bits_are_counted_where_a_backend_makes_them() -> None:
    """Triton's kernels without tensor cores read float32: all layers are copied at once, before a launch."""
    pytest.importorskip("triton")
    copies_halves, ways = (getattr(import_module("dpcore_triton.linear"), name) for name in ("copies_halves", "_ways"))
    run = start(wide(8000), sgd(batch_size=8), sampling="fixed-order", precision="bf16")
    footprint, kept = run._rehearsal.footprint, run._engine.working.kept
    with memory.Peak() as count:
        copies = ways([block.layer for block in footprint.blocks if isinstance(block, Linear)], None, norms=False)
    assert copies
    assert count.peak == footprint._copied_bytes(1, kept, partial(copies_halves, device=CPU)) > 0
    options = {"several": False, "scaled": False}
    needed, without = (footprint.needed(24, 1, kept, 0, **options, copied=lambda _, c=c: c) for c in (True, False))
    assert needed - without == pytest.approx(24 / footprint.count * count.peak, abs=1)
    seen: list[Any] = []
    footprint.needed(24, 2, kept, 0, **options, copied=lambda layer: bool(seen.append(layer)))
    assert seen
    assert all(layer.exact for layer in seen)


def test_rows_take_the_place_of_what_they_are_made_of() -> None:
    """Eight layers of many positions: one's operands are given back before the next one's rows are made."""
    net = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(8)))
    run = start(net, sgd(), data=tuple(torch.rand(2, 30, 60, 40)), loss=F.mse_loss, microbatch_size=24)
    (program,) = run._engine.gradient.proved.programs.values()
    assert all(isinstance(block, Rows) for block in program.footprint.blocks)
    assert 0 < program.footprint.making < 2 * 4 * 40 * 40
    with torch.no_grad():
        results = list(program.run(24, *net.parameters(), *torch.rand(2, 24, 60, 40)))
        blocks = program.blocks(results, 24)
    assert results == [None] * 16
    assert [block.shape for block in blocks] == [(1600,)] * 8


@pytest.mark.parametrize(
    ("name", "sampling", "way"),
    [("dp_sgd", "fixed-order", "pairs"), ("disk", "fixed-order", "one-by-one"), ("dp_sgd", USERS, "pairs")],
)
def test_what_is_measured_is_what_a_real_step_takes(name: str, sampling: Any, way: str) -> None:
    run = start(wide(8000), METHODS[name](16 if isinstance(sampling, str) else 4), sampling=sampling,
                microbatch_size=8, gradients=way)  # fmt: skip
    finish(run, stop=1)  # the first step of disk has one point
    engine, batch = run._engine, next(iter(run.loader))
    if isinstance(sampling, UserSampler):
        assert run._rehearsal.likely_examples == 20
    engine.accumulate(batch)  # what the first call imports does not count
    real, rehearsed = peak_bytes(lambda: engine.accumulate(batch)), peak_of_sum(run, 8)
    assert (0.5 if sampling is USERS else 0.8) * rehearsed < real < 1.1 * rehearsed, real / rehearsed


def test_the_copy_of_a_batch_that_is_filled_up_is_counted() -> None:
    data = torch.rand(40, 50_000), torch.arange(40) % 3
    run = start(nn.Linear(50_000, 3), sgd(batch_size=22), data=data, microbatch_size=32)
    batch = tuple(part[:31] for part in data)
    add_up(run, batch)
    assert 0.9 < peak_bytes(lambda: add_up(run, batch)) / peak_of_sum(run, 32) < 1.05


@pytest.mark.parametrize("way", ["pairs", "one-by-one"])
def test_no_tensor_outlives_the_gradients_it_was_made_for(way: str) -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))
    run = start(net, sampling="fixed-order", microbatch_size=4, gradients=way, steps=4, epochs=None)
    counts = []
    for batch in run.loader:
        run.step(batch)
        if run.steps_taken < 3:  # and to look at all objects takes long
            continue
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    assert len(counts) == 2
    assert len(set(counts)) == 1


class Hunger:
    """Lets a model's graph ask for more memory than there is as soon as it gets more than `most` examples."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allocate: str = "torch") -> None:
        self.most: Any = 4
        run = Program.__call__

        def hungry(program: Program, point: Any, held: Any, batch: Any) -> Any:
            if len(batch[0]) > self.most:
                torch.empty(2**50) if allocate == "torch" else np.empty(2**50)
            return run(program, point, held, batch)

        monkeypatch.setattr(Program, "__call__", hungry)


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(5, 3)


@pytest.mark.parametrize(("name", "allocate"), pairs(["disk", "adaptive clip", "adam public"], ["torch", "numpy"], 2))
def test_out_of_memory_the_step_begins_anew_with_half_the_microbatch(
    name: str, allocate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hunger(monkeypatch, allocate)

    def run(size: int) -> torch.Tensor:
        torch.manual_seed(1)
        return finish(start(linear(), METHODS[name](10), sampling="fixed-order", microbatch_size=size), stop=3)

    with pytest.warns(SpeedWarning, match="out of memory: takes half of the micro-batch of 8") as told:
        halved = run(8)
    assert len(told) == 1
    # Bit by bit: nothing of a failed attempt is in any sum, and no noise was drawn for it.
    assert torch.equal(halved, run(4))


def test_a_microbatch_that_memory_cut_is_not_what_a_checkpoint_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    Hunger(monkeypatch)
    run = start(linear(), microbatch_size=8, sampling="fixed-order")
    with pytest.warns(SpeedWarning):
        finish(run, stop=1)
    assert run.microbatch_size == 4
    assert saved(run)["optimizer"]["dpcore"]["public"]["microbatch_size"] == 8


def test_one_example_that_does_not_fit_is_refused_and_the_step_may_be_taken_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hunger = Hunger(monkeypatch)
    run, straight = (start(linear(), microbatch_size=1, sampling="fixed-order") for _ in range(2))
    finish(straight, stop=1)
    batch = next(iter(run.loader))
    hunger.most = 0
    with pytest.raises(ArgumentError, match="microbatch_size=1: even one example") as refusal:
        run.step(batch)
    assert memory.is_out_of_memory(refusal.value.__cause__)
    hunger.most = 4
    run.step(batch)
    assert torch.equal(values(run.model), values(straight.model))


def test_other_errors_are_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for cause in (RuntimeError("shape"), ValueError("DefaultCPUAllocator: "), KeyError("memory")):
        assert not memory.is_out_of_memory(cause)
    assert memory.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))

    hunger = Hunger(monkeypatch)
    run = start(linear(), microbatch_size=8, sampling="fixed-order")
    hunger.most = "not a number"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ArgumentError, match="failed on a drawn batch"):
            run.step(next(iter(run.loader)))
    assert run.microbatch_size == 8
    assert len(DATA[0]) == 30


def test_a_window_that_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpcore.mechanism import vectors

    monkeypatch.setattr(vectors, "host_memory", lambda: (MIB, "this machine"))
    method = dpcore.methods.pmlf(lr=0.1, window=1000, noise_multiplier=1.0, batch_size=8)
    with pytest.raises(ArgumentError, match=r"window=1,000: keeps 999 vectors of 20,004 .*MiB free; take window=14"):
        start(nn.Sequential(nn.Linear(5, 2000), nn.Linear(2000, 4)), method, steps=1000, epochs=None)
