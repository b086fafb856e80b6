"""The contract of every filter, and each kind against an explicit loop, scipy, or simulation."""

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.signal import butter, cheby1, freqz, lfilter

from dpcore.spec.check import order_of

from dpcore.stages.filters import (  # isort: skip
    NAMED_FILTERS, Accumulation, Averaging, Chain, Filter, FullKalman, Identity, LowPass, OptimalFIR, ScalarKalman,
    butterworth, chebyshev, named_filter
)  # fmt: skip
from dpcore.stages.method import describe
from dpcore.stages.queries import TwoPoint
from dpcore_numpy import recurrence

DECAYS = (0.0, 0.5, 0.25, 1.0, 0.0, 0.9) * 20
KALMAN = ScalarKalman(sigma_H=0.4, sigma_v=0.1, sigma_w=1.0)
FILTERS: dict[str, Filter] = {
    "identity": Identity(), "averaging": Averaging(0.7), "kalman": KALMAN,
    "low-pass": LowPass(b=(0.2, 0.1, 0.05), a=(-0.9, 0.25)),
    "butterworth": butterworth(3, 0.2), "chebyshev": chebyshev(2, 0.3, 1.0),
    "accumulation": Accumulation(math.exp(-2.5)), "prefix sum": Accumulation(1), "decays": Accumulation(DECAYS),
    "chain": Chain(Accumulation(DECAYS), named_filter("second-order"), Averaging(0.5)),
    "empty chain": Chain(), **{name: named_filter(name) for name in NAMED_FILTERS},
}  # fmt: skip


def run(stage: Filter, signal: np.ndarray) -> np.ndarray:
    """Pass each row of the signal through the recurrences of its step, in a row."""
    state = [np.zeros(signal.shape[1], signal.dtype) for _ in range(stage.order)]
    outputs = []
    for t, y in enumerate(signal):
        used = 0
        for coefficients in stage.coefficients(t):
            order = order_of(coefficients)
            y = recurrence(y, state[used : used + order], coefficients)
            used += order
        outputs.append(y)
    return np.stack(outputs)


def expected(stage: Filter, x: np.ndarray) -> np.ndarray:
    """The same filter by another road: scipy for constant coefficients, a loop over the definition for the others."""
    if isinstance(stage, Chain):
        for part in stage.filters:
            x = expected(part, x)
        return x
    if isinstance(stage, LowPass):
        a = (1.0, *stage.a)
        return lfilter(stage.b, a, x, axis=0) / lfilter(stage.b, a, np.ones(len(x)))[:, None]
    outputs, y = [], np.zeros(x.shape[1])
    for t, g in enumerate(x):
        if isinstance(stage, Identity):
            y = g
        elif isinstance(stage, Accumulation):
            c = stage.decay[t] if isinstance(stage.decay, tuple) else stage.decay
            y = g + (c * y if t else 0)
        else:
            k = stage.kappa if isinstance(stage, Averaging) else stage.gain(t)
            y = g if t == 0 else (1 - k) * y + k * g
        outputs.append(y)
    return np.stack(outputs)


@pytest.mark.parametrize("kind", FILTERS)
class TestContract:
    def test_equals_the_definition(self, kind: str) -> None:
        signal = np.random.default_rng(4).normal(size=(100, 3))
        np.testing.assert_allclose(run(FILTERS[kind], signal), expected(FILTERS[kind], signal), rtol=1e-9, atol=1e-11)

    def test_lengths_do_not_change_and_make_up_the_order(self, kind: str) -> None:
        stage = FILTERS[kind]
        lengths = {tuple((len(c.b), len(c.a)) for c in stage.coefficients(t)) for t in range(100)}
        assert len(lengths) == 1
        assert sum(order_of(c) for c in stage.coefficients(0)) == stage.order
        assert stage.adaptive is False

    def test_outputs_stay_finite(self, kind: str) -> None:
        signal = np.random.default_rng(5).choice([-1e30, 1e30], size=(119, 2)).astype(np.float32)
        output = run(FILTERS[kind], signal)
        assert np.isfinite(output).all()
        assert output.dtype == np.float32

    def test_is_described_in_plain_values(self, kind: str) -> None:
        described = describe(FILTERS[kind])
        assert json.loads(json.dumps(described)) == described
        assert set(described) == {"kind"} | {field.name for field in dataclasses.fields(FILTERS[kind])}  # type: ignore[arg-type]


