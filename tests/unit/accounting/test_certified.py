"""The public functions on events of every kind: certified intervals around the truth, and no order turned round."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("dp_accounting")
from dp_accounting.pld import privacy_loss_distribution as theirs

from dpcore import accounting
from dpcore.accounting import Adjacency, Composed, Event, Gaussian, PoissonSampledGaussian
from dpcore.accounting.calibrate import estimated_epsilon
from dpcore.accounting.gaussian import log_delta
from dpcore.accounting.phases import PoissonStep, phases
from tests.depth import chosen


def random_settings(count: int) -> Iterator[tuple[Event, float]]:
    """Events of one, two and three kinds of steps, with epsilons that dp-accounting can compute in a second."""
    rng = np.random.default_rng(44)
    while count > 0:
        q, sigma, steps = 10 ** rng.uniform(-4, -0.3), 0.4 * 50 ** rng.uniform(), int(10 ** rng.uniform(0, 4))
        delta = 10 ** rng.uniform(-9, -3)
        poisson, single = PoissonSampledGaussian(q, sigma, steps), PoissonSampledGaussian(q, sigma, 1)
        event: Event = (
            poisson,
            Composed((poisson, Gaussian(sigma * math.sqrt(2 + steps) / 2, 2, Adjacency.ZERO_OUT))),
            Composed((accounting.SelfComposed(single, steps), PoissonSampledGaussian(q / 3, 2.0, 50))),
            accounting.CyclicPoissonSampledGaussian(q, 3, 1.2 * sigma, 1.2, 3 * steps),
        )[count % 4]
        if 0.01 < estimated_epsilon(event, delta) < 25.0:
            count -= 1
            yield event, delta


def their_epsilon(event: Event, delta: float, *, pessimistic: bool, resolution: float = 0.05) -> float:
    """At a discretization of `resolution` times epsilon over the root of the number of steps."""
    found, whole = phases(event), None
    assert found is not None
    steps = [*found.steps, *([(PoissonStep(((1.0, 1.0, 1.0 / found.mu),)), 1)] if found.mu > 0 else [])]
    root = math.sqrt(sum(count for _, count in steps))
    interval = max(1e-4, min(0.02, resolution * estimated_epsilon(event, delta) / root))
    for step, count in steps:
        assert isinstance(step, PoissonStep)
        ((_, q, sigma),) = step.components
        part = theirs.from_gaussian_mechanism(
            sigma, sampling_prob=q, value_discretization_interval=interval, pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,  # it has no optimistic form
        ).self_compose(count)  # fmt: skip
        whole = part if whole is None else whole.compose(part)
    assert whole is not None
    return float(whole.get_epsilon_for_delta(delta))


def test_random_settings_agree_with_dp_accounting() -> None:
    count, resolution, wide = chosen(16, 500), chosen(0.05, 0.02), 0
    for event, delta in random_settings(count):
        interval = accounting.epsilon_interval(event, delta)
        assert 0.0 <= interval.lower <= interval.upper < math.inf
        wide += interval.gap > max(1e-3 * interval.upper, 1e-4)
        assert interval.upper == accounting.epsilon(event, delta)
        assert interval.lower <= their_epsilon(event, delta, pessimistic=True, resolution=resolution), (event, delta)
        assert interval.upper >= their_epsilon(event, delta, pessimistic=False, resolution=resolution), (event, delta)
        assert interval.lower <= accounting.epsilon(event, delta, "rdp"), (event, delta)
    assert wide <= count // 50  # where rounding or the largest grid does not allow the gap asked for


def sampled_delta(q: float, mu: float, epsilon: float) -> float:
    """delta of one Poisson-sampled step: P - e^eps Q = q (N(mu) - e^eps' N(0)), e^eps' = 1 + (e^eps - 1)/q."""
    return q * math.exp(log_delta(mu, math.log1p(math.expm1(epsilon) / q)))


@given(st.floats(-4, -0.01), st.floats(-0.7, 1.5), st.floats(-2, 1))
def test_the_exact_value_of_one_step_lies_inside(log_rate: float, log_sigma: float, log_epsilon: float) -> None:
    q, sigma, epsilon = 10.0**log_rate, 10.0**log_sigma, 10.0**log_epsilon
    exact = sampled_delta(q, 1 / sigma, epsilon)
    interval = accounting.delta_interval(PoissonSampledGaussian(q, sigma, 1), epsilon)
    assert interval.lower <= exact * (1 + 1e-9) + 1e-280
    assert exact <= interval.upper * (1 + 1e-9)
    if 1e-15 < exact < 1:
        around = accounting.epsilon_interval(PoissonSampledGaussian(q, sigma, 1), exact)
        assert around.lower <= epsilon * (1 + 1e-9)
        assert epsilon * (1 - 1e-9) <= around.upper


@given(st.lists(st.tuples(st.floats(-0.5, 1.5), st.integers(0, 50)), min_size=1, max_size=4), st.floats(-9, -2))
def test_without_sampling_all_accountants_agree(parts: list[tuple[float, int]], log_delta_: float) -> None:
    delta = 10.0**log_delta_
    plain = (Gaussian(10.0**log_sigma, count, Adjacency.ZERO_OUT) for log_sigma, count in parts)
    event = Composed((*plain, accounting.MatrixGaussian(5.0, 1.0, 9, "tree")))
    exact, interval = accounting.epsilon(event, delta, "gaussian"), accounting.epsilon_interval(event, delta)
    assert interval.lower <= exact * (1 + 1e-9)
    assert exact * (1 - 1e-9) <= interval.upper
    assert interval.gap <= max(1e-3 * exact, 1e-4)
    assert exact <= accounting.epsilon(event, delta, "rdp") * (1 + 1e-9)


MAKERS: dict[str, Callable[[float, float, int], Event]] = {
    "poisson": PoissonSampledGaussian,
    "cyclic": lambda q, sigma, steps: accounting.CyclicPoissonSampledGaussian(q, 2, sigma, 1.0, steps),
    "fixed size": lambda q, sigma, steps: accounting.FixedSizeSampledGaussian(
        2000, max(1, int(2000 * q)), sigma, steps
    ),
    "mixed": lambda q, sigma, steps: Composed((PoissonSampledGaussian(q, sigma, steps), Gaussian(10 * sigma))),
}


@given(
    st.sampled_from(sorted(MAKERS)), st.floats(-3, -0.4), st.floats(-0.3, 1.2), st.integers(1, 3000),
    st.floats(-9, -2), st.floats(1.0, 2.5),
)  # fmt: skip
def test_no_order_is_turned_round(
    kind: str, log_rate: float, log_sigma: float, steps: int, log_delta_: float, more: float
) -> None:
    make, q, sigma, delta = MAKERS[kind], 10.0**log_rate, 10.0**log_sigma, 10.0**log_delta_

    def lower(q: float = q, sigma: float = sigma, steps: int = steps, delta: float = delta) -> float:
        return accounting.epsilon_interval(make(q, sigma, steps), delta).lower

    upper = accounting.epsilon(make(q, sigma, steps), delta)
    assert lower() <= upper
    assert lower(sigma=more * sigma) <= upper
    assert lower(q=q / more) <= upper
    assert lower(steps=math.floor(steps / more)) <= upper
    assert lower(delta=min(0.5, more * delta)) <= upper


@given(st.sampled_from(sorted(MAKERS)), st.floats(0.2, 8), st.floats(-8, -4), st.floats(-3, -1))
def test_calibration_with_the_default_meets_its_target(kind: str, target: float, log_delta_: float, log_rate: float):
    make, delta = MAKERS[kind], 10.0**log_delta_
    sigma = accounting.calibrate("noise_multiplier", target, delta, lambda sigma: make(10.0**log_rate, sigma, 500))
    reached = accounting.epsilon(make(10.0**log_rate, sigma, 500), delta)
    assert target - max(1e-3 * target, 1e-4) <= reached <= target
