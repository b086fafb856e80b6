"""The strategy that is recommended: it fits the memory, it is the best that does, and runs take it by themselves."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dpcore.strategies import Identity, Recommended, candidates, recommend, sensitivity, workloads

from dpcore import methods, strategies
from dpcore.errors import ArgumentError
from dpcore.plan.plan import Plan
from dpcore.sampling import CyclicPoissonSampler, FixedOrderSampler, RandomAllocationSampler
from tests.refused import refused


@pytest.mark.parametrize(("steps", "epochs", "vectors", "rows"), [
    (60, 1, 4, 1), (60, 6, 4, 1), (60, 6, 1, 1), (60, 6, 0, 4), (60, 1, 0, 1), (2, 2, 4, 1), (1, 1, 4, 1), (9, 9, 3, 2),
])  # fmt: skip
def test_what_is_recommended_fits_and_is_near_the_best_that_fits(
    steps: int, epochs: int, vectors: int, rows: int
) -> None:
    found = candidates(workloads.momentum(steps, 0.9), epochs=epochs, vectors=vectors, rows=rows)
    patterns = FixedOrderSampler(dataset_size=-(-steps // epochs), batch_size=1).patterns(steps)
    wanted = np.asarray(workloads.momentum(steps, 0.9))
    for one in found:
        assert one.cost == strategies.streaming_cost(one.strategy, steps)
        assert one.cost.vectors <= vectors
        assert one.cost.rows_drawn <= max(rows, 1)
        assert one.error == pytest.approx(strategies.rmse(one.strategy, wanted, steps, patterns), rel=1e-9)
    assert found[0].error <= 1.01 * min(one.error for one in found)
    assert found[0].error <= next(one.error for one in found if one.kind == "identity")
    fewer = [one for one in found if one.error <= 1.01 * min(two.error for two in found)]
    assert found[0].cost.vectors == min(one.cost.vectors for one in fewer)


def test_more_memory_never_hurts() -> None:
    errors = [recommend(200, epochs=4, vectors=vectors).error for vectors in (0, 1, 2, 4, 8)]
    assert all(more <= 1.011 * less for less, more in itertools.pairwise(errors))
    assert errors[-1] < 0.4 * errors[0]


def test_bands_are_limited_where_sampling_amplifies_them() -> None:
    sampler = CyclicPoissonSampler(dataset_size=1000, batch_size=20, groups=3)
    plan = Plan(methods.memf(lr=0.1, noise_multiplier=1.0), sampler, 60)
    assert strategies.sensitivity(plan.method.noise.strategy, [[0], [30]], 60) == pytest.approx(1.0)
    assert plan.method.noise.strategy.order == 2  # three bands
    assert plan.event.participations == 20


def test_memf_and_srg_memf_take_it_for_their_own_workload_and_participation() -> None:
    sampler = FixedOrderSampler(dataset_size=1000, batch_size=50)  # epochs of 20 steps
    for method, wanted in (
        (methods.memf(lr=0.1, noise_multiplier=1.0), workloads.momentum(80, 0.9)),
        (methods.memf(lr=0.1, noise_multiplier=1.0, base="sgd"), workloads.ones(80)),
        (methods.memf(lr=0.1, noise_multiplier=1.0, base="adam"), workloads.ones(80)),
        (methods.memf(lr=0.1, noise_multiplier=1.0, momentum=0.5), workloads.momentum(80, 0.5)),
        (methods.srg_memf(lr=0.1, noise_multiplier=1.0), workloads.srg(80, math.exp(-2.5), 0.9)),
    ):
        chosen = Plan(method, sampler, 80).method.noise.strategy
        assert chosen == recommend(wanted, epochs=4).strategy
        assert strategies.error_of(chosen, wanted, 4) < 0.7 * strategies.error_of(Identity(), wanted, 4)


def test_it_is_better_than_the_banded_square_root_that_was_the_default() -> None:
    for steps, epochs in ((120, 1), (400, 10), (1000, 1)):
        before = strategies.strategy("banded-inverse-square-root", steps, bands=16)
        wanted = workloads.momentum(steps, 0.9)
        assert recommend(wanted, epochs=epochs).error < 0.95 * strategies.error_of(before, wanted, epochs)


def test_it_says_what_it_is_and_runs_of_any_sampler_that_covers_it() -> None:
    assert Recommended(momentum=0.9).describe() == {
        "kind": "recommended", "vectors": 4, "momentum": 0.9, "decay": None,
    }  # fmt: skip
    sampler = RandomAllocationSampler(dataset_size=100, batch_size=10)
    plan = Plan(methods.memf(lr=0.1, noise_multiplier=1.0), sampler, 30)
    chosen = plan.method.noise.strategy
    blocks = [[i, j, k] for i in range(10) for j in range(10, 20) for k in range(20, 30)]
    assert plan.run_sensitivity >= sensitivity(chosen, blocks, 30) - 1e-12


def test_bad_input() -> None:
    refused(ArgumentError, "vectors=-1", candidates, 10, vectors=-1)
    refused(ArgumentError, "rows=0", candidates, 10, rows=0)
    refused(ArgumentError, "epochs=11", candidates, 10, epochs=11)
    refused(ArgumentError, "bands=0", candidates, 10, bands=0)