@given(
    st.lists(st.complex_numbers(max_magnitude=0.95, allow_nan=False, allow_infinity=False), max_size=2),
    st.lists(st.floats(-1, 1), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_any_stable_filter_is_scipys(poles: list[complex], taps: list[float], seed: int) -> None:
    a = tuple(np.real(np.atleast_1d(np.poly([*poles, *np.conj(poles)])))[1:].tolist())
    gain = sum(taps) / (1 + sum(a))
    assume(abs(gain) > 1e-2)
    b = tuple(tap / gain for tap in taps)
    normalizers = lfilter(b, (1.0, *a), np.ones(4096))
    cancels = np.abs(np.diff(normalizers, prepend=0.0)).sum()  # a filter whose weights cancel is refused
    assume(np.abs(normalizers).min() > max(1e-3, 1e-5 * cancels))
    stage = LowPass(b=b, a=a)
    signal = np.random.default_rng(seed).normal(size=(40, 2))
    got, wanted = run(stage, signal), expected(stage, signal)
    weights = np.abs(lfilter(b, (1.0, *a), np.eye(40)[0])).sum() / np.abs(normalizers).min()
    np.testing.assert_allclose(got, wanted, atol=1e-10 * max(weights, 1))


def test_normalizers_far_beyond_the_checked_steps() -> None:
    stage = LowPass(b=(1e-4,), a=(-(1 - 1e-4),))
    for step in (0, 63, 64, 5000, 20_000):
        assert stage.coefficients(step)[0].normalizer == pytest.approx(-math.expm1((step + 1) * math.log1p(-1e-4)))


@given(st.lists(st.sampled_from(sorted(FILTERS)), max_size=4), st.integers(0, 2**32 - 1))
def test_a_chain_is_one_filter_after_the_other(kinds: list[str], seed: int) -> None:
    stages = [FILTERS[kind] for kind in kinds]
    signal = np.random.default_rng(seed).normal(size=(20, 2))
    chained = signal
    for stage in stages:
        chained = run(stage, chained)
    assert run(Chain(*stages), signal).tobytes() == chained.tobytes()
    assert Chain(*stages).order == sum(stage.order for stage in stages)


def test_accumulation_ignores_c_0() -> None:
    assert Accumulation((0.7, 0.5)).coefficients(0) == Accumulation((0.0, 0.5)).coefficients(0)
    assert Accumulation((0.7,)).coefficients(0)[0].a == (0.0,)
    assert Accumulation([0, 0.5, 0.5]).coefficients(2)[0].a == (0.0,)  # decays may end with the run


SIGMAS = st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 2.0), st.floats(0.5, 2.0)).map(lambda s: (s[0] * s[2], *s[1:]))


@given(SIGMAS, st.floats(0, 5))
def test_the_gain_follows_the_recursion(sigmas: tuple[float, float, float], p: float) -> None:
    stage = ScalarKalman(*sigmas, initial_variance=p)
    sH, sv, sw = (sigma**2 for sigma in sigmas)
    for step in range(100):
        k = (p + sH + sv) / (p + sw + sv)
        p = (1 - k) * (p + sH + sv)
        assert stage.gain(step) == pytest.approx(k, rel=1e-9)
        assert 0 < stage.gain(step) <= 1
    assert ScalarKalman(*sigmas).gain(0) == pytest.approx((sw + sH + sv) / (2 * sw + sv))


