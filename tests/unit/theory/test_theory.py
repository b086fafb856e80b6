"""The theory's numbers against brute force and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore import theory
from dpcore.stages.queries import ParameterWindow

SIGMAS = st.tuples(st.floats(0.0, 0.95), st.floats(0.01, 2.0), st.floats(0.1, 3.0)).map(
    lambda s: (s[0] * s[2], s[1] * s[2], s[2])
)


def riccati(p: float, sH: float, sv: float, sw: float) -> float:
    k = (p + sH + sv) / (p + sw + sv)
    return (1 - k) * (p + sH + sv)


@given(SIGMAS)
def test_the_steady_state_is_where_the_recursion_ends(sigmas: tuple[float, float, float]) -> None:
    sH, sv, sw = (sigma**2 for sigma in sigmas)
    p = sw
    for _ in range(5000):
        p = riccati(p, sH, sv, sw)
    assert theory.steady_variance(*sigmas) == pytest.approx(p, rel=1e-8)
    assert theory.kappa_from_variances(*sigmas) == pytest.approx((p + sH + sv) / (p + sw + sv), rel=1e-8)
    R = math.sqrt((sH + sv) * (4 * sw - 3 * sH + sv))
    assert theory.steady_variance(*sigmas) == pytest.approx((R - (sH + sv)) / 2, rel=1e-6)


@given(SIGMAS)
def test_the_rate_is_the_recursions_and_not_the_papers(sigmas: tuple[float, float, float]) -> None:
    sH, sv, sw = (sigma**2 for sigma in sigmas)
    p_inf, rate = theory.steady_variance(*sigmas), theory.kalman_rate(*sigmas)
    p = p_inf * (1 + 1e-5)
    measured = (riccati(p, sH, sv, sw) - p_inf) / (p - p_inf)
    assert rate == pytest.approx(measured, rel=1e-3, abs=1e-6)
    R = math.sqrt((sH + sv) * (4 * sw - 3 * sH + sv))
    assert rate == pytest.approx((2 * sw - sH + sv - R) / (2 * sw - sH + sv + R), rel=1e-6, abs=1e-12)
    assert rate == pytest.approx((1 - theory.kappa_from_variances(*sigmas)) ** 2, rel=1e-9)


def test_the_greatest_hessian_error_leaves_no_memory() -> None:
    assert theory.kappa_from_variances(1.0, 0.3, 1.0) == 1
    assert theory.kalman_rate(1.0, 0.3, 1.0) == 0


@given(st.floats(0, 0.999), st.integers(1, 30))
def test_pmlf_variance_factor_is_the_sum_of_squared_weights(beta: float, window: int) -> None:
    weights = beta ** np.arange(window)
    weights /= weights.sum()
    factor, rho = theory.pmlf_variance_factor(beta, window)
    assert factor == pytest.approx((weights**2).sum(), rel=1e-9)
    assert rho == pytest.approx((weights**2).sum() ** -0.5, rel=1e-9)
    points = ParameterWindow(beta=beta, window=window).points(40)
    assert factor == pytest.approx(sum(point.weight**2 for point in points))


def test_noise_factor() -> None:
    assert [theory.theoretical_noise_factor(snr) for snr in (0.5, 2)] == [1, 0.25]  # no filter: c_0 = 1/2, kappa_0 = 1


def test_bias_correction_regime_at_the_papers_example() -> None:
    """Section 4: 0.15 sqrt(d) at beta2 = 0.999."""
    regime = theory.bias_correction_regime(2048, 1.0, 10**6)
    assert regime.threshold == pytest.approx(150, rel=0.01)
    assert regime.same_direction == 2048
    assert regime.orthogonal == pytest.approx(math.sqrt(2048))
    assert regime.trustworthy_if_same_direction
    assert not regime.trustworthy_if_orthogonal
    beta2 = 0.97
    assert theory.bias_correction_regime(8, 2.0, 9, beta2).threshold == pytest.approx(
        3 * ((1 - beta2) ** 2 / (1 - beta2**2)) ** 0.25
    )
    noiseless = theory.bias_correction_regime(8, 0, 9)
    assert noiseless.trustworthy_if_orthogonal


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_bias_correction_regime_by_simulation(scale: float) -> None:
    """The share of negative debiased moments falls from near half to near none as the condition comes to hold."""
    rng = np.random.default_rng(0)
    d, beta2, clip = 20_000, 0.9, 1.0
    g = clip / math.sqrt(d)
    threshold = theory.bias_correction_regime(1.0, 1.0, d, beta2).threshold
    batch_size = scale * threshold
    s = clip / batch_size
    nu = np.zeros(d)
    for _ in range(200):
        nu = beta2 * nu + (1 - beta2) * (g + s * rng.normal(size=d)) ** 2
    negative = np.mean(nu - s**2 < 0)
    assert theory.bias_correction_regime(batch_size, 1.0, d, beta2).trustworthy_if_same_direction == (scale >= 1)
    low, high = {0.25: (0.4, 0.65), 1.0: (0.1, 0.4), 4.0: (0.0, 0.01)}[scale]
    assert low <= negative <= high


@pytest.mark.parametrize(("n", "d", "epsilon"), [(60_000, 100, 1.0), (10**6, 10**9, 1.0), (5_000, 3000, 0.5)])
def test_accelerated_parameters_fulfill_the_conditions_and_no_larger_batch_does(n: int, d: int, epsilon: float) -> None:
    L, M, diam, delta = 2.0, 0.7, 3.0, 1e-6

    def fulfilled(B: int) -> bool:
        T = n // B
        beta = M + (8 * L + 16 * M * diam) * n**1.5 / (diam * B * B)
        bound = (B * beta * epsilon) ** 2 / (
            128 * M**2 * math.log2(T) ** 3 * math.log(4 * T / delta) * math.log(2.5 / delta)
        )
        return math.isqrt(n) >= B and d <= bound

    found = theory.accelerated_srgd_parameters(n, d, L, M, diam, epsilon, delta)
    assert found.batch_size == max(B for B in range(1, math.isqrt(n) + 1) if fulfilled(B))
    assert found.steps == n // found.batch_size
    assert found.steps >= 2
    assert found.beta == pytest.approx(M + (8 * L + 16 * M * diam) * n**1.5 / (diam * found.batch_size**2))
    assert found.beta >= 2 * M * found.steps  # claim 4.2
    assert found.max_grad_norm == 4 * L + 8 * M * diam


def test_accelerated_parameters_do_not_depend_on_the_unit() -> None:
    """Lengths in another unit: L / u, M / u^2 and diam * u leave batches as they are, and beta scales as M."""
    u = 7.0
    first = theory.accelerated_srgd_parameters(10**6, 10**9, 2.0, 0.7, 3.0, 1.0, 1e-6)
    second = theory.accelerated_srgd_parameters(10**6, 10**9, 2.0 / u, 0.7 / u**2, 3.0 * u, 1.0, 1e-6)
    assert second[:2] == first[:2]
    assert second.beta == pytest.approx(first.beta / u**2)
