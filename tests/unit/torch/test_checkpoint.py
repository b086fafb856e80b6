"""Saved states: what their public part holds, and the refusal of other settings and of damage."""

import copy
import io
import math
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dpcore
import dpcore.torch
from dpcore.errors import ArgumentError, DataError, PrivacyError
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.stages.queries import ParameterWindow
from dpcore.stages.strategies import NamedStrategy, from_matrix
from dpcore.stages.updates import Adam
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import WarmupCosine
from dpcore.torch import save_state
from tests.unit.torch_runs import KEY, METHODS, as_text, finish, model, saved, sgd
from tests.unit.torch_runs import start_one_by_one as start


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


@pytest.mark.parametrize("name", ["memf banded", "adam independent banded", "memf tree"])
def test_the_file_of_a_public_state_has_no_byte_of_the_secret_part(name: str) -> None:
    run = start(model(), METHODS[name](8), sampling="fixed_order", stop=2)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    finish(run, stop=5)
    state = run.optimizer.state_dict()
    secret = state["dpcore"]["secret"]
    needles = [bytes.fromhex(secret[key]) for key in ("noise_key", "sampling_key")]
    needles += [bytes.fromhex(key) for _, key in secret["earlier_keys"]]
    needles += [needle.hex().encode() for needle in needles]
    needles += [tensor.numpy().tobytes() for tensor in secret["arrays"].values()]
    assert len(secret["earlier_keys"]) == 1
    assert bool(secret["arrays"]) == (name != "memf tree")

    def written(what: dict[str, Any]) -> bytes:
        file = io.BytesIO()
        torch.save(what, file)
        return file.getvalue()

    whole, public = written(state), written(dpcore.torch.public_state(state))
    assert [needle in whole for needle in needles].count(True) >= len(needles) - 3  # keys stand there in one form
    assert not any(needle in public for needle in needles)
    assert set(dpcore.torch.public_state(state)["dpcore"]) == {"format", "public"}
    with pytest.raises(ArgumentError, match="secret part"):
        run.optimizer.load_state_dict(dpcore.torch.public_state(state))


def adam(**settings: Any) -> dict[str, Any]:
    """Options of a run with any kind of noise, query, average and moments."""
    strategy = settings.pop("strategy", None)
    parts = {name: settings.pop(name) for name in ("query", "averaging") if name in settings}
    noise = IndependentGaussian(1.0) if strategy is None else CorrelatedGaussian(1.0, strategy)
    update = Adam(**{"lr": 0.1, **settings})
    return {"method": dpcore.Method(update=update, noise=noise, batch_size=8, **parts), "sampling": "fixed_order"}


ONES = np.tril(np.ones((12, 12)))
FLOORED = {"denominator": "floored"}
ADAPTIVE = {"method": sgd(noise_multiplier=0.7, adaptive_clip=AdaptiveClip())}
# fmt: off
OTHER_SETTINGS = {  # options of the saved run, of the one that shall go on, and what is named
    "noise": ({}, {"method": sgd(noise_multiplier=2.0)}, "noise_multiplier"),
    "clip": ({}, {"method": sgd(max_grad_norm=2.0)}, "max_grad_norm"),
    "sampler": ({}, {"sampling": "fixed_order"}, "sampler"),
    "length": ({}, {"epochs": 4}, "planned for 12 steps, this one for 16: a run cannot be made longer"),
    "update": ({}, {"method": sgd(base="momentum")}, "update"),
    "schedule": ({}, {"method": sgd(schedule=WarmupCosine(2))}, "schedule"),
    "average": ({}, {"method": sgd(averaging=UniformAverage())}, "averaging"),
    "subspaces": ({}, {"method": sgd(galore=GaLore(2))}, "galore"),
    "radius": ({}, {"method": sgd(radius=2.0)}, "radius"),
    "strategy": (adam(strategy=NamedStrategy("tree")), adam(strategy=NamedStrategy("square-root")), "strategy"),
    "given strategy": (adam(strategy=from_matrix(ONES)), adam(strategy=from_matrix(ONES + np.eye(12))), "strategy"),
    "window": (adam(query=ParameterWindow(2, 0.5)), adam(query=ParameterWindow(3, 0.5)), "window"),
    "second moment": (adam(second_moment="released"), adam(), "second_moment"),
    "denominator": (adam(**FLOORED), adam(), "denominator"),
    "bias": (adam(**FLOORED, bias_corrected=True), adam(**FLOORED), "bias_corrected"),
    "average's decay": (
        adam(averaging=ExponentialAverage(0.9)), adam(averaging=ExponentialAverage(0.8)), "averaging"),
    "adaptive clip": (ADAPTIVE, {}, "adaptive"),
    "its quantile": (ADAPTIVE, {"method": sgd(noise_multiplier=0.7, adaptive_clip=AdaptiveClip(0.9))}, "adaptive"),
}
# fmt: on


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return saved(start(model(), stop=1))


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_what_shapes_the_release_or_its_use_must_be_the_same(name: str, plain: dict[str, Any]) -> None:
    mine, theirs, words = OTHER_SETTINGS[name]
    other, state = start(model(), **theirs), saved(start(model(), **mine, stop=1)) if mine else plain
    before = as_text(other)
    with pytest.raises(ArgumentError, match=words):
        other.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
    assert as_text(other) == before


