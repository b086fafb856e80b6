"""The theorems' numbers against the printed formulas, and against runs whose expectation is known exactly."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

import dpcore
from dpcore import theory
from dpcore.errors import ArgumentError
from dpcore.stages.filters import named_filter
from dpcore.theory.analysis.filters import impulse_response
from tests.refused import refused

PROBLEM = {"smoothness": 2.0, "initial_gap": 3.0, "initial_gradient": 1.5, "noise_power": 0.5}


@pytest.mark.parametrize(("gamma", "eta"), [(-1.0, 0.05), (0.5, 0.01), (-0.5, 0.02)])
def test_disks_bound_is_the_printed_one(gamma: float, eta: float) -> None:
    k, L, T, B, gap, G0, s2, v = 0.9, 2.0, 50, 4, 3.0, 1.5**2, 0.5, 0.7
    M_gamma = 1 + 4 * (2 + 1 / k + abs(1 + gamma)) / gamma**2
    grown = 1 + 4 * eta**2 * L**2 + abs(1 + gamma) * (k + 2 * eta**2 * L**2 * M_gamma)
    beta = (eta * (1 - k) / 2 + eta**2 * L * (1 - k) ** 2 * grown) / (1 - (1 - k) ** 2 * grown)
    M_1 = (1 + k - 2 * eta * L) - 4 * (beta + eta**2 * L) * (1 - k) ** 2 * L**2 * eta * (2 + abs(1 + gamma) * M_gamma)
    expected = 2 * (gap + beta * G0) / (M_1 * eta * T)
    expected += 2 * (beta + eta**2 * L) * k**2 / (M_1 * eta) * ((2 + abs(1 + gamma)) * v / B + s2)
    got = theory.disk_convergence(k, gamma, eta, T, gradient_variance=v, batch_size=B, **PROBLEM)
    assert (got.bound, got.beta, got.descent) == pytest.approx((expected, beta, M_1), rel=1e-12)
    v1, v2 = np.eye(2)  # gradients of length 1 that point apart as far as they can
    w = (1 - k) / (k * gamma)
    longest = max(np.linalg.norm(w * a + (1 - w) * b) for a in (v1, -v1, v2) for b in (v1, -v1, v2))
    assert got.clip_factor == pytest.approx(longest)


@pytest.mark.parametrize("kappa", [0.5, 0.8, 1.0])
@pytest.mark.parametrize("L", [0.3, 2.0])
def test_disks_bound_holds_on_a_quadratic(kappa: float, L: float) -> None:
    """E ||grad F||^2 of F = L x^2 / 2, by the exact recursion of second moments from g~_{-1} = 0."""
    eta, T, noise, x0 = 0.1 / L, 40, 0.3, 1.7
    # The state (x_t, x_{t-1}, g~_{t-1}); the two-point query of a quadratic does not depend on gamma.
    row = np.array([(1 - kappa) * L + kappa * L, -(1 - kappa) * L, 1 - kappa])
    step = np.stack([np.eye(3)[0] - eta * row, np.eye(3)[0], row])
    kick = np.array([-eta * kappa, 0.0, kappa])
    start = np.array([x0, x0, 0.0])
    second, total = np.outer(start, start), 0.0
    for _ in range(T):
        total += L**2 * second[0, 0]
        second = step @ second @ step.T + noise * np.outer(kick, kick)
    bound = theory.disk_convergence(
        kappa, -1.0, eta, T, smoothness=L, initial_gap=L * x0**2 / 2, initial_gradient=L * x0, noise_power=noise
    ).bound
    assert total / T <= bound <= 4 * total / T


def test_disks_settings_are_the_corollarys_and_their_bound_follows_at_many_steps_only() -> None:
    problem = {"smoothness": 1.0, "initial_gap": 1.0, "initial_gradient": math.sqrt(0.1), "noise_power": 1.0}

    def ratio(steps: int) -> float:
        s = theory.disk_settings(steps, **problem)
        return theory.disk_convergence(s.kappa, s.gamma, s.learning_rate, steps, **problem).bound / s.bound

    M = 0.05
    settings = theory.disk_settings(10**7, gradient_variance=3.0, **problem)
    assert settings.learning_rate == pytest.approx(math.sqrt((2 * M + 0.1) / 2e7) / M)
    assert settings.kappa == pytest.approx(M * settings.learning_rate)
    assert settings.bound == pytest.approx(8 * math.sqrt(M / 1e7))
    assert settings.least_batch_size == 6.0
    assert theory.disk_settings(10, **problem).learning_rate == pytest.approx(1 / (2 + 4 / M - M))
    least = math.ceil(settings.least_steps)
    assert ratio(least) == pytest.approx(303.5, rel=1e-3)  # the printed T does not suffice
    assert ratio(10 * least) < 1
    assert ratio(10**6 * least) == pytest.approx(2 * math.sqrt(2) / 8, rel=1e-2)


def test_disks_tradeoff_is_its_corollary_at_half_the_moments_accountants_noise() -> None:
    N, d, epsilon, delta, C, T = 5000, 100, 2.0, 1e-5, 1.5, 700
    own = {"smoothness": 2.0, "initial_gap": 3.0, "initial_gradient": 1.5}
    noise = d * C**2 * T * math.log(1 / delta) / (2 * (N * epsilon) ** 2)
    got = theory.disk_tradeoff(N, d, epsilon, delta, max_grad_norm=C, **own)
    assert got.bound == pytest.approx(theory.disk_settings(T, noise_power=noise, **own).bound)


def test_dopplers_bound_is_the_printed_one_and_dp_sgds_without_a_filter() -> None:
    T, eta, L, gap, noise, v, B = 30, 0.2, 2.0, 3.0, 0.5, 0.8, 4
    kappa = impulse_response(named_filter("first-order v1"), T)
    c = 0.5 * 0.95 ** np.arange(T)
    S = sum(c[tau] * kappa[tau] for t in range(T) for tau in range(t + 1))
    squares = sum(kappa[tau] ** 2 for t in range(T) for tau in range(t + 1))
    given = {"smoothness": L, "initial_gap": gap, "noise_power": noise, "gradient_variance": v, "batch_size": B}
    got = theory.doppler_convergence(kappa, c, eta, **given)
    assert got.bound == pytest.approx(gap / (eta * S) + eta * L / (2 * S / squares) * (noise + v / B))
    assert got.largest_rate == pytest.approx(min(2 * 0.5 / (L * kappa)))
    plain = theory.doppler_convergence(np.eye(T)[0], 0.5 * np.eye(T)[0], eta, **given)
    assert plain.bound == pytest.approx(2 * gap / (eta * T) + eta * L * (noise + v / B))


def test_dopplers_tradeoff_is_the_least_bound_of_its_theorem_2() -> None:
    N, d, epsilon, delta, C, T = 5000, 100, 2.0, 1e-5, 1.5, 400
    kappa = impulse_response(named_filter("momentum"), T)
    c = 0.5 * 0.99 ** np.arange(T)
    noise = d * C**2 * T * math.log(1 / delta) / (N * epsilon) ** 2

    def bound(rate: float) -> theory.DopplerConvergence:
        return theory.doppler_convergence(
            kappa, c, rate, smoothness=0.1, initial_gap=3.0, noise_power=noise, backward=1e9
        )

    best = minimize_scalar(lambda log: bound(math.exp(log)).bound, bounds=(-9, 9), method="bounded")
    some = bound(1.0)
    got = theory.doppler_tradeoff(
        N, d, epsilon, delta, max_grad_norm=C, smoothness=0.1, initial_gap=3.0, snr=some.snr,
        signal_per_step=some.signal / T,
    )  # fmt: skip
    assert got.bound == pytest.approx(best.fun, rel=1e-9)
    assert got.rate_times_steps == pytest.approx(math.exp(best.x) * T, rel=1e-4)


def test_pmlfs_largest_rate_is_the_printed_one() -> None:
    rate = theory.pmlf_largest_rate(3, smoothness=2.0, gradient_variance=0.7, max_grad_norm=1.5, noise_power=4.0)
    assert rate**2 * 2.0**2 * 3**3 * (1.5**2 + 4.0) == pytest.approx(0.7)


def test_the_accelerated_methods_excess_risk_is_the_printed_sum() -> None:
    B, T, beta, L, M, C, Q, b = 4, 6, 7, 3, 2, 5, 8, 1
    eta = [Fraction(t + 1) for t in range(T + 1)]

    def upto(t: int) -> Fraction:
        return sum(eta[: t + 1], Fraction(0))

    total = 0.0
    for t in range(T):
        root = math.sqrt(t + 1) / math.sqrt(B)
        inner = 2 * Q * root * (L + Q * (t + 1) / (math.sqrt(B) * eta[t])) / (eta[t] * beta)
        inner += (3 * Q * root / eta[t] + L) * b / eta[t] + Q * C * root / upto(t)
        inner += Fraction(3 * beta, 1) / upto(t) * b * C + Fraction(beta * b**2) / eta[t] ** 2
        total += upto(t) * inner
    expected = (total + beta * C**2) / upto(T)
    got = theory.accelerated_srgd_excess_risk(
        B, T, beta, lipschitz=L, smoothness=M, diameter=C, deviation=Q, noise_norm=b
    )
    assert got == pytest.approx(float(expected), rel=1e-12)

    total = sum(
        upto(t) * (8 * L**2 / (math.sqrt(B) * beta) + float(5 * L * b / eta[t] + beta * b**2 / eta[t] ** 2))
        for t in range(T)
    )
    expected = (total + 3 * beta * b * C * T + beta * C**2) / upto(T)
    got = theory.accelerated_srgd_excess_risk(
        B, T, beta, lipschitz=L, smoothness=M, diameter=C, deviation=None, noise_norm=b
    )
    assert got == pytest.approx(float(expected), rel=1e-12)


def test_the_accelerated_method_keeps_its_bound_without_noise() -> None:
    truth, scales, T = np.array([0.6, -0.3]), np.array([1.0, 0.1]), 12
    result = dpcore.minimize(
        lambda x, indices: np.tile(scales * (x - truth), (len(indices), 1)),
        np.zeros(2),
        dpcore.sampling.FixedOrderSampler(dataset_size=T, batch_size=1),
        dpcore.methods.accelerated_srgd(lr=1.0, max_grad_norm=1e3, noise_multiplier=0.0, radius=1.0),
        steps=T,
    )
    excess = float(scales @ (result.x - truth) ** 2) / 2
    bound = theory.accelerated_srgd_excess_risk(
        1, T, 1.0, lipschitz=2.0, smoothness=1.0, diameter=2.0, deviation=0.0, noise_norm=0.0
    )
    assert 0 < excess <= bound == pytest.approx(2 * 4 / ((T + 1) * (T + 2)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: theory.disk_convergence(0.1, 0.5, 0.1, 9, **PROBLEM), "kappa=0.1: is too small"),
        # Within the paper's condition on eta (0.628 / L), and M_1 = -0.20.
        (lambda: theory.disk_convergence(0.6, -1, 0.6, 9, **PROBLEM | {"smoothness": 1.0}), "M_1 is -0.2047"),
        (lambda: theory.disk_convergence(0.9, 0, 0.1, 9, **PROBLEM), "gamma=0: must not be 0"),
        (lambda: theory.disk_settings(9, **PROBLEM | {"initial_gradient": 9.0}), "must be at most 3.4641"),
        (
            lambda: theory.doppler_convergence([1, -0.1], [0.5, 0], 0.1, smoothness=1, initial_gap=1, noise_power=1),
            "is negative at lag 1",
        ),
        (
            lambda: theory.doppler_convergence([0, 1], [0.5, -0.5], 0.1, smoothness=1, initial_gap=1, noise_power=1),
            "S_T must be > 0",
        ),
        (
            lambda: theory.doppler_convergence(
                [1.0], [0.5], 1, smoothness=1, initial_gap=1, noise_power=1, backward=[-1]
            ),
            "backward: must be",
        ),
        (
            lambda: theory.doppler_convergence([1.0], [0.5], 2, smoothness=1, initial_gap=1, noise_power=1),
            "learning_rate=2: must be at most 1",
        ),
        (
            lambda: theory.accelerated_srgd_excess_risk(
                1, 2, 1, lipschitz=1, smoothness=2, diameter=1, deviation=1, noise_norm=1
            ),
            "beta=1.0: must be at least smoothness=2",
        ),
    ],
)
def test_what_the_theorems_do_not_cover_is_refused(call, words: str) -> None:
    refused(ArgumentError, words, call)
