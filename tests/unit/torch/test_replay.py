"""A row of noise is drawn twice for one sum only: what a training loop may change between a crash and a replay."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpcore
import dpcore.torch
from dpcore.errors import DataError, PrivacyError
from dpcore.ledger import Ledger, LedgerRun
from dpcore.mechanism.mechanism import Mechanism
from dpcore.methods import dp_adam
from tests.unit.torch_runs import DATA, model, saved, start, values

Sums = dict[tuple[bytes, int], set[str]]
Run = dpcore.torch.PrivateRun


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    """Digests of the sums that met each row of each key."""
    found: Sums = {}
    take = Mechanism._take

    def watched(self: Mechanism, slots: Any, row: int, *rest: Any) -> None:
        content = b"".join(np.ascontiguousarray(slot.total).tobytes() for slot in slots)
        found.setdefault((self.keys.noise, row), set()).add(hashlib.sha256(content).hexdigest())
        take(self, slots, row, *rest)

    monkeypatch.setattr(Mechanism, "_take", watched)
    return found


class Problem:
    """A run with a ledger, stopped after 7 steps, with a checkpoint of step 3: as after a crash."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger.create(folder / "ledger")

    def run(self, net: nn.Module | None = None, method: Any = None, **options: Any) -> Run:
        options = {"ledger": self.ledger, "key": None, "exact_key": False, "epochs": 10, **options}
        return start(model() if net is None else net, method, **options)

    def crashed(self, run: Run, **loop: Any) -> dict[str, Any]:
        go(run, 3, **loop)
        state = saved(run)
        go(run, 4, **loop)
        return state

    def resumed(self, run: Run, state: dict[str, Any]) -> Run:
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        return run


@pytest.fixture
def problem(tmp_path: Path) -> Problem:
    return Problem(tmp_path)


def go(
    run: Run,
    count: int,
    change: Callable[[Any], Any] = lambda batch: batch,
    after: Callable[[Run], Any] = lambda run: None,
    public: Callable[[], Any] = lambda: None,
) -> None:
    end = run.steps_taken + count
    while run.steps_taken < end:
        for batch in run.loader:
            run.step(change(batch), public())
            after(run)
            if run.steps_taken == end:
                return


def forks(run: Run) -> int:
    return run._engine.mechanism.keys.forks


def clean(sums: Sums) -> bool:
    return all(len(seen) == 1 for seen in sums.values())


def test_an_unchanged_run_is_replayed(problem: Problem, sums: Sums) -> None:
    run = problem.run()
    state = problem.crashed(run)
    again = problem.resumed(problem.run(), state)
    go(again, 4)
    assert forks(again) == 0
    assert clean(sums)
    assert torch.equal(values(again.model), values(run.model))


def test_the_same_batch_in_another_wrapping_is_the_same(problem: Problem, sums: Sums) -> None:
    loop = {"change": lambda batch: [batch[0].float().reshape(-1, 5), batch[1].to(torch.int64)]}
    state = problem.crashed(problem.run(), **loop)
    again = problem.resumed(problem.run(), state)
    go(again, 6, **loop)
    assert forks(again) == 0
    assert clean(sums)


def test_a_look_at_the_average_is_no_change(problem: Problem, sums: Sums) -> None:
    def look(run: Run) -> None:
        with run.averaged():
            run.model(DATA[0])

    method = dpcore.methods.dp_sgd(
        lr=0.3, noise_multiplier=1.0, batch_size=8, averaging=dpcore.stages.updates.averaging.UniformAverage()
    )
    state = problem.crashed(problem.run(method=method), after=look)
    again = problem.resumed(problem.run(method=method), state)
    go(again, 6, after=look)
    assert forks(again) == 0
    assert clean(sums)


def augment(batch: Any) -> Any:
    return batch[0] + torch.randn_like(batch[0]), batch[1]


def augment_in_place(batch: Any) -> Any:
    batch[0].add_(torch.randn_like(batch[0]))
    return batch


def clamp(run: Run) -> None:
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.clamp_(-0.2, 0.2)


