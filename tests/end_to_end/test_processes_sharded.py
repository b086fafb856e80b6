"""Models of fully_shard in real processes (gloo): the run of one process, with 1/W of everything in each."""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, _fully_shard, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import dpcore.torch
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.methods import dp_adam, dp_sgd
from dpcore.spec.layout import Layout
from dpcore.stages.updates.galore import GaLore
from dpcore.torch import processes
from dpcore.torch.shards import Layer
from tests.depth import chosen
from tests.end_to_end.test_processes import in_processes
from tests.unit import torch_runs
from tests.unit.torch_runs import keep_keys

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

DATA = torch.arange(150.0).reshape(30, 5).double() / 150, torch.arange(30) % 3
FIXED = {"sampling": "fixed-order"}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {  # method, batch size, options
    "dp_sgd": ("dp_sgd", 2, {"microbatch_size": 1, "steps": 8}),
    "adaptive clip": ("adaptive clip", 2, {"microbatch_size": 2, "steps": 6}),
    "disk": ("disk", 8, {"microbatch_size": 3}),
    "history and average": ("uniform average", 8, {"microbatch_size": 3}),
    "accelerated": ("accelerated independent", 8, {"microbatch_size": 8}),
    "correlated noise": ("memf", 5, {"microbatch_size": 2, **FIXED}),
    "two views": ("dp_sgd", 4, {"microbatch_size": 3, "augmentations": 2, "steps": 4}),
    "tied and frozen": ("adam", 8, {"microbatch_size": 8}),
}


class Net(nn.Module):
    """Seven rows and four: no number of processes divides both, and of three the last has none of the four."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(5, 7), nn.Linear(7, 4), nn.Linear(4, 3)
        self.norm = nn.LayerNorm(4)
        self.register_buffer("scale", torch.tensor(1.5))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.second(self.scale * self.first(x).tanh())))
        return out


class Frozen(torch_runs.Tied):
    """A matrix in two places, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(9, 3).requires_grad_(False)
        self.embed.reset_parameters()
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.frozen(super().forward(x))
        return out


def data_of(name: str) -> Any:
    if name == "tied and frozen":
        return (8 * DATA[0]).long(), DATA[1]
    return DATA if name != "two views" else list(zip(*DATA, strict=True))


def net_of(name: str) -> nn.Module:
    return Frozen() if name == "tied and frozen" else Net()


