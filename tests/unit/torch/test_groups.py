"""The optimizer's groups: what they carry, what they must not, and torch's schedulers on them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import dpcore
from dpcore.errors import ArgumentError, DpcoreError, PrivacyError
from dpcore.stages.updates.schedules import WarmupCosine
from dpcore.torch.groups import PRIVACY_SETTINGS
from tests.unit.torch_runs import METHODS, finish, load, model, saved, sgd, values
from tests.unit.torch_runs import start_one_by_one as start


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (METHODS["adam"](8), {"lr": 0.05, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}),
        (METHODS["adagrad"](8), {"lr": 0.05, "weight_decay": 0.0, "eps": 0.0}),
        (METHODS["accelerated_srgd"](8), {"lr": 0.01}),
    ],
)
def test_is_a_torch_optimizer_with_the_methods_settings(method: dpcore.Method, settings: dict[str, Any]) -> None:
    run = start(model(), method, sampling="fixed_order")
    assert isinstance(run.optimizer, torch.optim.Optimizer)
    (group,) = run.optimizer.param_groups
    assert {key: group[key] for key in group if key != "params"} == settings == run.optimizer.defaults


SCHEDULERS = {
    "cosine": (sgd, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=12)),
    "lambda": (sgd, lambda o: lr_scheduler.LambdaLR(o, lambda t: 0.0 if t == 2 else 1 / (1 + t))),
    "one cycle": (lambda: METHODS["adam"](8), lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12)),
    "momentum": (lambda: sgd(base="nesterov"), lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=12)),
    "warm up, then exponential": (
        sgd,
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
        ),
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_work_unmodified(name: str) -> None:
    """The same numbers as set by hand, step by step, from the same scheduler on a torch optimizer."""
    method, schedule = SCHEDULERS[name]
    run = start(model(), method())
    scheduler = schedule(run.optimizer)
    by_hand = start(model(), method())
    twin_class = torch.optim.Adam if "betas" in run.optimizer.defaults else torch.optim.SGD
    twin = twin_class(
        [nn.Parameter(torch.zeros(()))],
        **{k: v for k, v in by_hand.optimizer.defaults.items() if k in ("lr", "betas", "momentum")},
    )
    twin_scheduler = schedule(twin)
    seen = set()
    for _ in range(2):
        for batch, same in zip(run.loader, by_hand.loader, strict=True):
            assert torch.equal(batch[0], same[0])
            for key in ("lr", "betas", "momentum"):
                if key in by_hand.optimizer.defaults:
                    by_hand.optimizer.param_groups[0][key] = twin.param_groups[0][key]
            seen.add(twin.param_groups[0]["lr"])
            run.step(batch)
            scheduler.step()
            by_hand.step(same)
            twin.step()
            twin_scheduler.step()
    assert len(seen) > 3
    assert torch.equal(values(run.model), values(by_hand.model))


@pytest.mark.parametrize(
    ("name", "key", "value", "changes"),
    [
        ("adagrad", "eps", 0.0, True),
        ("adagrad", "weight_decay", 0.5, True),
        ("adagrad corrected", "eps", 0.0, None),
        ("adagrad corrected", "eps", 0.5, True),
        ("accelerated_srgd", "lr", 0.1, True),
        ("adam bias corrected", "eps", 0.5, True),
        ("adam bias corrected", "betas", (0.5, 1.0), None),
    ],
)
def test_a_groups_numbers_reach_the_update(name: str, key: str, value: Any, changes: bool | None) -> None:
    """As the method's own numbers would; None stands for a refusal."""
    method = METHODS[name](8)
    run = start(model(), replace(method, update=replace(method.update, **{key: 0.25})) if changes else method,
                sampling="fixed_order")  # fmt: skip
    run.optimizer.param_groups[0][key] = value
    if changes is None:
        with pytest.raises(ArgumentError, match=key.removesuffix("s") if key == "betas" else key):
            finish(run)
        assert run.steps_taken == 0
        return
    own = start(model(), replace(method, update=replace(method.update, **{key: value})), sampling="fixed_order")
    assert torch.equal(finish(run, stop=3), finish(own, stop=3))
    other = start(model(), replace(method, update=replace(method.update, **{key: 0.25})), sampling="fixed_order")
    assert not torch.equal(values(own.model), finish(other, stop=3))


