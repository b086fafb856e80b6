"""The method's output in the model: averages and the accelerated method's y, for evaluation and export."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpcore.errors import PrivacyError
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from tests.unit.torch_runs import DATA, METHODS, model, sgd, start, values


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
