"""Real processes under torch.distributed (gloo): the run of one process, its failures, and its checkpoints."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

import dpcore_torch as backend
from dpcore.cli import main
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.methods import disk, dp_adam, dp_sgd, memf
from dpcore.spec.layout import Layout
from dpcore.stages.strategies import BandedToeplitz
from dpcore.torch import checkpoint, make_private, processes
from dpcore.torch.peers import _check_backend
from dpcore.torch.processes import Processes
from tests.depth import chosen
from tests.forks import as_torchrun_does, free_port, leave, run_script
from tests.fresh import python
from tests.unit import torch_runs
from tests.unit.torch_runs import DATA, finish, keep_keys, load, model, saved, start, values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
COMMON: dict[str, Any] = {"batch_size": 8, "noise_multiplier": 1.0, "lr": 0.3}
METHODS = {
    "dp_sgd": lambda: dp_sgd(**COMMON),
    "disk": lambda: disk(**COMMON),
    "dp_adam": lambda: dp_adam(**COMMON),
    "doubling": lambda: torch_runs.METHODS["doubling"](8),
    "scaled": lambda: dp_adam(
        variant="delayed_preconditioner", unscaled_steps=2, scaled_steps=4, max_update_norm=1.0, **COMMON
    ),
}


def begin(name: str, index: int, **options: Any) -> Any:
    return start(model(), METHODS[name](), key=bytes([index]) * 32, **options)


def compared(rank: int, folder: Path) -> None:
    """Train by each method; leave what the first process has."""
    for index, name in enumerate(METHODS):
        run = begin(name, index)
        finish(run)
        state, output = saved(run), run.output_state_dict()
        if rank == 0:
            found = {"values": values(run.model), "state": state, "output": output, "text": run.statement().text()}
            torch.save(found, folder / f"{name}.pt")


def failing(rank: int, folder: Path) -> None:
    """Let one process fail in a step, name what differs, and lose a process."""
    run = begin("dp_sgd", 0)
    with pytest.raises(ArgumentError, match="record_gradients in a run of 2 processes"):
        run.record_gradients(10)
    batch = next(iter(run.loader))
    engine, real = run._engine, run._engine.to_array

    def broken(*arguments: Any, **options: Any) -> Any:
        raise ValueError("no gradient today")

    if rank == 1:
        engine.to_array = broken
    with pytest.raises(ValueError if rank == 1 else PrivacyError, match="no gradient today" if rank == 1 else "rank 1"):
        run.step(batch)
    assert run.steps_taken == 0
    engine.to_array = real
    run.step(batch)
    assert run.steps_taken == 1
    finish(run)
    if rank == 0:
        torch.save(values(run.model), folder / "after.pt")
    run = begin("dp_sgd", 0)
    run.optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    batch = next(iter(run.loader))
    with pytest.raises(PrivacyError, match="rank 1 would take this step with other settings"):
        run.step(batch)
    assert run.steps_taken == 0
    run.optimizer.param_groups[0]["lr"] = 0.1
    run.step(batch)
    by_hooks(rank)
    only = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ArgumentError, match="no member"):
            begin("dp_sgd", 0, process_group=only)
    else:
        begin("dp_sgd", 0, process_group=only)
    cases: list[tuple[str, Callable[[], Any]]] = [
        (r"data \(number of examples\)", lambda: begin("dp_sgd", 1, data=tuple(t[: 30 - rank] for t in DATA))),
        (r"data \(an example, or their order\)", lambda: begin("dp_sgd", 1, data=tuple(t.roll(rank, 0) for t in DATA))),
        (r"data \(an example, or their order\)", lambda: begin("dp_sgd", 1, data=rows(rank))),
        (r"key \(rank 1\); must", lambda: begin("dp_sgd", 1 + rank)),
        ("number of steps", lambda: begin("dp_sgd", 1, epochs=3 + rank)),
        ("'0.weight'", lambda: start(changed(rank), METHODS["dp_sgd"]())),
        (r"'count' in the model \(rank 1\); must", lambda: start(with_count(rank), METHODS["dp_sgd"]())),
    ]
    for words, case in cases:
        with pytest.raises(ArgumentError, match=words):
            case()


def rows(rank: int) -> Any:
    """A dataset in another order in rank 1, as a folder's files are listed."""
    examples = list(zip(*DATA, strict=True))
    return examples[::-1] if rank else examples