def test_without_hessian_error_the_filter_is_the_optimal_one_for_a_random_walk() -> None:
    """The mean squared error of k_t on simulated random walks is p_t, and no constant weight does better."""
    rng = np.random.default_rng(8)
    stage = ScalarKalman(sigma_H=0.0, sigma_v=0.3, sigma_w=1.0, initial_variance=1.0)
    steps, walks = 60, 20_000
    truth = np.cumsum(0.3 * rng.normal(size=(steps, walks)), axis=0)
    observed = truth + rng.normal(size=truth.shape)
    error = np.mean((run(stage, observed)[-1] - truth[-1]) ** 2)
    p_inf = stage.kappa  # p = k sw, where sw = 1 and sH = 0
    assert error == pytest.approx(p_inf, rel=0.05)
    for factor in (0.7, 1.4):
        assert np.mean((run(Averaging(factor * stage.kappa), observed)[-1] - truth[-1]) ** 2) > error


def full(dimension: int = 3, **changes: Any) -> FullKalman:
    settings = {"hessian_covariance": 0.16, "motion_covariance": 0.01, "noise_covariance": 1.0} | changes
    return FullKalman(dimension, allow_nonprivate=True, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("gamma", [-1.0, 0.5])
def test_on_a_quadratic_the_query_and_the_filter_are_the_full_filter(gamma: float) -> None:
    """Two gradients replace the Hessian: the query w_t and the filter k_t must be those of the same step."""
    rng = np.random.default_rng(14)
    hessian, noise = np.diag([1.0, 0.3, 2.0]), rng.normal(size=(25, 3))
    query, state = TwoPoint(KALMAN, gamma), [np.zeros(3)]
    x, d = np.array([1.0, -2.0, 0.5]), np.zeros(3)
    kalman: FullKalman | None = None
    for t in range(25):
        released = noise[t] + sum(p.weight * hessian @ (x + p.displacement * d) for p in query.points(t))
        (coefficients,) = KALMAN.coefficients(t)
        estimate = recurrence(np.asarray(released), state, coefficients)
        # The full filter sees the plain gradient under the noise that the query's weights leave as it is.
        kalman = kalman or full(initial_estimate=estimate)
        np.testing.assert_allclose(kalman.step(hessian @ x + noise[t], hessian @ d), estimate, rtol=1e-10, atol=1e-12)
        d = -0.1 * estimate
        x = x + d


def test_the_full_filter_follows_the_formulas() -> None:
    rng = np.random.default_rng(10)
    root = rng.normal(size=(4, 3, 3))
    S_H, S_v, S_C, extra = (r @ r.T for r in root)
    S_w, C = S_H + extra, rng.normal(size=(3, 3))
    kalman = full(
        hessian_covariance=S_H, motion_covariance=S_v, noise_covariance=S_w, observation=C, observation_covariance=S_C
    )
    estimate, P = np.zeros(3), S_w
    for _ in range(8):
        g, product = rng.normal(size=(2, 3))
        predicted, P = estimate + product, P + S_H + S_v
        inverse = np.linalg.inv(S_w + C @ (S_C @ np.outer(predicted, predicted) + P) @ C.T - S_H)
        K = P @ C.T @ inverse
        estimate, P = predicted + K @ (g - C @ predicted), (np.eye(3) - K @ C) @ P
        np.testing.assert_allclose(kalman.step(g, product), estimate, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("cutoff", [0.01, 0.1, 0.5, 0.9])
def test_designs_are_scipys_with_unit_gain(order: int, cutoff: float) -> None:
    for stage, (b, a) in (
        (butterworth(order, cutoff), butter(order, cutoff)),
        (chebyshev(order, cutoff, 0.5), cheby1(order, 0.5, cutoff)),
    ):
        np.testing.assert_allclose(stage.b, b * a.sum() / b.sum(), rtol=1e-12)
        np.testing.assert_allclose(stage.a, a[1:])
        assert sum(stage.b) - sum(stage.a) == pytest.approx(1)
    power = abs(freqz(butterworth(order, cutoff).b, (1, *butterworth(order, cutoff).a), [math.pi * cutoff])[1][0]) ** 2
    assert power == pytest.approx(0.5, rel=1e-6)


def observe(stage: OptimalFIR, signal: np.ndarray, noise_power: float) -> tuple[float, ...]:
    statistics = stage.initial()
    for t, g in enumerate(signal):
        products = [float(g @ signal[t - tau]) for tau in range(min(t, stage.memory) + 1)]
        statistics = stage.observe(statistics, products, noise_power)
        assert len(statistics) == len(stage.initial())
    return statistics


def test_the_estimate_converges_to_the_autocorrelation() -> None:
    """A gradient <g_t, g_{t-tau}> = rho^tau ||g||^2 under noise of the given power: c_tau = rho^tau - 1/2."""
    rng = np.random.default_rng(13)
    d, rho, s = 3000, 0.9, 0.8
    signal, g = [], rng.normal(size=d)
    for _ in range(1200):
        g = rho * g + math.sqrt(1 - rho**2) * rng.normal(size=d)
        signal.append(g + s * rng.normal(size=d))
    truth = [0.5, *(max(rho**tau - 0.5, 0) for tau in range(1, 8))]
    stage = OptimalFIR(7)
    assert stage.autocorrelation(observe(stage, np.array(signal), d * s**2)) == pytest.approx(truth, abs=0.02)
    # A noise power that is 0.9 of the true one is noticed.
    assert stage.autocorrelation(observe(stage, np.array(signal), 0.9 * d * s**2)) != pytest.approx(truth, abs=0.02)


def snr(b: np.ndarray, c: np.ndarray) -> float:
    return float(c @ b / (b @ b))


def statistics_of(stage: OptimalFIR, c: np.ndarray) -> tuple[float, ...]:
    """Statistics whose estimate is c."""
    return (1e6, 1.0, *c[1:], *(0.0 for _ in c[1:]))


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=6))
def test_the_optimal_weights_maximize_the_ratio(tail: list[float]) -> None:
    c = np.array([0.5, *tail])
    n = len(c)
    optimal, paper = OptimalFIR(n - 1), OptimalFIR(n - 1, weighting="paper")
    b = np.array(optimal.weights(statistics_of(optimal, c), 100))
    plain = np.array(paper.weights(statistics_of(paper, c), 100))
    assert b == pytest.approx((c + np.linalg.norm(c) / np.sqrt(n)) / (c.sum() + np.linalg.norm(c) * np.sqrt(n)))
    assert plain == pytest.approx(c / c.sum())
    # Free coordinates b_1..b_nb, b_0 = 1 - their sum.
    found = minimize(lambda v: -snr(np.array([1 - v.sum(), *v]), c), np.full(n - 1, 1 / n), tol=1e-10)
    assert snr(b, c) == pytest.approx(-found.fun, rel=1e-6)
    assert snr(b, c) == pytest.approx((c.sum() + np.linalg.norm(c) * np.sqrt(n)) / 2)
    assert snr(b, c) >= snr(plain, c) - 1e-12


