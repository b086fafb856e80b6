"""Batches that are read ahead in other processes: the same run, whatever happens to the workers."""

import gc
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dpcore.torch
from dpcore.errors import BudgetError
from dpcore.ledger import Ledger
from dpcore.torch.data import ahead
from tests.unit.torch_runs import DATA, load, model, saved, sgd, start, values


class Drawing(Dataset[Any]):
    """Draws by everything that there is to draw by, and says where it was read."""

    def __init__(self) -> None:
        self.own, self.home = np.random.default_rng(3), os.getpid()

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        noise = torch.rand(5) + random.random() + float(np.random.rand()) + self.own.random()  # noqa: NPY002
        return (DATA[0][index] + noise).float(), int(DATA[1][index]), int(os.getpid() == self.home)


def loss(output: torch.Tensor, target: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target)


def dropping() -> nn.Module:
    return nn.Sequential(model(), nn.Dropout(0.5))


def trained(run: dpcore.torch.PrivateRun, stop: int | None = None) -> tuple[list[torch.Tensor], list[int]]:
    """The inputs and weights of every step, and whether each batch was read in this process."""
    seen, at_home = [], []
    while run.steps_taken < run.plan.steps and run.steps_taken != stop:
        for batch in run.loader:
            run.step(batch)
            seen += [batch[0].clone(), values(run.model)]
            at_home += batch[2].unique().tolist()
            if run.steps_taken == stop:
                break
    return seen, at_home


def begun(workers: int, data: Any = None, **options: Any) -> dpcore.torch.PrivateRun:
    return start(dropping(), data=data or Drawing(), loss=loss, num_workers=workers, **options)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture(scope="module")
def alone() -> list[torch.Tensor]:
    return trained(begun(0))[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_reading_ahead_changes_no_number_of_a_run(workers: int, alone: list[torch.Tensor]) -> None:
    """Neither what reading draws nor the dropout masks of the step that goes on meanwhile."""
    run = begun(workers)  # which sets the seed of the initial weights
    before = torch.get_rng_state()
    found, at_home = trained(run)
    assert same(found, alone)
    assert at_home == [1] + [0] * 11  # the first batch only
    assert torch.equal(torch.get_rng_state(), before)


def test_looking_at_a_batch_is_harmless(alone: list[torch.Tensor]) -> None:
    run = begun(2)
    first = [next(iter(run.loader))[0] for _ in range(3)]
    assert same(first, [alone[0]] * 3)
    assert same(trained(run)[0], alone)


class Fails(Drawing):
    """Cannot be read in a worker."""

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.home:
            raise RuntimeError(f"patient {index}")
        return super().__getitem__(index)


class Exits(Drawing):
    """Kills its worker."""

    def __getitem__(self, index: int) -> Any:
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [Fails, Exits])
def test_a_worker_that_cannot_read_costs_time_only(kind: Any, alone: list[torch.Tensor]) -> None:
    with pytest.warns(RuntimeWarning, match=r"num_workers: reading ahead ended \(\w+\)") as caught:
        found, at_home = trained(begun(1, kind()))
    assert len(caught) == 1
    assert "patient" not in str(caught[0].message)
    assert same(found, alone)
    assert set(at_home) == {1}


def test_what_was_read_for_other_keys_is_never_used() -> None:
    """A state is loaded in the middle: every load forks the keys, and with them batches and augmentation."""

    def forked(workers: int) -> tuple[dpcore.torch.PrivateRun, list[torch.Tensor]]:
        run = begun(workers)
        trained(run, stop=3)
        state = saved(run)
        iterator = iter(run.loader)
        run.step(next(iterator))  # the next batch is on its way
        load(run, state, fork=True)
        used: list[torch.Tensor] = []
        original = run._engine.accumulate
        run._engine.accumulate = lambda batch, public=None: (used.append(batch[0]), original(batch, public))[1]
        trained(run)
        return run, used

    run, used = forked(2)
    keys = run._engine.mechanism.keys
    # The same batches by hand, from the keys that the run has now.
    from dpcore.torch.randomness import step_seed

    plain = begun(0)
    for step, inputs in enumerate(used, start=3):
        indices = run.plan.sampler.indices(keys.sampling, step)
        by_hand = plain.loader.data.batch(indices, step_seed(keys, "augmentation", step))
        assert torch.equal(by_hand[0], inputs)
    assert len(used) == 9


def test_nothing_is_asked_for_before_the_ledger_has_reserved_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask(self: Any, places: Any, seed: bytes) -> None:
        asked.append((tuple(places), account.run.mark))

    monkeypatch.setattr(ahead.Ahead, "ask", ask)

    def run_with(workers: int, name: str) -> tuple[dpcore.torch.PrivateRun, int]:
        nonlocal account
        Ledger.create(tmp_path / name, budget=(5.0, 1e-5))
        run = begun(workers, ledger=tmp_path / name, epochs=20, method=sgd(noise_multiplier=1.5))
        account = run._engine.mechanism.account
        with pytest.raises(BudgetError):
            trained(run)
        return run, account.run.mark

    account: Any = None
    run, mark = run_with(3, "ahead")
    sampler, keys = run.plan.sampler, run._engine.mechanism.keys
    step_of = {tuple(map(int, sampler.indices(keys.sampling, step))): step for step in range(mark + 10)}
    assert len(asked) > 10
    assert all(step_of[places] < reserved for places, reserved in asked)
    assert run.steps_taken == mark == run_with(0, "plain")[1]


def test_workers_end_with_the_run_and_leave_the_callers_handlers_alone(tmp_path: Path) -> None:
    """The caller's handler may close the run's account, which is no business of a worker's."""
    told = tmp_path / "told"
    before = signal.signal(signal.SIGTERM, lambda *_: told.touch())
    try:
        run = begun(2)
        trained(run, stop=4)
        pids = list(run.loader.data._ahead._pool._processes)
        assert len(pids) == 2
        del run
        gc.collect()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not told.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
def test_workers_end_when_their_run_was_killed() -> None:
    """Another child of the run's process, which lives on, holds a copy of the connections: they never end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # threads of the parent's kernels do not live on
        ahead._PATIENCE = 0.05  # its workers inherit it
        run = begun(2)
        trained(run, stop=4)
        pids = list(run.loader.data._ahead._pool._processes)
        if holder := os.fork():
            os.write(writing, " ".join(map(str, [holder, *pids])).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        os._exit(0)
    holder, *pids = map(int, os.read(reading, 100).split())
    os.waitpid(child, 0)
    assert len(pids) == 2
    deadline = time.monotonic() + 10 * ahead._PATIENCE
    try:
        while any(map(_alive, pids)):
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        os.kill(holder, signal.SIGKILL)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