def by_hooks(rank: int) -> None:
    """What a user's hook does between sum and release is seen: another learning rate, and an exception."""
    run = begin("dp_sgd", 0)

    def other_rate(*_: Any) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)

    def raising(*_: Any) -> None:
        if rank == 1:
            raise ValueError("no hook today")

    batch = next(iter(run.loader))
    handle = run.optimizer.register_step_pre_hook(other_rate)
    with pytest.raises(PrivacyError, match="rank 1 would take this step with other settings"):
        run.step(batch)
    handle.remove()
    run.optimizer.param_groups[0]["lr"] = 0.1
    handle = run.optimizer.register_step_pre_hook(raising)
    with pytest.raises(ValueError if rank else PrivacyError, match="no hook today" if rank else "rank 1 failed"):
        run.step(batch)
    handle.remove()
    assert run.steps_taken == 0
    run.step(batch)
    assert run.steps_taken == 1


def other_states(rank: int, folder: Path) -> None:
    """States that differ between processes are refused, also those that were put in place by other means."""
    run = begin("dp_sgd", 0)
    states = [run.optimizer.state_dict()]
    for batch in run.loader:
        run.step(batch)
        states.append(run.optimizer.state_dict())
    with pytest.raises(ArgumentError, match=r"step of the saved state \(rank 1\); saved state \(rank 1\)"):
        run.optimizer.load_state_dict(states[2 - rank])
    again = begin("dp_sgd", 0)
    again.optimizer.load_state_dict(states[2])
    again._engine.mechanism.step -= rank
    batch = next(iter(again.loader))
    with pytest.raises(PrivacyError, match="rank 1 would take another step than rank 0"):
        again.step(batch)
    options = {"ledger": str(folder / "people.ledger")} if rank else {}
    with pytest.raises(ArgumentError, match=r"ledger \(given or not\) \(rank 1\)"):
        begin("dp_sgd", 0, **options)


def test_processes_that_load_other_states_are_refused(tmp_path: Path):
    in_processes(2, other_states, tmp_path)


