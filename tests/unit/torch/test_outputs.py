"""What a run gives: the method's output in the model, and records of releases on request."""

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.cli.gradients import load_gradients, save_gradients
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from tests.unit.torch_runs import DATA, METHODS, finish, load, model, saved, sgd, values
from tests.unit.torch_runs import start_one_by_one as start


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_average_is_that_of_the_values_on_the_way(dtype: torch.dtype) -> None:
    decay, weights, path = 0.8, [], []
    run = start(
        model().to(dtype), sgd(averaging=ExponentialAverage(decay)), data=(DATA[0].to(dtype), DATA[1]), steps=5,
        epochs=None
    )  # fmt: skip
    before = values(run.model)
    with run.averaged():
        assert torch.equal(values(run.model), before)
    for batch in run.loader:
        run.step(batch)
        path.append(torch.cat([w.flatten() for w in run._engine.working.tensors()]).clone())
    while run.steps_taken < 5:
        run.step(next(iter(run.loader)))
        path.append(torch.cat([w.flatten() for w in run._engine.working.tensors()]).clone())
    weights = torch.tensor([decay ** (4 - t) for t in range(5)], dtype=path[0].dtype)
    want = (weights[:, None] * torch.stack(path)).sum(0) / weights.sum()
    end = values(run.model)
    with run.averaged():
        inside = values(run.model)
        torch.testing.assert_close(inside, want.to(dtype), rtol=2**-7 if dtype.itemsize == 2 else 1e-12, atol=1e-6)
        with run.averaged():  # a second one inside changes nothing
            assert torch.equal(values(run.model), inside)
        assert torch.equal(values(run.model), inside)
    assert torch.equal(values(run.model), end)
    assert not torch.equal(inside, end)


def test_an_average_in_the_midst_of_training_changes_nothing_of_it() -> None:
    ends = []
    for looks in (False, True):
        net = model().bfloat16()
        run = start(net, sgd(averaging=UniformAverage()), data=(DATA[0].bfloat16(), DATA[1]))
        for _ in range(2):
            for batch in run.loader:
                run.step(batch)
                if looks:
                    with run.averaged():
                        net(DATA[0].bfloat16())
        ends.append(torch.cat([w.flatten() for w in run._engine.working.tensors()]))
    assert torch.equal(*ends)


def test_values_come_back_after_an_exception_and_steps_are_refused_inside() -> None:
    run = start(model(), METHODS["accelerated_srgd"](8), sampling="fixed_order", stop=2)
    state = run.optimizer.state_dict()
    end, batch, back = values(run.model), next(iter(run.loader)), []
    with run.averaged():
        assert not torch.equal(values(run.model), end)
    for call in (lambda: run.step(batch), run.optimizer.state_dict, lambda: run.optimizer.load_state_dict(state)):
        with pytest.raises(PrivacyError, match=r"leave private\.averaged\(\) first"), run.averaged():
            call()
        back.append(torch.equal(values(run.model), end))
    assert all(back)
    assert run.steps_taken == 2
    run.step(batch)
    assert run.steps_taken == 3


def test_an_evaluation_of_another_thread_loses_no_step() -> None:
    run = start(model(), METHODS["uniform average"](8), stop=3)
    batch, summed, shown = next(iter(run.loader)), threading.Event(), threading.Event()
    sum_clipped, end = run.engine.sum_clipped, values(run.model)

    def slow(*arguments: Any) -> None:
        sum_clipped(*arguments)
        with pytest.raises(PrivacyError, match="averaged: called while a step is under way"), run.averaged():
            pass
        summed.set()
        assert not shown.wait(0.1)  # the other thread waits for the end of the step

    def evaluate() -> None:
        summed.wait(10)
        with run.averaged(), run.averaged():
            shown.set()

    other = threading.Thread(target=evaluate)
    other.start()
    run.engine.sum_clipped = slow
    run.step(batch)
    other.join(10)
    assert shown.is_set()
    assert not torch.equal(values(run.model), end)


def test_the_last_of_two_evaluations_restores_the_values() -> None:
    run = start(model(), METHODS["uniform average"](8), stop=3)
    end, one, two = values(run.model), run.averaged(), run.averaged()
    with one:
        two.__enter__()
        average = values(run.model)
    assert torch.equal(values(run.model), average)
    two.__exit__(None, None, None)
    assert torch.equal(values(run.model), end)


def test_the_output_of_the_accelerated_method_is_y() -> None:
    run = start(model(), METHODS["accelerated_srgd"](8), sampling="fixed_order", stop=3)
    arrays = run._engine.mechanism.state_dict()["public"]["arrays"]
    output = run.output_state_dict()
    for name, value in output.items():
        assert np.array_equal(value.numpy().ravel(), arrays[f"{name}/moment/1"])
    output["0.bias"].add_(1)  # a copy
    assert not torch.equal(run.output_state_dict()["0.bias"], output["0.bias"])


def test_without_an_output_of_its_own_nothing_is_swapped() -> None:
    run = start(model())
    batch = next(iter(run.loader))
    with run.averaged():
        run.step(batch)  # the model holds the training values
    assert run.steps_taken == 1
    output = run.output_state_dict()
    assert set(output) == set(run.model.state_dict())
    assert all(torch.equal(output[key], value) for key, value in run.model.state_dict().items())


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
