"""Several processes on one ledger: budget, refusals, and one process killed with SIGKILL at any moment.

As in test_kill.py; the next children go on from the last checkpoint in another number of processes.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dpcore.errors import BudgetError, DataError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.sampling import PoissonSampler
from tests.end_to_end.test_kill import SAVE_EVERY, STEPS, Recorder, build, check, fresh, load, save, size
from tests.forks import free_port, leave

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

KILLS = int(os.environ.get("DPCORE_TEST_KILLS", "8"))


def child(rank: int, world: int, port: int, task: Callable[[int, Path], None], folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=15))
    task(rank, folder)
    dist.destroy_process_group()
    leave()


def started(world: int, task: Callable[[int, Path], None], folder: Path) -> list[Any]:
    port = free_port()
    context = multiprocessing.get_context("fork")
    found = [context.Process(target=child, args=(rank, world, port, task, folder)) for rank in range(world)]
    for process in found:
        process.start()
    return found


def go_on(rank: int, folder: Path) -> None:
    """Go on from the last checkpoint to the end of the run."""
    model, private = build(folder / "ledger.db")
    (folder / str(rank)).mkdir(exist_ok=True)
    (folder / f"began {os.getpid()}").touch()
    Recorder(folder / str(rank))
    load(folder / "checkpoint.pt", model, private)
    while private.steps_taken < STEPS:
        for batch in private.loader:
            private.step(batch)
            if private.steps_taken % SAVE_EVERY == 0 or private.steps_taken == STEPS:
                keep(rank, folder, model, private)
    private.close()


def keep(rank: int, folder: Path, model: Any, private: Any) -> None:
    """All put the state together, and the first writes it."""
    path = folder / "checkpoint.pt" if rank == 0 else folder / str(rank) / "checkpoint.pt"
    save(path, model, private)


def logs(folder: Path) -> list[Path]:
    return [folder / str(rank) for rank in range(3) if (folder / str(rank)).exists()]


def reached(folder: Path) -> int:
    saved = torch.load(folder / "checkpoint.pt", weights_only=True)
    return int(saved["optimizer"]["dpcore"]["public"]["step"])


def kill_until_complete(folder: Path, moments: random.Random, most: int) -> int:
    """Start processes until a run is complete, and kill one of them up to `most` times; return how often."""
    fresh(folder)
    kills = 0
    while reached(folder) < STEPS:
        processes = started(moments.choice([1, 2, 2, 3, 3]), go_on, folder)
        while not all((folder / f"began {process.pid}").exists() for process in processes):
            time.sleep(1e-3)  # a group that is not complete waits for its time limit, as torch does
        wanted = size(folder / "0") + 130 * moments.randrange(0, 2 * SAVE_EVERY)
        while kills < most and processes[0].is_alive() and size(folder / "0") < wanted:
            time.sleep(1e-3)
        time.sleep(moments.uniform(0.0, 0.01))
        victim = moments.choice(processes)
        killed = kills < most and victim.is_alive()
        if killed:
            os.kill(victim.pid, signal.SIGKILL)
            kills += 1
        for process in processes:
            process.join(120)
            assert not process.is_alive(), "a process waits for one that is gone"
        assert killed or all(process.exitcode == 0 for process in processes)
        if any(process.exitcode == 0 for process in processes):
            assert reached(folder) == STEPS, "a process went on alone"
        check(folder, *logs(folder))
    return kills


def test_a_killed_process_ends_all_and_the_ledger_covers_what_was_released(tmp_path: Path):
    moments, kills, run = random.Random(3), 0, 0
    while kills < KILLS:
        kills, run = kills + kill_until_complete(tmp_path / str(run), moments, KILLS - kills), run + 1


def spend_all(private: Any) -> None:
    while True:
        for batch in private.loader:
            private.step(batch)


def spend(rank: int, folder: Path) -> None:
    """All stop where the budget does; the first alone can tell what was spent."""
    _, private = build(folder / "ledger.db")
    with pytest.raises(BudgetError):
        spend_all(private)
    if rank == 0:
        assert 0 < private.epsilon() <= 4
        assert "ledger" in private.statement().text()
        (folder / "steps").write_text(str(private.steps_taken))
    else:
        with pytest.raises(PrivacyError, match="take epsilon and statement from rank 0"):
            private.epsilon()
        with pytest.raises(PrivacyError, match="from rank 0"):
            private.statement()
    private.close()
    with pytest.raises(DataError):
        build(folder / "none.db")


def draw(rank: int, folder: Path) -> None:
    """No process draws a row that is not on disk."""
    _, private = build(folder / "ledger.db")
    unpaid, real = [], PoissonSampler.indices

    def indices(sampler: Any, key: bytes, step: int) -> Any:
        marks = [mark for run in Ledger.open(folder / "ledger.db").runs() for mark in run.marks.values()]
        if step >= max(marks, default=0):
            unpaid.append(step)
        return real(sampler, key, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PoissonSampler, "indices", indices)
        for batch in private.loader:
            private.step(batch)
    assert private.steps_taken > 0
    assert not unpaid
    private.close()


def test_no_process_draws_what_is_not_paid_for(tmp_path: Path):
    Ledger.create(tmp_path / "ledger.db")
    for process in started(2, draw, tmp_path):
        process.join(120)
        assert process.exitcode == 0


def test_all_stop_where_the_budget_does(tmp_path: Path):
    Ledger.create(tmp_path / "ledger.db", budget=(4, 1e-5))
    for process in started(2, spend, tmp_path):
        process.join(120)
        assert process.exitcode == 0
    (run,) = Ledger.open(tmp_path / "ledger.db").runs()
    assert run.releases == int((tmp_path / "steps").read_text()) > 0
