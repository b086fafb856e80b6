"""Training runs that are killed with SIGKILL at any moment: the ledger covers what they released, and replay is exact.

A child trains, saves checkpoints, and writes every step it released to a file; the parent kills it some time after a
random number of them and starts another one, until the run is complete.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dpcore
import dpcore.statement.verify
import dpcore.torch
from dpcore.ledger import Ledger

KEY = bytes(range(32))
STEPS = 60
SAVE_EVERY = 4
EXAMPLES = 64


def build(ledger: Path | None, **changes: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    data = (torch.linspace(-1, 1, EXAMPLES * 6).reshape(EXAMPLES, 6), torch.arange(EXAMPLES) % 3)
    method = dpcore.methods.disk(lr=0.2, noise_multiplier=1.0, batch_size=8, base="momentum")
    options = {"steps": STEPS, "target_delta": 1e-5, "key": KEY, "exact_key": True, "ledger": ledger} | changes
    return model, dpcore.torch.make_private(model, options.pop("data", data), method, **options)


def fingerprint(model: nn.Module) -> str:
    return hashlib.sha256(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()).hexdigest()


def save(path: Path, model: nn.Module, private: Any) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    torch.save({"model": model.state_dict(), "optimizer": private.optimizer.state_dict()}, draft)
    draft.replace(path)


def load(path: Path, model: nn.Module, private: Any, **options: Any) -> None:
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    private.optimizer.load_state_dict(saved["optimizer"], **options)


def train(folder: Path) -> None:
    """What a child does: go on from the last checkpoint to the end."""
    model, private = build(folder / "ledger.db")
    checkpoint = folder / "checkpoint.pt"
    load(checkpoint, model, private)
    log = os.open(folder / "released", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    while private.steps_taken < STEPS:
        for batch in private.loader:
            private.step(batch)
            os.write(log, f"{private.steps_taken} {fingerprint(model)}\n".encode())
            if private.steps_taken % SAVE_EVERY == 0:
                save(checkpoint, model, private)
    save(checkpoint, model, private)
    private.close()


@pytest.fixture(scope="module")
def straight() -> Iterator[dict[int, str]]:
    """Fingerprints of the parameters after every step of a run that nobody kills."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model, private = build(None)
    found = {}
    while private.steps_taken < STEPS:
        for batch in private.loader:
            private.step(batch)
            found[private.steps_taken] = fingerprint(model)
    yield found
    torch.set_num_threads(threads)


def released(folder: Path) -> list[tuple[int, str]]:
    path = folder / "released"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), digest) for step, _, digest in (line.partition(" ") for line in lines)]


def wait_for(count: int, folder: Path, child: Any) -> None:
    """Wait until so many steps have been released, or the child has ended."""
    while len(released(folder)) < count and child.is_alive():
        time.sleep(1e-3)


def kill_until_complete(folder: Path, moments: random.Random, straight: dict[int, str]) -> int:
    """Run children until one completes the run; return how many were killed.

    Three of four are killed after a step of theirs, so that they get on however slow the machine is; the fourth in its
    first tenth of a second.
    """
    folder.mkdir()
    ledger = folder / "ledger.db"
    Ledger.create(ledger)
    # Under an exact key a second run is refused, so the first checkpoint must exist before anybody is killed.
    model, private = build(ledger)
    save(folder / "checkpoint.pt", model, private)
    private.close()
    context, kills = multiprocessing.get_context("fork"), 0
    while True:
        before = len(released(folder))
        child = context.Process(target=train, args=(folder,))
        child.start()
        if moments.random() < 0.75:
            wait_for(before + moments.randrange(1, 4 * SAVE_EVERY), folder, child)
            child.join(moments.uniform(0.0, 0.02))
        else:
            child.join(moments.uniform(0.0, 0.1))
        killed = child.is_alive()
        if killed:
            os.kill(child.pid or 0, signal.SIGKILL)
            kills += 1
        child.join()
        assert killed or child.exitcode == 0
        left = released(folder)
        # The first line of the contract: whatever left a process is covered by what the ledger holds.
        for step, digest in left:
            assert straight[step] == digest, "a replayed step must be the very release of the straight run"
        runs = Ledger.open(ledger).runs()
        reserved = max((mark for run in runs for mark in run.marks.values()), default=0)
        assert reserved >= max((step for step, _ in left), default=0)
        if not killed:
            assert [run.releases for run in runs] == [STEPS], "replays are free, and a clean end gives the rest back"
            assert len(left) >= STEPS
            return kills


