"""Which batches a run steps on: of every sampler by name, drawn by its own loader."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
from dpcore.accounting import CyclicPoissonSampledGaussian, Gaussian, TruncatedPoissonSampledGaussian
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.sampling import FixedOrderSampler, PoissonSampler, UserSampler
from dpcore.stages.strategies import BandedToeplitz
from dpcore.torch.gradients.per_example import PerExampleGradient
from tests.unit.torch_runs import DATA, KEY, METHODS, finish, load, model, saved, sgd, start, values


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
    countdown, gradients = [-1], PerExampleGradient.__call__

    def failing(*arguments: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise ArgumentError("out of paper")
        return gradients(*arguments, **options)

    monkeypatch.setattr(PerExampleGradient, "__call__", failing)

    def hook(*_: Any) -> None:
        raise ArgumentError("out of paper")

    run = start(model(), microbatch_size=2)
    batch = next(iter(run.loader))
    assert batch[0].shape[0] > 4
    if where == "step hook":
        handle = run.optimizer.register_step_pre_hook(hook)
    else:
        countdown[0] = 2
    with pytest.raises(ArgumentError, match="out of paper"):
        run.step(batch)
    assert run.steps_taken == 0
    if where == "step hook":
        handle.remove()
    run.step(batch)
    straight = start(model(), microbatch_size=2)
    straight.step(next(iter(straight.loader)))
    assert torch.equal(values(run.model), values(straight.model))


USERS = np.random.default_rng(0).permutation(np.repeat(np.arange(6), [1, 9, 4, 2, 6, 8]))


@pytest.mark.parametrize(
    ("options", "event"),
    [
        ({"sampling": "truncated_poisson", "max_batch_size": 9}, TruncatedPoissonSampledGaussian),
        ({"sampling": "shuffled"}, Gaussian),
        ({"sampling": "cyclic_poisson", "groups": 2}, CyclicPoissonSampledGaussian),
    ],
)
def test_runs_by_name_and_goes_on_bit_for_bit(options: dict, event: type) -> None:
    run = start(model(), **options)
    assert type(run.plan.event) is event
    straight = finish(run)
    halted = start(model(), **options, stop=5)
    kept = saved(halted)
    again = load(start(model(), **options), kept)
    assert torch.equal(finish(again), straight)


def test_a_branch_of_a_cyclic_run_keeps_its_groups_and_pays_for_coins_that_both_saw() -> None:
    method = dpcore.methods.memf(lr=0.1, noise_multiplier=2.0, batch_size=5, strategy=BandedToeplitz((1.0, 0.4)))
    run = start(model(), method, sampling="cyclic_poisson", groups=3, stop=4)
    kept, sampling = saved(run), run._engine.mechanism.keys.sampling
    straight = run.plan.event_after(6)
    finish(run, stop=6)
    load(run, kept, fork=True)
    again = run._engine.mechanism.keys.sampling
    sampler = run.plan.sampler
    assert any(sampler.indices(again, t).tolist() != sampler.indices(sampling, t).tolist() for t in range(4, 12))
    assert all(set(sampler.indices(again, t)) <= set(sampler.group(t % 3)) for t in range(4, 12))
    finish(run, stop=6)
    event = run.plan.event_after(6, run._engine.mechanism.abandoned)
    assert run._engine.mechanism.abandoned == ((4, 6),)
    assert event.events[0] == straight
    assert (event.events[1].participations, event.events[2].count) == (2, 2)
    assert run.epsilon() > dpcore.accounting.epsilon(straight, 1e-5)


class Row(nn.Module):
    """Its loss's gradient at an example is that example's row."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, dtype=torch.float64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight


@pytest.mark.parametrize(("microbatch_size", "most"), [(1, 20), (2, 2), (3, 20), (7, 2), (100, 20)])
def test_a_users_vectors_are_summed_before_the_clip_whatever_the_split(microbatch_size: int, most: int) -> None:
    rows = torch.tensor(np.random.default_rng(1).normal(size=(30, 5)))
    sampler = UserSampler(FixedOrderSampler(dataset_size=6, batch_size=4), USERS, most)
    net = Row()
    run = start(
        net,
        sgd(lr=1.0, noise_multiplier=1e-9, max_grad_norm=0.9, batch_size=4),
        data=(rows, torch.zeros(30)),
        loss=lambda output, _: output.sum(),
        sampling=sampler,
        microbatch_size=microbatch_size,
        epochs=2,
    )
    sampling = run._engine.mechanism.keys.sampling
    finish(run)
    expected = torch.zeros(5, dtype=torch.float64)
    for step in range(4):
        batch = sampler.indices(sampling, step)
        for user in np.unique(USERS[batch]):
            vector = rows[batch[USERS[batch] == user]].sum(0)
            expected -= vector * min(1.0, 0.9 / float(vector.norm())) / 4
    assert values(net).numpy() == pytest.approx(expected.numpy(), rel=1e-6, abs=1e-7)
    assert run.plan.event == Gaussian(1e-9, 2, dpcore.accounting.Adjacency.ZERO_OUT)


def test_users_with_two_points_and_secret_batches() -> None:
    """DiSK's combination is formed per example, summed per user, and clipped once; any split gives the same."""
    sampler = UserSampler(PoissonSampler(dataset_size=6, sample_rate=0.5), USERS, 5)
    method = METHODS["disk"](3)
    data = (DATA[0].double(), DATA[1])
    ends = []
    for microbatch_size in (1, 4, 100):
        run = start(model().double(), method, data=data, sampling=sampler, microbatch_size=microbatch_size, steps=6,
                    epochs=None, key=KEY)  # fmt: skip
        ends.append(finish(run))
    # Users that are cut are summed as rows, which round to the grid otherwise than pairs.
    torch.testing.assert_close(ends[0], ends[2], rtol=3e-4, atol=1e-5)
    torch.testing.assert_close(ends[1], ends[2], rtol=3e-4, atol=1e-5)
    statement = run.statement()
    assert statement.unit == "user"
    assert statement.sampler["examples"] == 30
