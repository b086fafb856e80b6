"""Training runs that are killed with SIGKILL at any moment: the ledger covers what they released.

A child trains, saves checkpoints, and writes down every row of noise that it draws, before it draws it, with its key's
digest and the digest of the sum that the row is added to; the parent kills it at some moment and starts another one,
until the run is complete.
"""

import hashlib
import multiprocessing
import os
import random
import re
import signal
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
import dpcore.statement.verify
import dpcore.torch
from dpcore.errors import TrainingWarning
from dpcore.ledger import Ledger
from dpcore.mechanism.mechanism import Mechanism
from tests.depth import chosen
from tests.unit.ledger_tools import restored

KEY = bytes(range(32))
STEPS = 60
SAVE_EVERY = 4
EXAMPLES = 64
KILLS = chosen(24, 200)
RUNS = 4  # share them


def build(ledger: Path | None, **changes: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = (torch.linspace(-1, 1, EXAMPLES * 6).reshape(EXAMPLES, 6), torch.arange(EXAMPLES) % 3)
    method = dpcore.methods.disk(lr=0.2, noise_multiplier=1.0, batch_size=8, base="momentum")
    options = {"steps": STEPS, "target_delta": 1e-5, "key": KEY, "ledger": ledger} | changes
    return model, dpcore.torch.make_private(model, options.pop("data", data), method, **options)


def save(path: Path, model: nn.Module, private: Any) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    torch.save({"model": model.state_dict(), "optimizer": private.optimizer.state_dict()}, draft)
    draft.replace(path)


def load(path: Path, model: nn.Module, private: Any) -> None:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    private.optimizer.load_state_dict(saved["optimizer"])


class Recorder:
    """Writes down key, row and sum of every draw: the moment at which noise meets a sum."""

    def __init__(self, folder: Path) -> None:
        self.log, take = os.open(folder / "drawn", os.O_WRONLY | os.O_APPEND | os.O_CREAT), Mechanism._take

        def recorded(mechanism: Mechanism, slots: Any, row: int, *rest: Any) -> None:
            content = b"".join(np.ascontiguousarray(slot.total).tobytes() for slot in slots)
            line = f"\n{mechanism.keys.digest} {row} {hashlib.sha256(content).hexdigest()}"
            os.write(self.log, line.encode())  # a kill may cut it off where a page ends: then nothing was drawn
            take(mechanism, slots, row, *rest)

        Mechanism._take = recorded  # type: ignore[method-assign, assignment]


def train(folder: Path, model: nn.Module, private: Any) -> None:
    """What a child does with a run that was built before: go on from the last checkpoint to the end."""
    Recorder(folder)
    checkpoint = folder / "checkpoint.pt"
    load(checkpoint, model, private)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    while private.steps_taken < STEPS and not stopped:
        for batch in private.loader:
            private.step(batch)
            if private.steps_taken % SAVE_EVERY == 0:
                save(checkpoint, model, private)
            if stopped:
                break
    save(checkpoint, model, private)
    private.close()


def drawn(folder: Path) -> list[tuple[str, int, str]]:
    path = folder / "drawn"
    lines = re.findall(r"^(\S+) (\d+) ([0-9a-f]{64})$", path.read_text(), re.MULTILINE) if path.exists() else []
    return [(key, int(row), total) for key, row, total in lines]


def size(folder: Path) -> int:
    return (folder / "drawn").stat().st_size if (folder / "drawn").exists() else 0


def check(folder: Path, *logs: Path) -> None:
    """Whatever left a process is covered by what the ledger holds, and no row of noise met two sums.

    `logs` are the folders of what was drawn, by default this one.
    """
    ledger = Ledger.open(folder / "ledger.db")
    (run,) = ledger.runs()
    branch_of, first = {}, {}
    for item in ledger.export()["entries"]:
        if item["kind"] in ("begin", "key"):
            branch_of[item["key_digest"]] = item["branch"]
        if item["kind"] == "fork":
            first[item["child"]] = item["row"]
    for log in logs or (folder,):
        sums, rows = defaultdict(list), drawn(log)
        for key, row, total in rows:
            sums[key, row].append(total)
            branch = branch_of[key]
            assert first.get(branch, 0) <= row < run.marks[branch]
        assert all(len(totals) == 1 for totals in sums.values()), "a row of noise was drawn for two sums"
        assert len(rows) <= run.releases
    assert ledger.total(1e-5).spent == pytest.approx(sum(one.charge for one in ledger.runs()))


def fresh(folder: Path, **options: Any) -> tuple[nn.Module, Any]:
    """A run on a ledger, and its checkpoint from before the first step."""
    folder.mkdir()
    Ledger.create(folder / "ledger.db")
    model, private = build(folder / "ledger.db", **options)
    save(folder / "checkpoint.pt", model, private)
    private.close()
    return model, private


def kill_until_complete(folder: Path, moments: random.Random, least: int, options: dict[str, Any]) -> int:
    """Run children until one completes the run, or so many were killed; return how many were.

    Three of four are killed after a step of theirs, so that they get on however slow the machine is; the fourth in its
    first hundredth of a second.
    """
    model, private = fresh(folder, **options)
    context, kills = multiprocessing.get_context("fork"), 0
    while True:
        child = context.Process(target=train, args=(folder, model, private))
        before = size(folder)
        child.start()
        if kills < least:
            rows = moments.randrange(1, 2 * SAVE_EVERY) * (moments.random() < 0.75)
            wanted = before + 130 * rows  # bytes
            while child.is_alive() and size(folder) < wanted:
                time.sleep(1e-3)
            child.join(moments.uniform(0.0, 0.01))
            killed = child.is_alive()
            if killed:
                os.kill(child.pid or 0, signal.SIGKILL)
                kills += 1
        else:
            killed = False
        child.join()
        assert killed or child.exitcode == 0
        check(folder)
        if not killed:
            return kills


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order"])
def test_killed_runs_are_covered_and_no_row_meets_two_sums(tmp_path: Path, sampling: str) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    moments, kills, number = random.Random(sampling), 0, 0
    while kills < KILLS // 2:
        kills += kill_until_complete(tmp_path / str(number), moments, KILLS // RUNS, {"sampling": sampling})
        number += 1
        assert number < KILLS, f"{kills} kills only"
    torch.set_num_threads(threads)


def test_a_sigterm_costs_no_step(tmp_path: Path) -> None:
    model, private = fresh(folder := tmp_path / "run")
    context = multiprocessing.get_context("fork")
    for number in range(4):
        child = context.Process(target=train, args=(folder, model, private))
        child.start()
        while number < 3 and child.is_alive() and len(drawn(folder)) < 7 * (number + 1):
            time.sleep(1e-3)
        if number < 3:
            os.kill(child.pid or 0, signal.SIGTERM)
        child.join()
        assert child.exitcode == 0
        check(folder)
        assert Ledger.open(folder / "ledger.db").runs()[0].releases == len(drawn(folder))
    assert len(drawn(folder)) == STEPS


def after(folder: Path, step: int) -> Path:
    """A run of which `step` + 5 steps were released, and a checkpoint after `step`."""
    folder.mkdir()
    Ledger.create(ledger := folder / "ledger.db")
    model, private = build(ledger)
    step_on(private, step)
    save(folder / "checkpoint.pt", model, private)
    step_on(private, 5)
    private.close()
    return ledger


def gone_on(folder: Path, ledger: Path, steps: int, **changes: Any) -> tuple[nn.Module, Any]:
    """The run goes on from the checkpoint for so many steps."""
    model, private = build(ledger, **changes)
    load(folder / "checkpoint.pt", model, private)
    step_on(private, steps)
    private.close()
    return model, private


def other_data() -> Any:
    return (torch.linspace(-1, 1, EXAMPLES * 6).reshape(EXAMPLES, 6) + 1e-3, torch.arange(EXAMPLES) % 3)


def step_on(private: Any, steps: int) -> None:
    target = private.steps_taken + steps
    while private.steps_taken < target:
        for batch in private.loader:
            private.step(batch)
            if private.steps_taken == target:
                break


def other_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, target) * 1.01


@pytest.mark.parametrize("change", [{}, {"data": other_data()}, {"loss": other_loss}], ids=["none", "data", "loss"])
def test_steps_behind_the_checkpoint_are_charged_whatever_is_the_same(tmp_path: Path, change: dict[str, Any]) -> None:
    ledger = after(tmp_path / "run", 4)
    told = pytest.warns(TrainingWarning, match="2 different fingerprints") if "data" in change else nullcontext()
    with told:
        _, private = gone_on(tmp_path / "run", ledger, 5, **change)
    (run,) = Ledger.open(ledger).runs()
    assert run.releases == 14
    statement = private.statement()
    assert (statement.randomness["forks"], statement.rows_abandoned) == (1, ((4, 9),))
    expected = dpcore.accounting.epsilon(private.plan.event_after(9, ((4, 9),)), 1e-5)
    assert private.epsilon() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("put_back", [True, False], ids=["older copy", "other ledger"])
def test_what_a_ledger_does_not_know_is_charged_anew_and_said_from_then_on(tmp_path: Path, put_back: bool) -> None:
    ledger, folder, other = after(tmp_path / "run", 4), tmp_path / "run", tmp_path / "other.db"
    Ledger.create(other)
    if put_back:  # the same ledger, before its first run
        exported = Ledger.open(ledger).export()
        first = {name: exported[name][:1] for name in ("entries", "seals")}
        other.unlink()
        restored(other, first)
    model, private = gone_on(folder, other, 2)
    (run,) = Ledger.open(other).runs()
    assert run.releases == 6, "the steps before the checkpoint are charged here too"
    assert "does not know" in " ".join(private.statement().caveats)
    save(folder / "checkpoint.pt", model, private)
    _, private = gone_on(folder, other, 0)
    caveats = " ".join(private.statement().caveats)
    assert "does not know" in caveats
    assert "are counted as far as the ledger knows of them" in caveats


def test_a_step_is_paid_for_before_its_batch_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ledger.db"
    Ledger.create(ledger)
    _, private = build(ledger)
    mechanism = private._engine.mechanism
    known: list[int] = []
    drawn = type(mechanism.plan.sampler).indices

    def indices(sampler: Any, key: bytes, step: int, **shard: Any) -> Any:
        known.append(max((mark for run in Ledger.open(ledger).runs() for mark in run.marks.values()), default=0))
        return drawn(sampler, key, step, **shard)

    monkeypatch.setattr(type(mechanism.plan.sampler), "indices", indices)
    step_on(private, 3)
    assert [mark > step for step, mark in enumerate(known)] == [True] * 3


def test_steps_lost_under_correlated_noise_are_charged_as_their_rows(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.db"
    Ledger.create(ledger)
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    data = (torch.linspace(-1, 1, EXAMPLES * 6).reshape(EXAMPLES, 6), torch.arange(EXAMPLES) % 3)
    method = dpcore.methods.memf(lr=0.1, noise_multiplier=4.0, batch_size=8, strategy="tree")
    options = {"steps": 24, "target_delta": 1e-5, "sampling": "fixed_order", "ledger": ledger}
    private = dpcore.torch.make_private(model, data, method, **options)
    step_on(private, 4)
    save(tmp_path / "checkpoint.pt", model, private)
    step_on(private, 12)
    private.close()
    private = dpcore.torch.make_private(model, data, method, **options)
    load(tmp_path / "checkpoint.pt", model, private)
    step_on(private, 2)
    private.close()
    plan, statement = private.plan, private.statement()
    expected = plan.event_after(6, ((4, 16),))
    assert dpcore.accounting.Event.from_dict(statement.event) == expected
    assert (statement.steps_abandoned, statement.rows_abandoned) == (12, ((4, 16),))
    assert Ledger.open(ledger).runs()[0].event == expected
    assert private.epsilon() < 0.5 * dpcore.accounting.epsilon(plan.event_after(6, 12), 1e-5)
    assert private.epsilon() < dpcore.accounting.epsilon(plan.event, 1e-5)
    assert dpcore.statement.verify.holds(dpcore.statement.verify.verify(statement))
