"""States of several processes, each part in a file of its own: loaded by any number of processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dpcore.errors import DataError
from dpcore.torch import checkpoint
from tests.end_to_end.test_processes import in_processes
from tests.unit.torch_runs import METHODS, finish, keep_keys, model, start, values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

NAMES = ("adam", "disk", "pmlf", "memf banded", "adaptive clip", "uniform average")


def begin(name: str) -> Any:
    sampling = "fixed_order" if name == "memf banded" else "poisson"
    return start(model(), METHODS[name](8), sampling=sampling, key=bytes([NAMES.index(name)]) * 32)


def first_half(rank: int, folder: Path) -> None:
    for name in NAMES:
        run = begin(name)
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
            run = begin(name)
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


def failing(rank: int, folder: Path) -> None:
    run = begin("adam")
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
    again = begin("adam")
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
        ends = [torch.load(tmp_path / f"{name}-end-{world}.pt", weights_only=True) for world in (1, 2)]
        torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)


def large(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    run = start(torch.nn.Linear(5, 20_000), METHODS["adam"](8), stop=1)
    run.optimizer.save_sharded(folder)


def test_each_process_writes_its_part_of_the_vectors(tmp_path: Path):
    in_processes(2, large, tmp_path)
    vectors = 2 * 6 * 20_000 * 4
    for path in tmp_path.glob("*.pt"):
        assert vectors / 2 <= path.stat().st_size <= vectors / 2 + 20_000


def test_no_process_saves_or_loads_alone(tmp_path: Path):
    in_processes(2, failing, tmp_path)


def test_the_same_steps_as_without_a_break(tmp_path: Path):
    in_processes(2, unbroken, tmp_path)


def unbroken(rank: int, folder: Path) -> None:
    whole = begin("disk")
    finish(whole)
    run = begin("disk")
    finish(run, stop=4)
    run.optimizer.save_sharded(folder)
    keys, weights = run.optimizer.state_dict(), run.model.state_dict()
    again = begin("disk")
    again.model.load_state_dict(weights)
    again.optimizer.load_sharded(folder)
    keep_keys(again, keys)
    finish(again)
    torch.testing.assert_close(values(again.model), values(whole.model), rtol=0, atol=0)