def sharded(net: nn.Module | None = None, layers: tuple[str, ...] = ("first", "second"), **options: Any) -> nn.Module:
    """The head and the norm are the root's own, which fully_shard keeps gathered after a forward pass."""
    net = Net() if net is None else net
    options.setdefault("mesh", dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    for name in layers:
        fully_shard(net.get_submodule(name), **options)
    fully_shard(net, **options)
    return net


def seen(name: str) -> nn.Module:
    """Sharded, and run: the root's own parameters are gathered still."""
    net = net_of(name)
    net = sharded(net, ("first", "second") if isinstance(net, Net) else ("frozen",))
    with torch.no_grad():
        net(data_of("disk" if name == "two views" else name)[0])
    assert not all(hasattr(parameter, "to_local") for parameter in net.parameters())
    return net


def start(net: nn.Module, name: str, **options: Any) -> dpcore.torch.PrivateRun:
    method, batch_size, more = CASES[name]
    data = data_of(name)
    key = bytes([list(CASES).index(name)]) * 32
    length = {} if "steps" in more else {"epochs": 1}
    options = {**length, "target_delta": 1e-5, "key": key, "exact_key": True, **more, **options}
    return dpcore.torch.make_private(net, data, torch_runs.METHODS[method](batch_size), **options)


def batches(run: dpcore.torch.PrivateRun, stop: int | None = None) -> Iterator[Any]:
    while run.steps_taken < run.plan.steps and run.steps_taken != stop:
        for batch in run.loader:
            yield batch
            if run.steps_taken == stop:
                return


def finish(run: dpcore.torch.PrivateRun, stop: int | None = None) -> list[int]:
    """Step to the end, with a look at the model between steps; return the sizes of the batches of this process."""
    sizes = []
    for batch in batches(run, stop):
        run.step(batch)
        sizes.append(len(batch[1]))
        if run.steps_taken % 3 == 0:
            with torch.no_grad():
                run.model(batch[0])
    return sizes


def whole(net: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = net.state_dict()
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in found.items()}


def put(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    set_model_state_dict(net, state, options=StateDictOptions(full_state_dict=True))


def kept_bytes(run: dpcore.torch.PrivateRun) -> int:
    """What a run keeps between steps: parameters, the sum, moments, states of filter and noise, points, averages."""

    def size(value: Any) -> int:
        if isinstance(value, (list, tuple)):
            return sum(map(size, value))
        return int(value.nbytes) if hasattr(value, "nbytes") else 0

    tensors = [p.to_local() if hasattr(p, "to_local") else p for p in run.model.parameters()]
    return size([tensor.detach() for tensor in tensors]) + size(list(vars(run._engine.mechanism.vectors).values()))


def assert_free(run: dpcore.torch.PrivateRun) -> None:
    """No layer is gathered any more, after a step and after `averaged`."""
    groups = [group for module in run.model.modules() for group in groups_of_module(module)]
    for each in (each for group in groups for each in group.fsdp_params):
        assert each.unsharded_param.untyped_storage().nbytes() == 0
        assert each.unsharded_param.grad is None
        assert each.sharded_param.grad is None
    assert all(group.reduce_grads for group in groups)
    assert {type(group._all_gather_comm).__name__ for group in groups} == {"DefaultAllGather"}


def groups_of_module(module: Any) -> list[Any]:
    return list(module._get_fsdp_state()._fsdp_param_groups) if hasattr(module, "_get_fsdp_state") else []


class Normals:
    """Counts the normals that a backend draws in `step`."""

    def __init__(self, run: dpcore.torch.PrivateRun, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, backend = 0, run._engine.mechanism.backend
        real = backend.step

        def step(slots: Any, *arguments: Any, **options: Any) -> None:
            self.count += sum(len(slot.parameter) for slot in slots)
            real(slots, *arguments, **options)

        monkeypatch.setattr(backend, "step", step)


def saved_in(world: int) -> tuple[str, ...]:
    """Methods whose runs are saved midway, and go on in another number of processes."""
    return ("disk", "history and average", "correlated noise") if world == 2 else ("history and average",)


def compared(rank: int, folder: Path) -> None:
    """Train by each method; leave what the processes have. Then count, save, and go on from a state of one process."""
    found: dict[str, Any] = {}
    for name in CASES:
        run = start(seen(name), name)
        sizes, output = finish(run), run.output_state_dict()
        assert_free(run)
        state = run.optimizer.state_dict()
        found[name] = {"values": whole(run.model), "output": output, "sizes": sizes, "state": state}
        found[name] |= {"text": run.statement().text(), "bytes": kept_bytes(run)}
    for name in saved_in(dist.get_world_size()):
        run = start(sharded(), name)
        finish(run, stop=3)
        found[f"{name}, stopped"] = {"model": whole(run.model), "optimizer": run.optimizer.state_dict()}
        run.optimizer.save_sharded(folder / f"{name}, parts")
        stopped = torch.load(folder / f"{name}.pt", weights_only=True)
        run = start(sharded(), name, key=bytes([99]) * 32)
        put(run.model, stopped["model"])
        run.optimizer.load_sharded(folder / f"{name}, parts of one process")
        keep_keys(run, stopped["optimizer"])
        assert run.steps_taken == 3
        finish(run)
        found[f"{name}, went on"] = whole(run.model)
    torch.save(found, folder / f"rank {rank}.pt")
    with pytest.MonkeyPatch.context() as patch:
        found_messages(patch)


def found_messages(patch: pytest.MonkeyPatch) -> None:
    """A layer is gathered once in each pass, the root's own once; each tensor's sum is sent once per micro-batch."""
    world, gathered, sums = dist.get_world_size(), list[int](), list[int]()
    gather, scatter = Layer.__call__, processes.reduce_scatter

    def gathering(layer: Layer, *rows: torch.Tensor) -> list[torch.Tensor]:
        gathered.append(layer.number)
        return gather(layer, *rows)

    def scattering(own: torch.Tensor, all_of_it: torch.Tensor, group: Any) -> None:
        sums.append(len(all_of_it))
        scatter(own, all_of_it, group)

    patch.setattr(Layer, "__call__", gathering)
    patch.setattr(processes, "reduce_scatter", scattering)
    groups = _fully_shard._fsdp_param_group
    patch.setattr(groups, "foreach_all_gather", lambda *_, **__: pytest.fail("fully_shard gathered a layer"))
    patch.setattr(groups, "foreach_reduce", lambda *_, **__: pytest.fail("a gradient was added up"))
    run = start(sharded(), "disk")
    sizes = [-(-p.shape[0] // world) * world * (p.numel() // p.shape[0]) for p in run.model.parameters()]
    normals = Normals(run, patch)
    for number, batch in enumerate(batches(run, 3)):
        gathered.clear()
        sums.clear()
        rounds = torch.tensor(-(-len(batch[1]) // 3))
        dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
        run.step(batch)
        assert gathered == [1, 2, 0, 2] * int(rounds) * (
            2 if number else 1
        )  # DiSK's two points; the first needs no weight back
        assert sums == sizes * int(rounds)
    total = torch.tensor(normals.count)
    own = sum(p.to_local().numel() for p in run.model.parameters())
    assert normals.count == 3 * own
    dist.all_reduce(total)
    assert total == 3 * sum(p.numel() for p in run.model.parameters())


@pytest.mark.parametrize("world", chosen([3], [2, 3]))
def test_shards_are_one_run(world: int, tmp_path: Path):
    alone = {}
    for name in CASES:
        alone[name] = start(net_of(name), name)
        if name in saved_in(world):
            finish(alone[name], stop=3)
            state = {"model": alone[name].model.state_dict(), "optimizer": alone[name].optimizer.state_dict()}
            torch.save(state, tmp_path / f"{name}.pt")
            alone[name].optimizer.save_sharded(tmp_path / f"{name}, parts of one process")
        finish(alone[name])
    in_processes(world, compared, tmp_path)
    ranks = [torch.load(tmp_path / f"rank {rank}.pt", weights_only=True) for rank in range(world)]
    close = {"rtol": 1e-9, "atol": 1e-11}
    for name, run in alone.items():
        text = run.statement().text().split("What this statement assumes")
        for found in (rank[name] for rank in ranks):
            torch.testing.assert_close(found["values"], run.model.state_dict(), **close)
            torch.testing.assert_close(found["output"], run.output_state_dict(), **close)
            told = found["text"].split("What this statement assumes")
            assert told[0] == text[0]
            assert "crossed the network" in told[1]
            arrays = run.optimizer.state_dict()["dpcore"]
            for part in ("public", "secret"):
                ours = found["state"]["dpcore"][part]["arrays"]
                torch.testing.assert_close(ours, arrays[part]["arrays"], rtol=1e-8, atol=1e-9)
        size = [rank[name]["bytes"] for rank in ranks]
        assert sum(size) == kept_bytes(run)
        assert max(size) < 0.62 * kept_bytes(run) if world == 2 else max(size) < 0.45 * kept_bytes(run)
    sizes = np.array([rank["dp_sgd"]["sizes"] for rank in ranks])
    assert ((sizes == 0) & (sizes.sum(0) > 0)).any()  # of some batches a process has none
    assert (sizes.max(0) > sizes.min(0)).any()
    for name in saved_in(world):
        went_on = start(Net(), name, key=bytes([99]) * 32)
        state = ranks[0][f"{name}, stopped"]
        went_on.model.load_state_dict(state["model"])
        went_on.optimizer.load_sharded(tmp_path / f"{name}, parts")
        keep_keys(went_on, state["optimizer"])
        finish(went_on)
        torch.testing.assert_close(went_on.model.state_dict(), alone[name].model.state_dict(), **close)
        for rank in ranks:
            torch.testing.assert_close(rank[f"{name}, went on"], alone[name].model.state_dict(), **close)


def narrow(net: nn.Module, precision: str | None = "bf16") -> dpcore.torch.PrivateRun:
    options: dict[str, Any] = {"key": bytes(32), "exact_key": True, "target_delta": 1e-5, "precision": precision}
    data, method = (DATA[0].float(), DATA[1]), torch_runs.METHODS["disk"](8)
    run = dpcore.torch.make_private(net, data, method, epochs=2, microbatch_size=3, **options)
    finish(run)
    return run


def in_bf16(rank: int, folder: Path) -> None:
    run = narrow(sharded(Net().float()))
    assert_free(run)
    torch.save({"values": whole(run.model), "text": run.statement().text()}, folder / f"rank {rank}.pt")


def test_shards_in_bf16_are_one_run(tmp_path: Path):
    alone, wide = narrow(Net().float()), narrow(Net().float(), None)
    in_processes(2, in_bf16, tmp_path)
    values = alone.model.state_dict()
    for rank in range(2):
        found = torch.load(tmp_path / f"rank {rank}.pt", weights_only=True)
        torch.testing.assert_close(found["values"], values, rtol=1e-5, atol=1e-6)
        assert "passes in bfloat16 (autocast)" in found["text"]
    assert not torch.allclose(wide.model.state_dict()["first.weight"], values["first.weight"], rtol=1e-4, atol=1e-5)


class Deciding(nn.Linear):
    """Branches on a value."""

    def __init__(self) -> None:
        super().__init__(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs if inputs.sum() > 0 else -inputs)


def refused(rank: int, folder: Path) -> None:
    """Every refusal, in both processes; then let one fail in a step."""
    line, low = dist.init_device_mesh("cpu", (2,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    grid = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("copies", "rows"))
    other = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("some", "one"))["one"]

    def parallel() -> nn.Module:
        net = Net()
        net.head.weight = nn.Parameter(distribute_tensor(net.head.weight.detach(), line, [Shard(1)]))
        return net

    def by_columns(parameter: nn.Parameter) -> Shard:
        return Shard(int(parameter.shape == (3, 4)))

    def deciding() -> nn.Module:
        net = Net()
        net.head = Deciding().double()
        return net

    cases: list[tuple[str, Callable[[], Any], Any]] = [
        ("no root of fully_shard", lambda: only_a_layer(line), {}),
        ("no root of fully_shard: .* tensor parallelism", parallel, {}),
        ("a mesh of 2 dimensions, as HSDP", lambda: sharded(mesh=grid), {}),
        ("sharded along dimension 0", lambda: sharded(shard_placement_fn=by_columns), {}),
        ("over other processes", lambda: sharded(mesh=other), {}),
        ("mp_policy", lambda: sharded(mp_policy=low), {}),
        ("offload_policy", lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), {}),
        ("'head.weight' is not sharded", without_head, {}),
        ("float32 or float64", lambda: sharded(Net().bfloat16()), {}),
        ("a value decides", lambda: sharded(deciding()), {}),
        ("galore", sharded, {"method": dp_sgd(lr=1, batch_size=4, noise_multiplier=1, galore=GaLore(2, every=3))}),
        ("preconditioning", sharded, {"method": torch_runs.METHODS["adam scaled"](4)}),
        ("second_moment='public'", sharded, {"method": torch_runs.METHODS["adam public"](4)}),
        ("gradients='one-by-one'", sharded, {"gradients": "one-by-one"}),
    ]
    for words, net, options in cases:
        method = options.pop("method", dp_adam(lr=0.1, batch_size=4, noise_multiplier=1))
        with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
            dpcore.torch.make_private(net(), DATA, method, steps=4, target_delta=1e-5, **options)
    run = start(sharded(), "disk")
    with pytest.raises(ArgumentError, match="explain"):
        run.explain()
    in_another_order(rank, start(sharded(), "disk"))
    failing(rank, run)


def only_a_layer(mesh: Any) -> nn.Module:
    net = Net()
    fully_shard(net.first, mesh=mesh)
    return net


def without_head() -> nn.Module:
    net = Net()
    return sharded(net, ignored_params={net.head.weight})


def in_another_order(rank: int, run: dpcore.torch.PrivateRun) -> None:
    """One process gathers a layer that the other does not: nobody releases."""
    peers: Any = run._engine.mechanism.peers
    note = peers.note
    peers.note = lambda message: note(f"{message} {rank}")
    before = [p.to_local().clone() for p in run.model.parameters()]
    with pytest.raises(PrivacyError, match="different orders"):
        run.step(next(iter(run.loader)))
    assert run.steps_taken == 0
    assert all(torch.equal(kept, p.to_local()) for kept, p in zip(before, run.model.parameters(), strict=True))


def failing(rank: int, run: dpcore.torch.PrivateRun) -> None:
    """One process fails midway: nobody releases, nobody waits for ever, and all have the parameters that they had."""
    batch = next(iter(run.loader))
    run.optimizer.param_groups[0]["lr"] *= 1 + rank
    with pytest.raises(PrivacyError, match="rank 1 would take this step with other settings"):
        run.step(batch)
    run.optimizer.param_groups[0]["lr"] /= 1 + rank
    run.step(batch)
    before = [p.to_local().clone() for p in run.model.parameters()]
    batch = next(iter(run.loader))
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)

    def broken(*arguments: Any) -> Any:
        raise ValueError("no gradient today")

    proved = run._engine.gradient.proved
    right = proved.current
    if rank == 1:
        proved.current = broken  # type: ignore[method-assign]
    with pytest.raises(ArgumentError if rank == 1 else PrivacyError, match="drawn batch" if rank == 1 else "was lost"):
        run.step(batch)
    proved.current = right  # type: ignore[method-assign]
    for again in (lambda: run.step(batch), run.optimizer.state_dict):
        with pytest.raises(PrivacyError, match="midway"):
            again()
    assert run.steps_taken == 1
    assert all(torch.equal(kept, p.to_local()) for kept, p in zip(before, run.model.parameters(), strict=True))
    sys.stdout.flush()


@pytest.mark.parametrize("world", range(1, 6))
def test_pieces_are_the_chunks_of_torch(world: int):
    shapes = ((7, 5), (4,), (0,), (1, 3), (12, 2, 2))
    layout = Layout.of((f"p{i}", shape) for i, shape in enumerate(shapes))
    for i, shape in enumerate(shapes):
        numbers = torch.arange(layout.entries[i].size).reshape(shape)
        chunks = [list(chunk.reshape(-1)) for chunk in torch.chunk(numbers, world)]
        for rank, chunk in enumerate(chunks + [[]] * (world - len(chunks))):
            tensor, start, stop = layout.rows(rank, world)[i]
            assert tensor == i
            assert list(range(start, stop)) == chunk


def test_refusals_and_a_failure(tmp_path: Path):
    in_processes(2, refused, tmp_path)
