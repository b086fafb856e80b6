"""Saved and resumed runs: bit for bit the same where asked for, under fresh noise else; damaged states refused."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import dpcore
import dpcore.torch
from dpcore import accounting
from dpcore.errors import ArgumentError, PrivacyError
from tests.unit.torch_runs import DATA, KEY, as_text, finish, model, saved, sgd, start, values

PLAIN = {
    "doppler": lambda: dpcore.methods.doppler(lr=0.3, filter="f5", noise_multiplier=1.0, batch_size=8),
    "disk adam": lambda: dpcore.methods.disk(lr=0.03, base="adam", noise_multiplier=1.0, batch_size=8),
}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("stop", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_killed_and_resumed_equals_the_straight_run(name: str, stop: int, dtype: torch.dtype) -> None:
    def fresh(**options: Any) -> tuple[dpcore.torch.PrivateRun, Any]:
        torch.manual_seed(options.pop("seed", 1))
        net = nn.Sequential(nn.Linear(5, 9), nn.Dropout(0.3), nn.Linear(9, 3)).to(dtype)
        data = (DATA[0].to(dtype), DATA[1])
        run = start(net, PLAIN[name](), data=data, key=options.pop("key", KEY), **options)
        return run, lr_scheduler.CosineAnnealingLR(run.optimizer, 12)

    run, scheduler = fresh(microbatch_size=3)
    straight = finish(run, scheduler)
    run, scheduler = fresh(microbatch_size=3)
    finish(run, scheduler, stop=stop)
    state, schedule = saved(run), scheduler.state_dict()
    run, scheduler = fresh(microbatch_size=5, key=bytes(32), seed=2)
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"], fork=False)
    scheduler.load_state_dict(schedule)
    assert run.steps_taken == stop
    assert torch.equal(finish(run, scheduler), straight)
    assert run.statement().randomness["forks"] == 0


def test_resuming_forks_by_default_and_the_statement_says_so() -> None:
    run = start(model())
    finish(run, stop=5)
    state = saved(run)
    straight = finish(run)
    ends, batches = [], []
    for _ in range(2):
        again = start(model())
        again.model.load_state_dict(state["model"])
        again.optimizer.load_state_dict(state["optimizer"])
        assert again.steps_taken == 5
        batches.append(next(iter(again.loader))[0])
        ends.append(finish(again))
        statement = again.statement()
        assert statement.randomness["forks"] == 1
        assert "resumed 1 time" in " ".join(statement.caveats)
    assert not torch.equal(ends[0], straight)
    assert not torch.equal(ends[0], ends[1])
    assert batches[0].shape != batches[1].shape or not torch.equal(batches[0], batches[1])


def test_going_back_in_the_same_run_must_fork() -> None:
    run = start(model())
    finish(run, stop=2)
    state = saved(run)
    finish(run, stop=3)
    with pytest.raises(PrivacyError, match="already released steps 3 to 3"):
        run.optimizer.load_state_dict(state["optimizer"], fork=False)
    run.optimizer.load_state_dict(state["optimizer"])
    assert run.steps_taken == 2


@pytest.mark.parametrize("sampling", ["poisson", "fixed_order"])
def test_abandoned_steps_stay_counted(sampling: str) -> None:
    run = start(model(), sampling=sampling)
    finish(run, stop=2)
    state = saved(run)
    finish(run, stop=5)
    run.optimizer.load_state_dict(state["optimizer"])
    spent = {
        name: accounting.epsilon(run.plan.event_after(2, 3), 1e-5, name)
        for name in accounting.accountants_for(run.plan.event_after(2, 3))
    }
    assert run.steps_taken == 2
    assert run.epsilon() == min(spent.values()) > run.plan.epsilon(1e-5, steps=2)
    assert {name: run.epsilon(accountant=name) for name in spent} == spent
    assert run.statement().epsilon == spent
    assert any("3 further step(s)" in caveat for caveat in run.statement().caveats)


def test_two_runs_that_go_on_from_one_state_do_not_share_noise() -> None:
    first, second = (start(model(), key=None, exact_key=False) for _ in range(2))
    finish(first, stop=2)
    state = saved(first)
    second.model.load_state_dict(state["model"])
    second.optimizer.load_state_dict(state["optimizer"], fork=False)
    finish(first, stop=3)
    before = values(second.model)
    with pytest.raises(PrivacyError, match="already released with this key"):
        finish(second)
    assert torch.equal(values(second.model), before)


@pytest.mark.parametrize("part", ["run", "optimizer", "loader"])
def test_nothing_that_holds_keys_is_pickled(part: str) -> None:
    run = start(model())
    whole = {"run": run, "optimizer": run.optimizer, "loader": run.loader}[part]
    file = io.BytesIO()
    with pytest.raises(PrivacyError, match=r"not pickled or copied: save .*state_dict\(\)"):
        torch.save(whole, file)
    with pytest.raises(PrivacyError, match="not pickled or copied"):
        copy.deepcopy(whole)
    assert run._engine.mechanism.keys.noise not in file.getvalue()


def test_a_fork_under_a_fixed_order_keeps_the_order() -> None:
    """A new order halfway would let an example take part twice in one epoch, more often than is accounted."""
    run = start(model(), sampling="fixed_order")
    order = [run.plan.sampler.indices(run._engine.mechanism.keys.sampling, t).tolist() for t in range(8)]
    finish(run, stop=2)
    state = saved(run)
    again = start(model(), sampling="fixed_order", key=bytes(32))
    again.optimizer.load_state_dict(state["optimizer"])
    keys = again._engine.mechanism.keys
    assert keys.noise != run._engine.mechanism.keys.noise
    assert [again.plan.sampler.indices(keys.sampling, t).tolist() for t in range(8)] == order


def test_public_state_holds_no_secret() -> None:
    run = start(model(), dpcore.methods.disk(lr=0.1, noise_multiplier=1.0, batch_size=8))
    finish(run, stop=3)
    state = run.optimizer.state_dict()
    public = dpcore.torch.public_state(state)
    keys = run._engine.mechanism.keys
    assert state["dpcore"]["secret"]["noise_key"] == keys.noise.hex()
    assert set(public["dpcore"]) == {"format", "public"}
    for secret in (keys.noise, keys.sampling):
        assert secret.hex() not in repr(public)
        assert repr(secret) not in repr(public)
    with pytest.raises(ArgumentError, match="secret part"):
        run.optimizer.load_state_dict(public)


OTHER_RUNS = {
    "noise": (lambda: {"method": sgd(noise_multiplier=2.0)}, "noise_multiplier"),
    "clip": (lambda: {"method": sgd(max_grad_norm=2.0)}, "max_grad_norm"),
    "sampler": (lambda: {"sampling": "fixed_order"}, "sampler"),
    "length": (lambda: {"epochs": 4}, "steps is 12, this run's is 16"),
    "update": (lambda: {"method": sgd(base="momentum")}, "update"),
}


@pytest.mark.parametrize("name", OTHER_RUNS)
def test_state_of_other_settings_is_refused(name: str) -> None:
    run = start(model())
    finish(run, stop=2)
    options, words = OTHER_RUNS[name]
    other = start(model(), **options())
    before = as_text(other)
    with pytest.raises(ArgumentError, match=words):
        other.optimizer.load_state_dict(saved(run)["optimizer"])
    assert as_text(other) == before


def damaged(state: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".", 2) if path.startswith("dpcore") else path.split(".")
    for key in parents:
        state = state[key]
    if "/" in last:
        last, _, rest = last.partition("/")
        state, last = state[last], rest
    if value is None:
        del state[last]
    else:
        state[last] = value


DAMAGE = {
    "format": ("dpcore.format", 2, "its format is 2"),
    "no arrays": ("dpcore.public.arrays", None, "lacks 'arrays'"),
    "layout": ("dpcore.public.layout", [["0.weight", [7, 5], 0]], "its layout"),
    "an array": ("dpcore.public.arrays/0.weight/filter/0", None, "its arrays"),
    "another shape": ("dpcore.public.arrays/2.bias/filter/1", torch.zeros(4), "its arrays"),
    "another dtype": ("dpcore.public.arrays/2.bias/filter/1", torch.zeros(3).double(), "its arrays"),
    "a random generator": ("dpcore.public.rng", "philox", "its rng"),
    "step": ("dpcore.public.step", 13, "its step 13"),
    "a key": ("dpcore.secret.sampling_key", "abc", "'sampling_key'.*64 hexadecimal"),
    "no key": ("dpcore.secret.noise_key", None, "lacks 'noise_key'"),
    "groups": ("param_groups", [], "parameter groups"),
    "a group's setting": ("param_groups", [{"params": [0, 1, 2, 3], "weight_decay": 0.0}], "lacks 'lr'"),
    "a group's value": ("param_groups", [{"params": [0, 1, 2, 3], "weight_decay": -1.0, "lr": 1.0}], "weight_decay="),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_changes_nothing(name: str) -> None:
    path, value, words = DAMAGE[name]
    run = start(model(), PLAIN["doppler"]())
    finish(run, stop=2)
    state = saved(run)["optimizer"]
    damaged(state, path, value)
    other = start(model(), PLAIN["doppler"](), key=bytes(32))
    finish(other, stop=1)
    before = as_text(other)
    with pytest.raises(ValueError, match=words):
        other.optimizer.load_state_dict(state)
    assert as_text(other) == before


def test_the_saved_noise_multiplier_is_taken_over_where_it_differs_by_rounding() -> None:
    run = start(model(), sgd(noise_multiplier=1.0 - 1e-9))
    finish(run, stop=2)
    other = start(model())
    other.optimizer.load_state_dict(saved(run)["optimizer"])
    assert other.plan.noise_multiplier == 1.0 - 1e-9
    assert other.epsilon() == run.epsilon()
    assert other.epsilon() > other.plan.epsilon(1e-5, steps=1)
    with pytest.raises(ArgumentError, match="noise_multiplier"):
        start(model(), sgd(noise_multiplier=1.0 + 1e-5)).optimizer.load_state_dict(saved(run)["optimizer"])


def test_another_learning_rate_may_resume() -> None:
    run = start(model())
    finish(run, stop=2)
    other = start(model(), sgd(lr=0.01))
    other.optimizer.load_state_dict(saved(run)["optimizer"])
    assert other.optimizer.param_groups[0]["lr"] == 0.3  # as in torch, the saved groups count


def test_a_plain_torch_state_is_refused() -> None:
    net = model()
    run = start(net)
    with pytest.raises(ArgumentError, match="private optimizer"):
        run.optimizer.load_state_dict(torch.optim.SGD(net.parameters(), lr=1).state_dict())