@pytest.mark.parametrize("moments", [FLOORED, {"second_moment": "released"}, {"strategy": NamedStrategy("tree")}])
def test_numbers_of_the_update_may_be_others(moments: dict[str, Any]) -> None:
    other = start(model(), **adam(**moments, betas=(0.5, 0.5), eps=0.1, weight_decay=0.1))
    other.optimizer.load_state_dict(saved(start(model(), **adam(**moments), stop=2))["optimizer"])
    assert other.optimizer.param_groups[0]["lr"] == 0.1  # as in torch, the saved groups count


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
    "format": ("dpcore.format", 1, "its format is 1"),
    "no arrays": ("dpcore.public.arrays", None, "lacks 'arrays'"),
    "layout": ("dpcore.public.layout", [["0.weight", [7, 5], 0]], "its layout"),
    "an array": ("dpcore.public.arrays/0.weight/filter/0", None, "its arrays"),
    "another shape": ("dpcore.public.arrays/2.bias/filter/1", torch.zeros(4), "its arrays"),
    "another dtype": ("dpcore.public.arrays/2.bias/filter/1", torch.zeros(3).double(), "its arrays"),
    "a random generator": ("dpcore.public.rng", "philox", "its rng"),
    "step": ("dpcore.public.step", 13, "its step 13"),
    "a key": ("dpcore.secret.sampling_key", "abc", "'sampling_key'.*64 hexadecimal"),
    "no key": ("dpcore.secret.noise_key", None, "lacks 'noise_key'"),
    "no earlier keys": ("dpcore.secret.earlier_keys", None, "lacks 'earlier_keys'"),
    "earlier keys": ("dpcore.secret.earlier_keys", [[1, "ab" * 31]], "'earlier_keys'.*64 hexadecimal"),
    "keys without rows": ("dpcore.secret.earlier_keys", ["ab" * 32], "pairs of a row and a key"),
    "keys of no rows": ("dpcore.secret.earlier_keys", [[0, "ab" * 32]], "pairs of a row and a key"),
    "keys of later rows": ("dpcore.secret.earlier_keys", [[3, "ab" * 32]], "pairs of a row and a key"),
    "keys of one row": ("dpcore.secret.earlier_keys", [[1, "ab" * 32], [1, "cd" * 32]], "pairs of a row and a key"),
    "no secret arrays": ("dpcore.secret.arrays", None, "lacks 'arrays'"),
    "a secret array": ("dpcore.secret.arrays/0.weight/noise/0", None, "arrays must be those of this run"),
    "a secret array's shape": ("dpcore.secret.arrays/2.bias/noise/0", torch.zeros(4), "arrays must be those"),
    "noise of another matrix": ("dpcore.public.noise", ["tree 0", "redrawn 0"], "correlated by tree 0, this run's by"),
    "noise of no matrix": ("dpcore.public.noise", [], "correlated by no strategy, this run's by banded-inverse"),
    "noise": ("dpcore.public.noise", 3, "its noise must be a list"),
    "secret numbers": ("dpcore.secret.arrays", 4.0, "arrays must be a dict"),
    "origin": ("dpcore.secret.origin", 3, "origin must be a str"),
    "forks": ("dpcore.secret.forks", -1, "origin, forks or cursor"),
    "cursor": ("dpcore.secret.cursor", 1, "origin, forks or cursor"),
    "branches": ("dpcore.public.branches", 1, "its branches must be"),
    "wide parameters": ("dpcore.public.wide_parameters", "x", "its wide_parameters must be a dict"),
    "settings": ("dpcore.public.settings", 3, "its settings must be a dict"),
    "a noise multiplier": ("dpcore.public.settings/noise_multiplier", "x", r"of another form \(TypeError\)"),
    "a ledger": ("dpcore.public.ledger", {"caveats": []}, r"of another form \(KeyError\)"),
    "sentences": ("dpcore.public.caveats", [3], "its caveats must be sentences"),
    "processes": ("dpcore.public.processes", 0, "its processes 0 must be positive"),
    "a part": ("dpcore.public", 3, r"of another form \(TypeError\)"),
    "no parts": ("dpcore", 3, r"of another form \(TypeError\)"),
    "torch's state": ("state", None, r"of another form \(KeyError"),
    "no group": ("param_groups", 3, r"of another form \(TypeError"),
    "other branches": ("dpcore.public.branches", {"a": ["", 0, 2]}, "its branches must be"),
    "another branch": ("dpcore.public.branch", "a", "its branches must be"),
    "statistics": ("dpcore.public.statistics", [1.0], "its statistics must be 0 finite numbers"),
    "corrections": ("dpcore.public.corrections", [1.0, float("nan"), 1.0, 1.0], "its corrections must be 4 finite"),
    "record": ("dpcore.public.recorded", {"coordinates": 3}, "recorded gradients do not fit"),
    "groups": ("param_groups", [], "parameter groups"),
    "a group's setting": ("param_groups", [{"params": [0, 1, 2, 3], "weight_decay": 0.0}], "lacks 'lr'"),
    "a group's value": ("param_groups", [{"params": [0, 1, 2, 3], "weight_decay": -1.0, "lr": 1.0}], "weight_decay="),
}