def test_the_methods_schedule_multiplies_the_rate_of_every_group() -> None:
    """By hand: the factor of each step on each group's rate, and a torch scheduler beside it."""
    schedule = WarmupCosine(3, 0.1)

    def groups(net: nn.Module) -> list[dict[str, Any]]:
        return [{"params": net[0].parameters(), "lr": 0.2}, {"params": net[2].parameters()}]

    first, second = model(), model()
    run = start(first, sgd(schedule=schedule), params=groups(first))
    by_hand = start(second, sgd(), params=groups(second))
    scheduler = lr_scheduler.ExponentialLR(run.optimizer, 0.9)
    for step in range(12):
        factor = schedule.factor(step, 12) * 0.9**step
        by_hand.optimizer.param_groups[0]["lr"], by_hand.optimizer.param_groups[1]["lr"] = 0.2 * factor, 0.3 * factor
        run.step(next(iter(run.loader)))
        scheduler.step()
        by_hand.step(next(iter(by_hand.loader)))
        assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.2 * 0.9 ** (step + 1))
    torch.testing.assert_close(values(first), values(second))


def test_privacy_settings_in_a_group_are_refused() -> None:
    net = model()
    run, before = start(net), values(net).clone()
    (group,), batch = run.optimizer.param_groups, next(iter(run.loader))
    for key in sorted(PRIVACY_SETTINGS):
        with pytest.raises(PrivacyError, match=f"{key}=2.0 in a parameter group"):
            start(net, params=[{"params": net.parameters(), key: 2.0}])
        group[key] = 2.0
        with pytest.raises(PrivacyError, match=f"{key}=2.0 in a parameter group"):
            run.step(batch)
        del group[key]
        assert torch.equal(values(net), before)
        assert run.steps_taken == 0


GROUPS_REFUSED = {
    "outer momentum": (lambda n: [{"params": n.parameters(), "outer_momentum": 0.9}], "outer_momentum"),
    "unknown setting": (lambda n: [{"params": n.parameters(), "weight_decy": 0.1}], "did you mean 'weight_decay'"),
    "setting of another update": (lambda n: [{"params": n.parameters(), "betas": (0.9, 0.99)}], "betas"),
    "setting of no momentum": (lambda n: [{"params": n.parameters(), "momentum": 0.1}], "momentum"),
    "left out": (lambda n: n[0].parameters(), "'2.weight' requires gradients but is in no group"),
    "foreign": (lambda n: [*n.parameters(), nn.Parameter(torch.zeros(2))], "do not belong to the model"),
    "empty": (lambda n: [], "must be parameters"),
}


@pytest.mark.parametrize("name", GROUPS_REFUSED)
def test_groups_refused(name: str) -> None:
    make, words = GROUPS_REFUSED[name]
    net = model()
    with pytest.raises(DpcoreError, match=words):
        start(net, params=make(net))


def test_no_group_can_be_added_later() -> None:
    run = start(model())
    with pytest.raises(PrivacyError, match="add_param_group"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize(
    ("key", "value"), [("lr", float("nan")), ("lr", -1.0), ("weight_decay", -0.1), ("momentum", 1.0)]
)
def test_bad_group_values_are_refused_before_the_step(key: str, value: float) -> None:
    run = start(model(), sgd(base="momentum"))
    run.optimizer.param_groups[0][key] = value
    with pytest.raises(ArgumentError, match=f"{key}="):
        run.step(next(iter(run.loader)))
    assert run.steps_taken == 0


def test_a_statement_says_where_learning_rates_are_not_the_methods() -> None:
    run = start(model())
    assert not run.statement().note
    run.optimizer.param_groups[0]["lr"] = 0.05
    assert "The learning rate was set beside the method" in run.statement().text()
    assert "at last 0.05. The guarantee does not depend on it." in run.statement().note
    again = start(model())
    load(again, saved(run))
    assert again.statement().note == run.statement().note