@given(st.lists(st.floats(-3, 0.5), min_size=1, max_size=6), st.sampled_from(["optimal", "paper"]))
def test_no_estimate_amplifies_the_noise(tail: list[float], weighting: str) -> None:
    """The printed c / sum c does: by 41 at (1/2, -0.4)."""
    assert snr(np.array([5.0, -4.0]), np.array([0.5, -0.4])) == pytest.approx(4.1 / 41)
    c = np.array([0.5, *tail])
    stage = OptimalFIR(len(tail), weighting)
    b = np.array(stage.weights(statistics_of(stage, c), 100))
    assert (b >= 0).all()
    assert b.sum() == pytest.approx(1)
    assert b @ b <= 1 + 1e-12
    if weighting == "paper" and min(tail) >= 0:
        assert b == pytest.approx(c / c.sum())


@pytest.mark.parametrize("weighting", ["optimal", "paper"])
def test_weights_of_the_first_steps(weighting: str) -> None:
    stage = OptimalFIR(3, weighting=weighting)
    assert stage.adaptive
    assert (stage.order, stage.memory) == (0, 3)
    c = np.array([0.5, 0.4, 0.3, 0.2])
    for statistics, step in itertools.product((stage.initial(), statistics_of(stage, c)), range(6)):
        b = stage.weights(statistics, step)
        assert len(b) == 4
        assert sum(b) == pytest.approx(1)
        assert all(value == 0 for value in b[step + 1 :])
        assert min(b) >= 0
    assert stage.weights(stage.initial(), 0) == (1.0, 0.0, 0.0, 0.0)