@pytest.fixture(scope="module")
def filtered() -> tuple[dict[str, Any], dpcore.torch.PrivateRun]:
    """The state of one run, and another run, that no damaged state changes: all tests may share it."""

    def fresh(**options: Any) -> dpcore.torch.PrivateRun:
        strategy = NamedStrategy("banded-inverse-square-root", 3)
        method = dpcore.methods.doppler(lr=0.3, filter="f5", noise_multiplier=1.0, batch_size=8, strategy=strategy)
        return start(model(), method, sampling="fixed_order", **options)

    return saved(fresh(stop=2))["optimizer"], fresh(key=bytes(32), stop=1)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_changes_nothing(name: str, filtered: tuple[dict[str, Any], dpcore.torch.PrivateRun]) -> None:
    path, value, words = DAMAGE[name]
    state, other = copy.deepcopy(filtered[0]), filtered[1]
    damaged(state, path, value)
    before = as_text(other)
    with pytest.raises(ValueError, match=words) as caught:
        other.optimizer.load_state_dict(state)
    assert not any(key in str(caught.value) for key in ("ab" * 8, KEY.hex()[:16]))
    assert as_text(other) == before


def test_damaged_clip_norms_are_refused_and_nothing_is_changed() -> None:
    run = start(model(), **ADAPTIVE, stop=3)
    before = run.clip_norms
    for damage in (before[:-1], [*before[:-1], math.nan], [*before[:-1], 1e7], [*before[:-1], -1.0], 3):
        state = saved(run)["optimizer"]
        state["dpcore"]["public"]["clip_norms"] = damage
        with pytest.raises(ArgumentError, match=r"its clip_norms must be a (number for each step and the next|list)"):
            run.optimizer.load_state_dict(state)
        assert run.clip_norms == before


def test_a_state_without_its_correlated_noise_gets_it_anew() -> None:
    """From the rows that the keys draw; also where it was kept for another way of streaming."""

    def fresh(strategy: Any) -> dpcore.torch.PrivateRun:
        method = dpcore.methods.memf(lr=0.3, noise_multiplier=1.0, batch_size=8, strategy=strategy)
        return start(model(), method, sampling="fixed_order")

    ring = NamedStrategy("banded-inverse-square-root", 3)
    blocks = dpcore.strategies.in_blocks(ring, 4)
    states = {}
    for name, strategy in (("ring", ring), ("blocks", blocks)):
        run = fresh(strategy)
        finish(run, stop=2)
        states[name] = saved(run)["optimizer"]
    kept = states["ring"]["dpcore"]["secret"]["arrays"]
    assert len(kept) == 2 * 4
    lost = copy.deepcopy(states["ring"])
    lost["dpcore"]["secret"]["arrays"].clear()
    for state in (lost, states["blocks"]):
        other = fresh(ring)
        other.optimizer.load_state_dict(copy.deepcopy(state))
        anew = saved(other)["optimizer"]["dpcore"]["secret"]["arrays"]
        assert anew.keys() == kept.keys()
        assert all(torch.equal(anew[name], kept[name]) for name in kept)


def test_the_saved_noise_multiplier_is_taken_over_where_it_differs_by_rounding() -> None:
    run = start(model(), sgd(noise_multiplier=1.0 - 1e-9), stop=2)
    other = start(model())
    other.optimizer.load_state_dict(saved(run)["optimizer"])
    assert other.plan.noise_multiplier == 1.0 - 1e-9
    assert other.epsilon() == run.epsilon()
    assert other.epsilon() > other.plan.epsilon(1e-5, steps=1)
    with pytest.raises(ArgumentError, match="noise_multiplier"):
        start(model(), sgd(noise_multiplier=1.0 + 1e-5)).optimizer.load_state_dict(saved(run)["optimizer"])


def test_a_plain_torch_state_is_refused() -> None:
    net = model()
    run = start(net)
    with pytest.raises(ArgumentError, match="private optimizer"):
        run.optimizer.load_state_dict(torch.optim.SGD(net.parameters(), lr=1).state_dict())


def test_a_saved_state_is_its_owners_alone(tmp_path: Path) -> None:
    run, path = start(model()), tmp_path / "run.pt"
    before = os.umask(0)
    try:
        save_state(path, run.optimizer.state_dict())
        path.chmod(0o666)  # as torch.save would have left it
        save_state(path, run.optimizer.state_dict())
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["run.pt"]
    run.optimizer.load_state_dict(torch.load(path, weights_only=True))
    with pytest.raises(DataError, match="cannot be written"):
        save_state(tmp_path / "none" / "run.pt", {})
