"""DP-SGD against its loop in algorithms.md, and what holds for every method: denominator and noise."""

import numpy as np
import pytest
from loops import KEY, N, assert_same, loop, run

import dpcore
from dpcore import methods
from dpcore.spec.keys import RunKeys


@pytest.mark.parametrize("rule", ["standard", "automatic", "automatic_v", "normalized", "psac"])
def test_dp_sgd_is_its_loop(rule: str) -> None:
    method = methods.dp_sgd(lr=0.3, max_grad_norm=0.7, clipping=rule, noise_multiplier=0.5, batch_size=6)
    assert_same(run(method), loop(rule=rule, size=6))


def test_the_average_divides_by_the_expected_batch_size() -> None:
    """Not by the realized one, which depends on who is in the data."""
    sampler = dpcore.sampling.PoissonSampler(dataset_size=N, batch_size=10)
    method = methods.dp_sgd(lr=1.0, max_grad_norm=1.0, noise_multiplier=0.0)
    result = dpcore.minimize(
        lambda x, i: np.tile([[0.1, 0.0]], (len(i), 1)), np.zeros(2), sampler, method,
        steps=1, key=KEY, exact_key=True,
    )  # fmt: skip
    drawn = sampler.indices(RunKeys.new(KEY, exact_key=True).sampling, 0)
    assert len(drawn) != 10
    assert result.x[0] == pytest.approx(-0.1 * len(drawn) / 10)
