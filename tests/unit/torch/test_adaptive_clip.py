"""The adaptive clip norm of a PyTorch run: what users see of it, and how it is saved."""

from __future__ import annotations

import math

import pytest
import torch

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.stages.clipping import AdaptiveClip
from tests.unit.torch_runs import finish, load, model, saved, sgd, start, values

METHOD = sgd(noise_multiplier=0.7, adaptive_clip=AdaptiveClip())


def test_a_resumed_run_goes_on_with_the_norm_bit_for_bit() -> None:
    straight = start(model(), METHOD)
    whole = finish(straight)
    first = start(model(), METHOD, stop=5)
    state = saved(first)
    assert "clip_norms" in state["optimizer"]["dpcore"]["public"]
    for fork in (False, True):
        resumed = load(start(model(), METHOD, key=None, exact_key=False), state, fork)
        assert resumed.clip_norms == straight.clip_norms[:6]
        assert resumed.clip_norms[-1] != 1.0
        end = finish(resumed)
        assert torch.equal(end, whole) == (resumed.clip_norms == straight.clip_norms) == (not fork)
    assert torch.equal(values(straight.model), whole)


@pytest.mark.parametrize(
    "damage",
    [lambda n: n[:-1], lambda n: [*n[:-1], math.nan], lambda n: [*n[:-1], 1e7], lambda n: [*n[:-1], -1.0], lambda _: 3],
)
def test_damaged_norms_are_refused_and_nothing_is_changed(damage) -> None:
    run = start(model(), METHOD, stop=3)
    state, before = saved(run), run.clip_norms
    public = state["optimizer"]["dpcore"]["public"]
    public["clip_norms"] = damage(public["clip_norms"])
    with pytest.raises(ArgumentError, match="its clip_norms must be one number for each step and one for the next"):
        run.optimizer.load_state_dict(state["optimizer"])
    assert run.clip_norms == before


def test_other_adaptive_settings_are_another_run() -> None:
    run = start(model(), METHOD, stop=3)
    state = saved(run)["optimizer"]
    fixed = start(model(), sgd(noise_multiplier=0.7))
    assert fixed.clip_norms is None
    for other in (fixed, start(model(), sgd(noise_multiplier=0.7, adaptive_clip=AdaptiveClip(0.9)))):
        with pytest.raises(ArgumentError, match="adaptive"):
            other.optimizer.load_state_dict(state)


def test_calibration_keeps_the_target_and_raises_the_noise_on_the_gradients_alone() -> None:
    clip = AdaptiveClip(bit_noise_std=2.0)
    run = start(model(), sgd(noise_multiplier=None, adaptive_clip=clip), target_epsilon=3.0)
    assert run.plan.epsilon(1e-5) <= 3.0
    assert run.plan.event.noise_multiplier == run.plan.noise_multiplier < run.plan.gradient_noise_multiplier
    with pytest.raises(PrivacyError, match="must be more than half of noise_multiplier"):
        start(model(), sgd(noise_multiplier=None, adaptive_clip=AdaptiveClip()), target_epsilon=0.1)
