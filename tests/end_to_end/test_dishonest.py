"""Set-ups that claim more privacy than they have: each is refused, or accounted for as what it is."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import dpcore
import dpcore.torch
from dpcore import accounting, sampling
from dpcore.errors import ArgumentTypeError
from dpcore.ledger import Ledger

N, BATCH, SIGMA, DELTA = 60, 6, 2.0, 1e-5
DATA = (torch.linspace(-1, 1, N * 4).reshape(N, 4), torch.arange(N) % 3)
WEIGHTED = WeightedRandomSampler(torch.arange(1.0, N + 1).tolist(), N)


def make(**options: Any) -> Any:
    torch.manual_seed(0)
    options = {"steps": 20, "target_delta": DELTA, "data": DATA, "model": nn.Linear(4, 3), **options}
    method = options.pop("method", dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=SIGMA, batch_size=BATCH))
    return dpcore.torch.make_private(options.pop("model"), options.pop("data"), method, **options)


def unamplified(count: int) -> float:
    return accounting.epsilon(accounting.Gaussian(SIGMA, count, "zero-out"), DELTA, "gaussian")


def epsilon(sampler: Any, steps: int) -> float:
    return accounting.epsilon(sampler.event(SIGMA, steps), DELTA)


@pytest.mark.parametrize("drawn", [{"shuffle": True}, {"sampler": WEIGHTED}], ids=["shuffled", "weighted"])
def test_a_shuffled_loader_is_refused(drawn: dict[str, Any]) -> None:
    with pytest.raises(ArgumentTypeError, match=r"pass its dataset.*dpcore draws the batches itself"):
        make(data=DataLoader(TensorDataset(*DATA), BATCH, **drawn))


def test_shuffled_epochs_get_no_amplification() -> None:
    sampler = sampling.ShuffledSampler(dataset_size=N, batch_size=BATCH)
    private = make(sampling=sampler)
    assert private.plan.epsilon(DELTA) == pytest.approx(unamplified(2), rel=2e-3)
    poisson = sampling.PoissonSampler(dataset_size=N, batch_size=BATCH)
    assert private.plan.epsilon(DELTA) > 1.5 * epsilon(poisson, 20)


def test_shuffled_batches_given_as_a_list_count_as_what_they_show() -> None:
    order = np.random.default_rng(0)
    batches = [part for _ in range(3) for part in order.permutation(N).reshape(-1, BATCH)]
    result = dpcore.minimize(
        lambda x, rows: np.ones((len(rows), x.size)), np.zeros(2), batches,
        dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=SIGMA),
    )  # fmt: skip
    assert result.event == accounting.Gaussian(SIGMA, 3, "zero-out")


def test_a_torch_sampler_is_no_sampler_of_ours() -> None:
    with pytest.raises(ArgumentTypeError, match=r"must be a name, such as 'poisson', or a sampler of dpcore\.sampling"):
        make(sampling=WEIGHTED)


@dataclass(frozen=True, init=False)
class Claims(sampling.PoissonSampler):
    """Poisson by its event, weighted by its indices."""

    def indices(self, key: bytes, step: int, **shard: Any) -> Any:
        return super().indices(key, step)[:2]


def test_a_sampler_of_the_callers_own_is_said_to_be_taken_on_trust() -> None:
    private = make(sampling=Claims(dataset_size=N, batch_size=BATCH))
    assert any("Claims" in caveat and "trust" in caveat for caveat in private.statement().caveats)
    honest = make(sampling=sampling.PoissonSampler(dataset_size=N, batch_size=BATCH))
    assert not any("trust" in caveat for caveat in honest.statement().caveats)


def test_users_are_not_counted_as_examples() -> None:
    users = np.arange(N) // 3
    by_user = sampling.UserSampler(
        sampling.PoissonSampler(dataset_size=N // 3, batch_size=BATCH), users, max_examples_per_user=3
    )
    event = by_user.event(SIGMA, 20)
    assert event.sample_rate == pytest.approx(BATCH / (N // 3))
    private = make(sampling=by_user)
    assert "user" in " ".join((*private.statement().caveats, str(private.statement().sampler)))


def test_two_optimizers_on_one_data_set_are_charged_together(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger.create(path)
    # A generator and a discriminator, say: each with an optimizer of its own on the same data.
    runs = [make(ledger=path), make(ledger=path, model=nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))]
    for _ in range(2):
        for private in runs:
            for batch in private.loader:
                private.step(batch)
    for private in runs:
        private.close()
    alone = runs[0].epsilon()
    both = accounting.epsilon(accounting.SelfComposed(runs[0].plan.event, 2), DELTA)
    total = Ledger.open(path).total(DELTA)
    assert total.fixed >= 0.999 * both > 1.2 * alone
    assert total.filter >= 0.999 * both


def test_a_budget_stops_the_second_run_before_it_is_crossed(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    first = make()
    Ledger.create(path, budget=(1.2 * first.plan.epsilon(DELTA), DELTA))
    taken = []
    for _ in range(2):
        private = make(ledger=path)
        try:
            for _ in range(2):
                for batch in private.loader:
                    private.step(batch)
        except dpcore.errors.BudgetError:
            assert private.optimizer.state_dict()["dpcore"]["public"]["step"] == private.steps_taken
        private.close()
        taken.append(private.steps_taken)
    assert taken[0] == 20
    assert sum(taken) < 40
    ledger = Ledger.open(path)
    assert ledger.total(DELTA).filter <= 1.2 * first.plan.epsilon(DELTA) * (1 + 1e-9)


def test_two_runs_under_one_key_have_different_noise() -> None:
    keys = [make(key=bytes(32))._engine.mechanism.keys.noise for _ in range(2)]
    assert keys[0] != keys[1]


def test_noise_of_zero_is_said_to_be_no_privacy() -> None:
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=0.0, batch_size=BATCH)
    private = make(method=method)
    assert math.isinf(private.plan.epsilon(DELTA))
    private.step(next(iter(private.loader)))
    assert "NOT PRIVATE" in private.statement().text()


def test_a_delta_that_allows_one_example_to_be_published_is_warned_of() -> None:
    with pytest.warns(dpcore.errors.DeltaWarning, match=f"n = {N} examples"):
        make(target_delta=1 / N)