@pytest.mark.parametrize("wanted", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_runs_are_covered_and_replay_exactly(tmp_path: Path, straight: dict[int, str], wanted: int) -> None:
    moments, kills, number = random.Random(wanted), 0, 0
    while kills < wanted:
        kills += kill_until_complete(tmp_path / str(number), moments, straight)
        number += 1
        assert number < 20 * wanted, f"{kills} kills only"


def after(folder: Path, step: int) -> Path:
    """A run of which `step` + 5 steps were released, and a checkpoint after `step`."""
    folder.mkdir()
    ledger = folder / "ledger.db"
    Ledger.create(ledger)
    model, private = build(ledger)
    step_on(private, step)
    save(folder / "checkpoint.pt", model, private)
    step_on(private, 5)
    private.close()
    return ledger


def other_data() -> Any:
    return (torch.linspace(-1, 1, EXAMPLES * 6).reshape(EXAMPLES, 6) + 1e-3, torch.arange(EXAMPLES) % 3)


def step_on(private: Any, steps: int) -> None:
    target = private.steps_taken + steps
    while private.steps_taken < target:
        for batch in private.loader:
            private.step(batch)
            if private.steps_taken == target:
                break


def test_an_allowed_replay_is_free_and_equals_the_straight_run(tmp_path: Path, straight: dict[int, str]) -> None:
    ledger = after(tmp_path / "run", 4)
    model, private = build(ledger)
    load(tmp_path / "run" / "checkpoint.pt", model, private)
    step_on(private, 5)
    assert fingerprint(model) == straight[9]
    private.close()
    (run,) = Ledger.open(ledger).runs()
    assert (run.releases, list(run.marks.values())) == (9, [9])
    assert private.statement().steps_taken == 9


@pytest.mark.parametrize(
    "change",
    [{"data": other_data()}, {"microbatch_size": 3}, {"loss": lambda a, b: nn.functional.cross_entropy(a, b) * 1.01}],
    ids=["data", "microbatch", "loss"],
)
def test_a_change_of_what_shapes_the_sums_forks_and_is_charged(
    tmp_path: Path, straight: dict[int, str], change: dict[str, Any]
) -> None:
    ledger = after(tmp_path / "run", 4)
    model, private = build(ledger, **change)
    if "microbatch_size" in change:
        saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
        saved["optimizer"]["dpcore"]["public"]["microbatch_size"] = 3
        torch.save(saved, tmp_path / "run" / "checkpoint.pt")
    load(tmp_path / "run" / "checkpoint.pt", model, private)
    step_on(private, 1)
    assert fingerprint(model) != straight[5]
    step_on(private, 4)
    private.close()
    (run,) = Ledger.open(ledger).runs()
    assert run.releases == 14
    statement = private.statement()
    assert statement.randomness["forks"] == 1
    assert private.epsilon() == pytest.approx(dpcore.accounting.epsilon(private.plan.event_after(9, 5), 1e-5), rel=1e-3)


def test_a_changed_learning_rate_forks_at_the_next_step(tmp_path: Path, straight: dict[int, str]) -> None:
    ledger = after(tmp_path / "run", 4)
    model, private = build(ledger)
    load(tmp_path / "run" / "checkpoint.pt", model, private)
    private.optimizer.param_groups[0]["lr"] *= 2
    step_on(private, 1)
    (run,) = Ledger.open(ledger).runs()
    assert run.releases == 9, "the sum of the first replayed step does not depend on its learning rate"
    step_on(private, 4)
    private.close()
    (run,) = Ledger.open(ledger).runs()
    assert run.releases == 9 + 4


def test_another_backend_forks_and_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = after(tmp_path / "run", 4)
    model, private = build(ledger)
    monkeypatch.setattr(private._engine.mechanism.backend, "name", "another")
    load(tmp_path / "run" / "checkpoint.pt", model, private)
    step_on(private, 5)
    private.close()
    (run,) = Ledger.open(ledger).runs()
    assert run.releases == 14


def test_a_model_that_was_not_loaded_forks(tmp_path: Path) -> None:
    ledger = after(tmp_path / "run", 4)
    _, private = build(ledger)
    saved = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    private.optimizer.load_state_dict(saved["optimizer"])
    step_on(private, 1)
    private.close()
    (run,) = Ledger.open(ledger).runs()
    assert run.releases == 10


def test_a_checkpoint_whose_ledger_is_missing_forks_and_the_statement_says_so(tmp_path: Path) -> None:
    after(tmp_path / "run", 4)
    other = tmp_path / "other.db"
    Ledger.create(other)
    model, private = build(other)
    load(tmp_path / "run" / "checkpoint.pt", model, private)
    step_on(private, 1)
    private.close()
    (run,) = Ledger.open(other).runs()
    assert run.releases == 5, "the steps before the checkpoint are charged here too"
    assert "does not know" in " ".join(private.statement().caveats)


def test_a_checkpoint_goes_on_from_the_mark_under_any_settings(tmp_path: Path) -> None:
    ledger = after(tmp_path / "run", 4)
    model, private = build(ledger)
    load(tmp_path / "run" / "checkpoint.pt", model, private)
    step_on(private, 5)
    save(tmp_path / "later.pt", model, private)
    private.close()
    model, private = build(ledger, data=other_data())
    load(tmp_path / "later.pt", model, private)
    step_on(private, 2)
    private.close()
    (run,) = Ledger.open(ledger).runs()
    assert run.releases == 11


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


def on_a_ledger_from_before(folder: Path) -> tuple[nn.Module, Any]:
    """A run that went on for two steps from a checkpoint after four, beside a ledger from before the first."""
    ledger = folder / "ledger.db"
    Ledger.create(ledger)
    before = ledger.read_bytes()
    model, private = build(ledger)
    step_on(private, 4)
    save(folder / "checkpoint.pt", model, private)
    step_on(private, 5)
    private.close()
    ledger.write_bytes(before)
    model, private = build(ledger)
    load(folder / "checkpoint.pt", model, private)
    step_on(private, 2)
    return model, private


def test_a_ledger_from_before_the_run_charges_it_anew(tmp_path: Path) -> None:
    _, private = on_a_ledger_from_before(tmp_path)
    private.close()
    (run,) = Ledger.open(tmp_path / "ledger.db").runs()
    assert run.releases == 6
    assert "does not know" in " ".join(private.statement().caveats)


def test_what_a_ledger_never_knew_is_said_after_the_next_checkpoint_too(tmp_path: Path) -> None:
    model, private = on_a_ledger_from_before(tmp_path)
    save(tmp_path / "checkpoint.pt", model, private)
    private.close()
    model, private = build(tmp_path / "ledger.db")
    load(tmp_path / "checkpoint.pt", model, private)
    caveats = " ".join(private.statement().caveats)
    assert "does not know" in caveats
    assert "are counted as far as the ledger knows of them" in caveats


def test_a_fork_that_is_refused_leaves_no_branch(tmp_path: Path) -> None:
    ledger = after(tmp_path / "run", 4)
    model, private = build(ledger, data=other_data())
    with pytest.raises(dpcore.errors.PrivacyError, match=r"fork=False: .* has changed since\. Leave fork out"):
        load(tmp_path / "run" / "checkpoint.pt", model, private, fork=False)
    (run,) = Ledger.open(ledger).runs()
    assert (run.forks, run.releases) == (0, 9)


def test_a_block_lost_under_correlated_noise_costs_one_run_more_and_not_one_a_row(tmp_path: Path) -> None:
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
    load(tmp_path / "checkpoint.pt", model, private, fork=True)
    step_on(private, 2)
    private.close()
    plan, statement = private.plan, private.statement()
    expected = plan.event_after(6, 12, 1)
    assert dpcore.accounting.Event.from_dict(statement.event) == expected
    assert (statement.steps_abandoned, statement.branches_abandoned) == (12, 1)
    assert Ledger.open(ledger).runs()[0].event == expected
    assert private.epsilon() < 0.5 * dpcore.accounting.epsilon(plan.event_after(6, 12), 1e-5)
    assert dpcore.statement.verify.holds(dpcore.statement.verify.verify(statement))