def counted(rank: int, folder: Path) -> None:
    """Count what a step sends: the sums once, the moved parameters once, and DiSK's displacements."""
    sent: list[tuple[str, int]] = []
    exchange, gather = processes.exchange, processes.all_gather

    def exchanging(found: torch.Tensor, given: torch.Tensor, group: Any) -> None:
        sent.append(("sums", (given.numel() - given[0].numel()) * given.element_size()))
        exchange(found, given, group)

    def gathering(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        sent.append(("moved", (whole.numel() - own.numel()) * whole.element_size()))
        gather(whole, own, group)

    processes.exchange, processes.all_gather = exchanging, gathering
    for name, more in (("dp_sgd", 0), ("dp_adam", 0), ("disk", 1)):
        run = begin(name, 7)
        size = sum(p.numel() for p in run.model.parameters())
        others = -(-size // 3) * 2  # coordinates of the two other processes
        batch = next(iter(run.loader))
        sent.clear()
        run.step(batch)
        # Plain data parallel training (a ring in float32) sends 4 bytes of each: sums that are exact take 8.
        assert sent == [("sums", 8 * others)] + [("moved", 4 * others)] * (1 + more)


def test_what_a_step_sends(tmp_path: Path):
    in_processes(3, counted, tmp_path)


def with_count(rank: int) -> Any:
    net = model()
    net.register_buffer("count", torch.tensor(rank))
    return net


def changed(rank: int) -> Any:
    net = model()
    with torch.no_grad():
        net[0].weight.add_(rank)
    return net


def lost(rank: int, folder: Path) -> None:
    """One process ends without a word; the other must not go on."""
    run = begin("dp_sgd", 0)
    for batch in run.loader:
        run.step(batch)
        break
    if rank == 1:
        os._exit(9)
    with pytest.raises(PrivacyError, match="was lost"):
        finish(run)
    (folder / "noticed").touch()
    os._exit(0)  # the group cannot be taken down any more


# Processes are forks of one that has imported all this: a fresh interpreter takes seconds of each for that. The others
# are what a run imports by and by; none of them starts a thread, which a fork would lose.
LATER = ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "scipy.optimize", "dpcore_numpy", "dpcore_torch")
torch.multiprocessing.set_forkserver_preload([__name__, *LATER])


def work(rank: int, world: int, port: int, task: Callable[[int, Path], None], folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    task(rank, folder)
    dist.destroy_process_group()
    leave()


def in_processes(world: int, task: Callable[[int, Path], None], folder: Path, join: bool = True) -> Any:
    given = (world, free_port(), task, folder)
    return torch.multiprocessing.start_processes(work, given, world, join=join, start_method="forkserver")


@pytest.mark.parametrize("world", chosen([2], [2, 3, 4]))
def test_several_processes_are_one_run(world: int, tmp_path: Path):
    in_processes(world, compared, tmp_path)
    for index, name in enumerate(METHODS):
        run = begin(name, index)
        finish(run)
        found = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        # A layer's product over a batch rounds otherwise for another number of examples; the sums of these are exact.
        torch.testing.assert_close(found["values"], values(run.model), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["output"], run.output_state_dict(), rtol=1e-4, atol=1e-5)
        alone, all_of_them = (
            text.split("What this statement assumes") for text in (run.statement().text(), found["text"])
        )
        assert all_of_them[0] == alone[0]
        assert "crossed the network" in all_of_them[1]
        again = load(begin(name, index + 100), found["state"], fork=True)
        assert again.steps_taken == run.steps_taken
        torch.testing.assert_close(values(again.model), found["values"], rtol=0, atol=0)


def test_failures_end_all_processes_with_a_sentence(tmp_path: Path):
    in_processes(2, failing, tmp_path)
    run = begin("dp_sgd", 0)
    torch.testing.assert_close(torch.load(tmp_path / "after.pt"), finish(run), rtol=1e-5, atol=1e-6)


def test_no_process_goes_on_alone(tmp_path: Path):
    for process in in_processes(2, lost, tmp_path, join=False).processes:
        process.join(120)
    assert (tmp_path / "noticed").exists()


def test_a_model_of_another_engine_is_refused(tmp_path: Path):
    in_processes(1, wrapped, tmp_path)


def wrapped(rank: int, folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"model\.module"):
        start(torch.nn.parallel.DistributedDataParallel(model()))
    sharded = model()
    torch.distributed.fsdp.fully_shard(sharded[0], mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(ArgumentError, match="DTensors, but the model is no root"):
        start(sharded)
    torch.distributed.fsdp.fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    alone = start(model(), stop=2)
    torch.testing.assert_close(values(start(sharded, stop=2).model).full_tensor(), values(alone.model))


def test_the_script_of_the_documentation(tmp_path: Path):
    page = (Path(__file__).parents[2] / "docs/processes.md").read_text()
    (script,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(script)
    if chosen(False, True):
        found = python(*TORCHRUN, "train.py", folder=tmp_path)
        assert found.returncode == 0, found.stderr
        printed = found.stdout
    else:
        as_torchrun_does(2, run_script, tmp_path)
        printed = "".join((tmp_path / str(rank)).read_text() for rank in range(2))
    assert printed.count("Privacy statement") == 1
    assert (tmp_path / "state.pt").exists()


def test_a_group_must_be_one():
    with pytest.raises(ArgumentTypeError, match="process_group='str'"):
        begin("dp_sgd", 0, process_group="gloo")


@pytest.mark.parametrize(("config", "device", "words"), [
    ("cuda:nccl", "cpu", r"for the model's device 'cpu' is none: must be gloo"),
    ("cpu:gloo,cuda:gloo", "cuda", r"for the model's device 'cuda' is gloo: must be nccl"),
    ("cpu:gloo,cuda:nccl", "cuda", ""), ("cpu:gloo,cuda:gloo", "cpu", ""),
])  # fmt: skip
def test_the_group_can_send_what_the_model_is_made_of(config: str, device: str, words: str):
    with pytest.raises(ArgumentError, match=words) if words else nullcontext():
        _check_backend(config, device)


def commanded(rank: int, world: int, port: int, folder: Path, arguments: tuple[str, ...]) -> None:
    """Run the command as torchrun begins it in each of its processes."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    with (folder / f"told-{rank}").open("w") as told:
        os.dup2(told.fileno(), 1)
        status = main(["train", "--out", str(folder / "run"), *arguments])
    if status not in (0, 128 + signal.SIGTERM):
        sys.exit(status)
    leave()


def command_in_processes(folder: Path, *arguments: str, join: bool = True) -> Any:
    given = (2, free_port(), folder, arguments)
    return torch.multiprocessing.start_processes(commanded, given, 2, join=join, start_method="forkserver")


def test_the_command_trains_in_all_processes(tmp_path: Path):
    command_in_processes(tmp_path, "--epsilon", "3", "--epochs", "1", "--json")
    assert (tmp_path / "told-1").read_text() == ""
    result = json.loads((tmp_path / "told-0").read_text())
    assert result["status"] == "complete"
    assert result["statement"]["steps_taken"] == result["statement"]["steps_planned"]
    assert "crossed the network" in (tmp_path / "run/statement.txt").read_text()
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 1


def test_the_command_takes_no_ledger_in_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    Ledger.create(tmp_path / "people.ledger")
    assert main(["train", "--epsilon", "3", "--ledger", str(tmp_path / "people.ledger")]) == 2
    assert "must be left out" in capsys.readouterr().err


def test_a_signal_stops_all_processes_after_one_step(tmp_path: Path):
    begun = command_in_processes(tmp_path, "--noise-multiplier", "4", "--epochs", "5000", join=False).processes
    for _ in range(1200):
        if (tmp_path / "run/metrics.jsonl").exists() and (tmp_path / "run/metrics.jsonl").stat().st_size:
            break
        assert all(process.is_alive() for process in begun)
        time.sleep(0.1)
    for process in begun:
        process.terminate()
    for process in begun:
        process.join(120)
        assert process.exitcode == 0
    statement = json.loads((tmp_path / "run/statement.json").read_text())
    assert 0 < statement["steps_taken"] < statement["steps_planned"]
    assert "Stopped by SIGTERM" in (tmp_path / "run/statement.txt").read_text()


# What processes make of their sums: integers, added exactly.


WORLD = 3
LAYOUT = Layout.of([("a", (7, 5)), ("b", (4,)), ("c", (1,))])


def summed(rank: int, folder: Path) -> None:
    processes._MESSAGE = 12  # several messages, the last one shorter
    peers = Processes(torch.distributed.group.WORLD)
    totals = peers.totals([torch.zeros(entry.size) for entry in LAYOUT.entries], backend)
    every = np.rint(np.random.default_rng(5).standard_normal((WORLD, LAYOUT.dimension)) * 2.0**45)
    ends = np.cumsum([35, 4])
    for total, part in zip(totals, np.split(every[rank], ends), strict=True):
        total[...] = torch.from_numpy(part)
    pieces = LAYOUT.pieces(rank, WORLD)
    parts = peers.reduced(totals, pieces)
    true = np.split(every.astype(np.int64).sum(0), ends)
    for part, (i, first, end) in zip(parts, pieces, strict=True):
        assert part.tolist() == true[i][first:end].tolist()


def test_sums_of_processes_are_exact(tmp_path: Path):
    in_processes(WORLD, summed, tmp_path)


class Elementwise(torch.nn.Module):
    """Whose gradients have the same bits in a batch of any size: no product runs over examples."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = torch.nn.Parameter(torch.randn(37, generator=generator))
        self.b = torch.nn.Parameter(torch.zeros(37))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.w + self.b)


STEPS = {
    "dp_sgd": lambda: dp_sgd(lr=0.3, batch_size=8, noise_multiplier=1.0, max_grad_norm=2.0),
    "disk": lambda: disk(lr=0.3, batch_size=8, noise_multiplier=1.0),
    "adaptive clip": lambda: torch_runs.METHODS["adaptive clip"](8),
    "scaled": lambda: dp_adam(
        lr=0.3, batch_size=8, noise_multiplier=1.0, variant="delayed_preconditioner", unscaled_steps=1, scaled_steps=2
    ),
    "correlated": lambda: memf(lr=0.3, batch_size=8, noise_multiplier=1.0, strategy=BandedToeplitz((1.0, 0.5))),
}


def trained(name: str, microbatch_size: int | None = None) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(30, 37, generator=generator), torch.randn(30, 37, generator=generator)
    net = Elementwise()
    sampling = {"sampling": "fixed_order"} if name == "correlated" else {}
    private = make_private(
        net, data, STEPS[name](), loss=lambda output, y: ((output - y) ** 2).sum(-1), epochs=2,
        key=bytes(32), exact_key=True, microbatch_size=microbatch_size, **sampling,
    )  # fmt: skip
    finish(private)
    return [p.detach().clone() for p in net.parameters()]


def alike(rank: int, folder: Path) -> None:
    for name in STEPS:
        found = trained(name)
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")


@pytest.mark.parametrize("world", chosen([3], [2, 3, 4]))
def test_parameters_are_the_same_bits_for_any_number_of_processes(world: int, tmp_path: Path):
    in_processes(world, alike, tmp_path)
    for name in STEPS:
        for ours, theirs in zip(torch.load(tmp_path / f"{name}.pt"), trained(name), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("name", STEPS)
def test_parameters_are_the_same_bits_for_any_micro_batch(name: str):
    whole = trained(name)
    for size in (1, 3):
        for ours, theirs in zip(trained(name, size), whole, strict=True):
            assert torch.equal(ours, theirs), size


def test_the_table_of_the_page_is_what_the_script_prints(monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "asv_benchmarks"))
    import processes_on_paper

    assert processes_on_paper.table() in (root / "docs/processes.md").read_text()
    # What test_what_a_step_sends counts of a real step: 8 bytes of sums and 4 of parameters of all others' coordinates.
    assert processes_on_paper.row(3e9, 3)[0] == pytest.approx(12 * 2)


# States of several processes, each part in a file of its own: loaded by any number of processes.


NAMES = ("adam", "disk", "pmlf", "memf banded", "adaptive clip", "uniform average")


def begin_state(name: str) -> Any:
    sampling = "fixed_order" if name == "memf banded" else "poisson"
    return start(model(), torch_runs.METHODS[name](8), sampling=sampling, key=bytes([NAMES.index(name)]) * 32)


def first_half(rank: int, folder: Path) -> None:
    for name in NAMES:
        run = begin_state(name)
        finish(run, stop=5)
        run.optimizer.save_sharded(folder / name)
        state = run.optimizer.state_dict()
        if rank == 0:
            torch.save({"model": run.model.state_dict(), "optimizer": state}, folder / f"{name}.pt")


def second_half(rank: int, folder: Path) -> None:
    for name in NAMES:
        held = torch.load(folder / f"{name}.pt", weights_only=True)
        ends = []
        for sharded in (False, True):
            run = begin_state(name)
            run.model.load_state_dict(held["model"])
            if sharded:
                run.optimizer.load_sharded(folder / name)
            else:
                run.optimizer.load_state_dict(held["optimizer"])
            assert run.steps_taken == 5
            keep_keys(run, held["optimizer"])
            ends.append(finish(run))
        torch.testing.assert_close(*ends, rtol=0, atol=0)
        if rank == 0:
            torch.save(ends[0], folder / f"{name}-end-{dist.get_world_size()}.pt")


def failing_to_save(rank: int, folder: Path) -> None:
    run = begin_state("adam")
    finish(run, stop=2)
    run.optimizer.save_sharded(folder / "state")
    finish(run, stop=4)
    real = checkpoint.os.fsync

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    if rank == 1:
        checkpoint.os.fsync = full
    with pytest.raises(DataError, match="cannot be written" if rank == 1 else "1 of 2 processes could not"):
        run.optimizer.save_sharded(folder / "state")
    checkpoint.os.fsync = real
    again = begin_state("adam")
    again.optimizer.load_sharded(folder / "state")
    assert again.steps_taken == 2
    with pytest.raises(DataError, match="save_sharded wrote"):
        run.optimizer.load_sharded(folder / "nowhere")
    dist.barrier()
    if rank == 0:
        (path,) = (folder / "state").glob("*-1.pt")
        path.write_bytes(path.read_bytes()[:-50])
    dist.barrier()
    # Every process needs the file, whichever looks at its checksums.
    with pytest.raises(DataError, match="damaged"):
        again.optimizer.load_sharded(folder / "state")
    assert torch.isfinite(finish(run)).all()


def test_a_state_of_three_processes_goes_on_in_any_number(tmp_path: Path):
    in_processes(3, first_half, tmp_path)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "adam").glob("*.pt"))]
    assert len(sizes) == 3
    for world in (1, 2):
        in_processes(world, second_half, tmp_path)
    for name in NAMES:
        unbroken = finish(begin_state(name))
        for world in (1, 2):
            end = torch.load(tmp_path / f"{name}-end-{world}.pt", weights_only=True)
            torch.testing.assert_close(end, unbroken, rtol=1e-5, atol=1e-6)


def large(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    run = start(torch.nn.Linear(5, 20_000), torch_runs.METHODS["adam"](8), stop=1)
    run.optimizer.save_sharded(folder)


def test_each_process_writes_its_part_of_the_vectors(tmp_path: Path):
    in_processes(2, large, tmp_path)
    vectors = 2 * 6 * 20_000 * 4
    for path in tmp_path.glob("*.pt"):
        assert vectors / 2 <= path.stat().st_size <= vectors / 2 + 20_000


def test_no_process_saves_or_loads_alone(tmp_path: Path):
    in_processes(2, failing_to_save, tmp_path)