def clamp_data(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def halve_rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 0.15


LOOPS: dict[str, dict[str, Any]] = {
    "augmented by the caller": {"change": augment},
    "augmented in place": {"change": augment_in_place},
    "parameters clamped": {"after": clamp},
    "parameters clamped by data": {"after": clamp_data},
    "another learning rate": {"after": halve_rate},
    "recorded": {"after": lambda run: run.record_gradients(5)},
    "evaluation mode": {"after": lambda run: run.model.eval()},
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("when", ["before the crash", "after it", "both"])
def test_a_change_in_the_loop_forks(problem: Problem, sums: Sums, name: str, when: str) -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.5), nn.Linear(7, 3))

    state = problem.crashed(problem.run(net()), **(LOOPS[name] if when != "after it" else {}))
    again = problem.resumed(problem.run(net()), state)
    try:
        go(again, 6, **(LOOPS[name] if when != "before the crash" else {}))
    except PrivacyError as refusal:
        assert "the same noise must not be added to another sum" in str(refusal)  # noqa: PT017
        assert when == "after it"
        again = problem.run(net())
        again.model.load_state_dict(state["model"])
        again.optimizer.load_state_dict(state["optimizer"], fork=True)
        go(again, 6, **LOOPS[name])
    assert clean(sums)


def test_a_checkpoint_taken_while_a_fork_is_due_belongs_to_the_branch(problem: Problem, sums: Sums) -> None:
    """The replayed row is the same sum; the parameters that another learning rate made of it are not."""
    state = problem.crashed(problem.run())
    again = problem.resumed(problem.run(), state)
    halve_rate(again)
    go(again, 1)
    state = saved(again)
    third = problem.resumed(problem.run(), state)
    go(third, 3)
    assert forks(third) == 1
    assert clean(sums)


def test_parameters_other_than_the_checkpoints_are_no_start_of_a_replay(problem: Problem, sums: Sums) -> None:
    """Row 3 follows for the first time, on a model that was not loaded; then it is asked for from the right one."""
    run = problem.run()
    go(run, 3)
    state = saved(run)
    run.close()
    other = problem.run(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)))
    other.optimizer.load_state_dict(state["optimizer"])
    go(other, 3)
    again = problem.resumed(problem.run(), state)
    go(again, 3)
    assert clean(sums)


def test_data_edited_in_place_are_not_those_of_the_fingerprint(problem: Problem, sums: Sums) -> None:
    """The fingerprint was taken before; a resumed run that does not edit has the same one."""
    data = tuple(tensor.clone() for tensor in DATA)
    run = problem.run(data=data)
    data[0].mul_(2)
    state = problem.crashed(run)
    again = problem.resumed(problem.run(), state)
    go(again, 6)
    assert forks(again) == 1
    assert clean(sums)


def test_public_batches_are_not_known(problem: Problem, sums: Sums) -> None:
    method = dp_adam(lr=0.05, variant="side_information", noise_multiplier=1.0, batch_size=8)
    loop = {"public": lambda: (torch.rand(4, 5), torch.zeros(4, dtype=torch.int64))}
    state = problem.crashed(problem.run(method=method), **loop)
    again = problem.resumed(problem.run(method=method), state)
    go(again, 6, **loop)
    assert forks(again) == 1
    assert clean(sums)
    assert any("public batches" in caveat for caveat in again.statement().caveats)


class Scaled(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.linear = scale, nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Smoothed:
    def __init__(self, smoothing: float) -> None:
        self.smoothing = smoothing

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, label_smoothing=self.smoothing)


def closure(smoothing: float) -> Any:
    return lambda output, target: F.cross_entropy(output, target, label_smoothing=smoothing)


def weighted(first: float) -> nn.Module:
    return nn.CrossEntropyLoss(weight=torch.tensor([first, 1.0, 1.0]), reduction="sum")


