"""What a run keeps of its steps on request: public records of releases, and private diagnostics."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.cli.gradients import load_gradients, save_gradients
from dpcore.errors import ArgumentError
from dpcore.mechanism.minimize import PRIVATE_DIAGNOSTICS
from tests.unit.torch_runs import DATA, METHODS, finish, load, model, saved, sgd, start


def test_a_record_is_the_evenly_spaced_part_of_the_whole_and_goes_on_after_loading(tmp_path: Path) -> None:
    method = METHODS["adam bias corrected"](8)

    def fresh(coordinates: int) -> dpcore.torch.PrivateRun:
        run = start(model(), method)
        run.record_gradients(coordinates)
        return run

    with pytest.raises(ArgumentError, match="record_gradients"):
        _ = start(model(), method).recorded
    whole, part = fresh(10**6), fresh(10)
    assert math.isnan(part.negative_share())
    finish(whole)
    finish(part, stop=5)
    state = saved(part)
    for name in ("again", "asked first"):
        part = start(model(), method)
        if name == "asked first":
            part.record_gradients(7)
        load(part, state)
        part.record_gradients(10)
        finish(part)
        places = [66 * i // 10 for i in range(10)]
        all_of, some = whole.recorded, part.recorded
        assert all_of["released"].shape == (12, 66)
        for key in ("released", "filtered"):
            assert np.array_equal(some[key], all_of[key][:, places])
        assert np.array_equal(some["negative_share"], all_of["negative_share"])
        assert some["negative_share"][-1] == part.negative_share()
    assert 0 < all_of["negative_share"].max() <= 1
    assert some["noise_std"] == pytest.approx(0.7 * 0.5 / 8)
    assert some["white_noise"]
    read = load_gradients(save_gradients(tmp_path, **some))
    assert np.array_equal(read.released, some["released"])
    assert read.dimension == 66
    part.record_gradients(4)
    assert part.recorded["released"].shape == (0, 4)


def test_a_record_of_abandoned_steps_is_dropped() -> None:
    run = start(model(), stop=2)
    state = saved(run)
    run.record_gradients(3)
    finish(run, stop=4)
    assert len(run.recorded["released"]) == 2
    run.optimizer.load_state_dict(state["optimizer"])
    assert len(run.recorded["released"]) == 0


@pytest.mark.parametrize("name", ["adam scaled", "memf", "adaptive clip"])
def test_noise_that_is_not_white_is_said_to_be_so(name: str) -> None:
    run = start(model(), METHODS[name](8), sampling="fixed_order")
    run.record_gradients(3)
    assert run.recorded["white_noise"] is False


def test_a_record_without_noise_and_filter_is_the_mean_gradient() -> None:
    method = sgd(noise_multiplier=0.0, max_grad_norm=1e6)
    run = start(model().double(), method, data=(DATA[0].double(), DATA[1]), sampling="fixed_order")
    run.record_gradients(66)
    inputs, targets = next(iter(run.loader))
    loss = nn.functional.cross_entropy(run.model(inputs), targets, reduction="sum") / 8
    want = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(run.model.parameters()))])
    run.step((inputs, targets))
    for key in ("released", "filtered"):
        np.testing.assert_allclose(run.recorded[key][0], want.numpy(), rtol=1e-3, atol=1e-5)


def test_private_diagnostics_are_asked_for_and_stay_secret() -> None:
    assert start(model()).private_diagnostics is None
    assert PRIVATE_DIAGNOSTICS not in start(model()).statement().caveats
    run = start(model(), private_diagnostics=True, stop=3)
    assert PRIVATE_DIAGNOSTICS in run.statement().caveats
    state = saved(run)
    assert "diagnostics" not in repr(dpcore.torch.public_state(state["optimizer"]))
    norms = state["optimizer"]["dpcore"]["secret"]["diagnostics"]
    assert run.private_diagnostics is not None
    assert run.private_diagnostics["clipped_mean_norm"].tolist() == norms
    assert len(norms) == 3
    assert all(norm > 0 for norm in norms)
    # A run that was asked for them stays one: its statement goes on saying so.
    again = start(model())
    again.optimizer.load_state_dict(state["optimizer"])
    assert PRIVATE_DIAGNOSTICS in again.statement().caveats
    late = start(model(), private_diagnostics=True)
    plain = start(model(), stop=2)
    late.optimizer.load_state_dict(saved(plain)["optimizer"])
    finish(late, stop=3)
    assert late.private_diagnostics is not None
    taken = late.private_diagnostics["clipped_mean_norm"]
    assert np.isnan(taken).tolist() == [True, True, False]
