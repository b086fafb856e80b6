"""The order of batches: each that is drawn is stepped once, whole, and none beyond the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dpcore.errors import ArgumentError, PrivacyError
from tests.unit.torch_runs import DATA, model, start, values


def test_each_batch_is_stepped_once_in_order() -> None:
    run = start(model())
    with pytest.raises(PrivacyError, match="no drawn batch is waiting"):
        run.step(DATA)
    batch = next(iter(run.loader))
    run.step(batch)
    with pytest.raises(PrivacyError, match="no drawn batch is waiting"):
        run.step(batch)
    with pytest.raises(PrivacyError, match="no batch was summed"):
        run.optimizer.step()
    batches = iter(run.loader)
    batch = next(batches)
    with pytest.raises(PrivacyError, match="was not stepped"):
        next(batches)
    again = next(iter(run.loader))
    assert torch.equal(batch[0], again[0])
    with pytest.raises(PrivacyError, match="another number of examples"):
        run.step((again[0][:-1], again[1][:-1]))
    with pytest.raises(PrivacyError, match="disagree about the number") as caught:
        run.step((again[0][:-1], again[1]))
    assert not any(character.isdigit() for character in str(caught.value))
    assert run.steps_taken == 1
    run.step(again)
    assert run.steps_taken == 2


def test_a_batch_that_was_drawn_before_a_state_was_loaded_is_refused() -> None:
    """The draws from the state's step on are others, even of the same step."""
    run = start(model())
    run.step(next(iter(run.loader)))
    state = run.optimizer.state_dict()
    batch = next(iter(run.loader))
    run.optimizer.load_state_dict(state)
    assert run.steps_taken == 1
    with pytest.raises(PrivacyError, match="no drawn batch is waiting"):
        run.step(batch)


def test_iterations_are_epochs_and_end_with_the_plan() -> None:
    run = start(model(), steps=6, epochs=None)
    assert len(run.loader) == 4  # 30 examples, 8 a step
    counts = []
    for _ in range(2):
        counts.append(0)
        for batch in run.loader:
            run.step(batch)
            counts[-1] += 1
    assert counts == [4, 2]
    with pytest.raises(PrivacyError, match="plan's 6 steps have been taken"):
        next(iter(run.loader))
    with pytest.raises(PrivacyError, match="no drawn batch"):
        run.step(DATA)
    assert run.epsilon() == pytest.approx(run.plan.epsilon(1e-5))


@pytest.mark.parametrize("where", ["second micro-batch", "step hook"])
def test_a_failed_step_can_be_tried_again_and_counts_no_example_twice(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    countdown, cross_entropy = [-1], nn.functional.cross_entropy

    def failing(*arguments: Any, **options: Any) -> torch.Tensor:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise RuntimeError("out of paper")
        return cross_entropy(*arguments, **options)

    # In torch itself, since a loss that counts its calls is refused.
    monkeypatch.setattr(nn.functional, "cross_entropy", failing)

    def loss(*both: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(*both)

    def hook(*_: Any) -> None:
        raise ArgumentError("out of paper")

    run = start(model(), loss=loss, microbatch_size=2)
    batch = next(iter(run.loader))
    assert batch[0].shape[0] > 4
    if where == "step hook":
        handle = run.optimizer.register_step_pre_hook(hook)
    else:
        countdown[0] = 2
    with pytest.raises(ArgumentError) as caught:
        run.step(batch)
    assert "out of paper" in f"{caught.value} {caught.value.__cause__}"
    assert run.steps_taken == 0
    if where == "step hook":
        handle.remove()
    run.step(batch)
    straight = start(model(), microbatch_size=2)
    straight.step(next(iter(straight.loader)))
    assert torch.equal(values(run.model), values(straight.model))