DIFFERENT: dict[str, Callable[[float], dict[str, Any]]] = {
    "partial": lambda x: {"loss": functools.partial(F.cross_entropy, label_smoothing=x)},
    "module": lambda x: {"loss": nn.CrossEntropyLoss(label_smoothing=x)},
    "buffer": lambda x: {"loss": weighted(x)},
    "closure": lambda x: {"loss": closure(x)},
    "object": lambda x: {"loss": Smoothed(x)},
    "model": lambda x: {"net": Scaled(x)},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_loss_or_model_forks(problem: Problem, sums: Sums, name: str) -> None:
    state = problem.crashed(problem.run(**DIFFERENT[name](0.125)))
    same = problem.resumed(problem.run(**DIFFERENT[name](0.125)), state)
    go(same, 2)
    assert forks(same) == 0
    again = problem.resumed(problem.run(**DIFFERENT[name](0.5)), state)
    go(again, 6)
    assert forks(again) == 1
    assert clean(sums)


class Noisy(torch.utils.data.Dataset):
    """Draws by torch, which is seeded, or by NumPy, which is not."""

    def __init__(self, by_torch: bool) -> None:
        self.by_torch = by_torch

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> Any:
        drawn = torch.randn(5) if self.by_torch else torch.from_numpy(np.random.default_rng().normal(size=5)).float()
        return DATA[0][i] + drawn, DATA[1][i]


@pytest.mark.parametrize(("by_torch", "workers", "replayed"), [(True, 0, True), (True, 2, False), (False, 0, False)])
def test_what_reading_draws_must_repeat(
    problem: Problem, sums: Sums, by_torch: bool, workers: int, replayed: bool
) -> None:
    options = {"data": Noisy(by_torch), "data_id": "noisy", "num_workers": workers}
    state = problem.crashed(problem.run(**options))
    again = problem.resumed(problem.run(**options), state)
    go(again, 6)
    assert forks(again) == (0 if replayed else 1)
    assert clean(sums)


def test_a_ledger_that_fails_amid_a_fork_leaves_other_keys(
    problem: Problem, sums: Sums, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on after the error must not go on under the keys of the branch that was left."""
    state = problem.crashed(problem.run())
    again = problem.run()
    again.model.load_state_dict(state["model"])

    def locked(self: LedgerRun, digest: str) -> None:
        raise DataError("ledger: another process has kept it locked")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerRun, "use_key", locked)
        with pytest.raises(DataError):
            again.optimizer.load_state_dict(state["optimizer"], fork=True)
    go(again, 3, change=augment)
    assert clean(sums)
    third = problem.resumed(problem.run(), state)
    halve_rate(third)
    go(third, 1)
    with monkeypatch.context() as patch:
        patch.setattr(LedgerRun, "use_key", locked)
        with pytest.raises(DataError):
            go(third, 1)
    go(third, 3, change=augment)
    assert clean(sums)


def test_a_ledger_that_is_locked_is_no_unknown_ledger(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is forked as unknown is charged from its first step on: not for a lock that will go away."""
    state = problem.crashed(problem.run())
    again = problem.run()

    def locked(*rest: Any, **options: Any) -> None:
        raise DataError("ledger: another process has kept it locked")

    monkeypatch.setattr(Ledger, "resume", locked)
    with pytest.raises(DataError, match="locked"):
        again.optimizer.load_state_dict(state["optimizer"])


def test_steps_abandoned_before_the_ledger_are_stated_and_charged(problem: Problem) -> None:
    """A run without a ledger went back behind 4 steps; its checkpoint says so, and no ledger forgets it."""
    run = problem.run(ledger=None)
    state = problem.crashed(run)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    go(run, 1)
    state = saved(run)
    again = problem.resumed(problem.run(), state)
    go(again, 1)
    assert (again.statement().steps_taken, again.statement().steps_abandoned) == (5, 4)
    state = saved(again)
    go(again, 2)
    again.close()
    assert sum(run.releases for run in problem.ledger.runs() if run.steps > 1) == 7
    charged = problem.ledger.filter.charge(again.plan.event_after(7, 4))
    assert sum(run.charge for run in problem.ledger.runs()) == pytest.approx(charged, rel=1e-9)
    for fork, steps, abandoned in ((None, 7, 4), (True, 5, 6)):
        third = problem.resumed(problem.run(), state) if fork is None else problem.run()
        if fork:
            third.model.load_state_dict(state["model"])
            third.optimizer.load_state_dict(state["optimizer"], fork=True)
        assert (third.statement().steps_taken, third.statement().steps_abandoned) == (steps, abandoned)
