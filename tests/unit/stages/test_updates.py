"""Update rules against torch's own optimizers."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import dpcore
from dpcore.sampling import FixedOrderSampler
from dpcore.spec.ops import SECOND_MOMENT, UPDATE_RULES, UpdateSettings
from dpcore.stages.updates import SGD, AdaGrad, Adam, AdamW, Momentum, Nesterov, Update
from dpcore.stages.updates.averaging import UniformAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import Doubling
from dpcore_numpy import update

CASES = [
    (SGD(0.1), "SGD", {}),
    (SGD(0.1, weight_decay=0.3), "SGD", {"weight_decay": 0.3}),
    (Momentum(0.1, 0.8), "SGD", {"momentum": 0.8}),
    (Momentum(0.1, 0.8, 0.2), "SGD", {"momentum": 0.8, "weight_decay": 0.2}),
    (Nesterov(0.1), "SGD", {"momentum": 0.9, "nesterov": True}),
    (Nesterov(0.1, 0.8, 0.2), "SGD", {"momentum": 0.8, "weight_decay": 0.2, "nesterov": True}),
    (Adam(0.01), "Adam", {}),
    (Adam(0.01, (0.5, 0.9), 1e-3, 0.1), "Adam", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    (AdamW(0.01), "AdamW", {"weight_decay": 0.01}),
    (AdamW(0.01, (0.5, 0.9), 1e-3, 0.4), "AdamW", {"betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.4}),
    (AdaGrad(0.1, 1e-10), "Adagrad", {}),
    (AdaGrad(0.1, 1e-2, 0.3), "Adagrad", {"eps": 1e-2, "weight_decay": 0.3}),
    (AdaGrad(0.1), "Adagrad", {"eps": 0.0}),
]


@pytest.mark.parametrize(("rule", "name", "settings"), CASES, ids=str)
def test_twenty_steps_are_torchs(rule: Update, name: str, settings: dict) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.normal(size=17)
    parameter = torch.tensor(x, requires_grad=True)
    optimizer = getattr(torch.optim, name)([parameter], lr=rule.settings().learning_rate, **settings)
    moments = [np.zeros_like(x) for _ in range(UPDATE_RULES[rule.rule])]
    for step in range(20):
        gradient = rng.normal(size=17) * 10.0 ** rng.integers(-3, 3)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        update(rule.rule, x, gradient, moments, rule.settings(), step + 1)
        np.testing.assert_allclose(x, parameter.detach().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("rule", sorted(SECOND_MOMENT))
@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_the_denominator_coordinate_by_coordinate(rule: str, eps: float) -> None:
    """Bias, floor and a given square against a loop; v below the bias, at the floor, and negative."""
    settings = UpdateSettings(0.3, 0.0, 0.9, 0.99, eps, bias=0.5, floor=0.25)
    square = np.array([-1.0, 0.0, 0.5, 0.55, 0.5625, 0.6, 4.0])
    x, g = np.ones(7), np.linspace(-1, 2, 7)
    moments = [np.zeros(7) for _ in range(UPDATE_RULES[rule])]
    update(rule, x, g, moments, settings, 1, square)
    # After one step the corrected averages are g and the square themselves.
    for i, (u, numerator) in enumerate(zip(square, g, strict=True)):
        denominator = math.sqrt(max(u - 0.5, 0.25**2)) + eps
        assert x[i] == pytest.approx(1 - 0.3 * numerator / denominator, rel=1e-12)


# Averages of the parameters over time.


def run(average, points: np.ndarray) -> np.ndarray:
    kept = np.zeros_like(points[0])
    for step, x in enumerate(points):
        kept = kept + average.weight(step) * (x - kept)
    return kept


@given(st.integers(0, 12), st.integers(1, 30))
def test_the_uniform_average_is_the_mean_after_start(start: int, steps: int) -> None:
    points = np.random.default_rng(1).normal(size=(steps, 3))
    expected = points[start:].mean(axis=0) if steps > start else points[-1]
    np.testing.assert_allclose(run(UniformAverage(start), points), expected, rtol=1e-9, atol=1e-12)


# The rate found in the releases.


def found(schedule: Doubling, gradient: Any, noise: np.ndarray, s: float) -> np.ndarray:
    """Parameters after dpcore's run from 0; `s` is the noise's deviation in a coordinate, the clip norm 10."""
    batches = FixedOrderSampler(dataset_size=4, batch_size=4, shuffle=False)
    method = dpcore.methods.dp_sgd(schedule=schedule, max_grad_norm=10.0, noise_multiplier=4 * s / 10)
    steps, d = noise.shape
    of_each = lambda x, indices: np.tile(gradient(x), (len(indices), 1))  # noqa: E731
    return dpcore.minimize(of_each, np.zeros(d), batches, method, steps=steps, noise=noise).x


@pytest.mark.parametrize("seed", range(3))
def test_the_rate_is_that_of_the_loop(seed: int) -> None:
    """From the docstring's equations; the run is long enough for changes in both directions and for the decay."""
    rng = np.random.default_rng(seed)
    steps, d, s = 60, 12, 0.05
    c, a, z = np.geomspace(1, 0.1, d), rng.normal(size=d) / 4, rng.normal(size=(steps, d))
    x, y, rate, evidence, variance, changes = np.zeros(d), np.zeros(d), 0.0, 0.0, 0.0, set()
    for t in range(steps):
        g = c * (x - a) + s * z[t]
        if t == 0:
            rate = 0.1 / np.sqrt(steps) / np.linalg.norm(g)
        elif t < 30:
            evidence, variance = evidence + g @ (x - y), variance + s**2 * (x - y) @ (x - y)
            if abs(evidence) > 2 * np.sqrt(variance):
                changes.add(np.sign(evidence))
                rate *= 2 if evidence < 0 else 0.5 ** (1 / 3)
                y, evidence, variance = x, 0.0, 0.0
        x = x - rate * min(1, (60 - t) / 30) * g
    assert changes == {-1, 1}
    np.testing.assert_allclose(found(Doubling(), lambda x: c * (x - a), z, s), x, rtol=1e-6, atol=1e-8)


def test_the_evidence_of_noise_alone_has_the_variance_it_is_compared_with() -> None:
    last: list[Any] = []

    class Seen(Doubling):
        def observe(self, *given: Any) -> tuple[float, ...]:
            last[:] = super().observe(*given)
            return tuple(last)

    rng, scores = np.random.default_rng(0), []
    for _ in range(60):
        found(Seen(confidence=1e9), np.zeros_like, rng.normal(size=(30, 50)), 0.2)
        scores.append(last[1] / math.sqrt(last[2]))
    mean, square = float(np.mean(scores)), float(np.mean(np.square(scores)))
    assert abs(mean) < 4 / math.sqrt(60)
    assert stats.chi2.ppf(1e-5, 60) < 60 * square < stats.chi2.ppf(1 - 1e-5, 60)


@pytest.mark.parametrize("product", [math.nan, math.inf, -math.inf])
def test_a_diverged_run_keeps_a_state_that_can_be_saved(product: float) -> None:
    schedule, statistics = Doubling(), (1e100, 1.0, 1.0)
    for variance in (1.0, math.inf):
        assert np.isfinite(schedule.observe(statistics, product, variance)).all()
    assert schedule.begin(math.inf, 10) == schedule.begin(0.0, 10) == schedule.initial()


# The projection of GaLore.


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_columns_span_the_leading_left_singular_space(dtype, rng) -> None:
    gradient = rng.normal(size=(8, 5)).astype(dtype)
    p = GaLore(3).projection(gradient)
    assert p.dtype == dtype
    assert p.shape == (8, 3)
    np.testing.assert_allclose(p.T @ p, np.eye(3), atol=1e-6)
    values, vectors = np.linalg.eigh(gradient.astype(np.float64) @ gradient.astype(np.float64).T)
    leading = vectors[:, np.argsort(values)[::-1][:3]]
    np.testing.assert_allclose(p @ p.T, leading @ leading.T, atol=1e-5)


def test_fewer_columns_than_the_rank_leave_columns_of_zeros(rng) -> None:
    p = GaLore(3).projection(rng.normal(size=(8, 2)))
    assert p.shape == (8, 3)
    assert (p[:, 2] == 0).all()
    np.testing.assert_allclose(p[:, :2].T @ p[:, :2], np.eye(2), atol=1e-12)


def test_a_gradient_that_is_not_finite_has_a_projection(rng) -> None:
    gradient = rng.normal(size=(4, 4))
    gradient[1, 2] = np.inf
    np.testing.assert_array_equal(GaLore(2).projection(gradient), np.eye(4, 2))


@pytest.mark.parametrize("shape", [(8, 5), (8, 2)])
def test_a_refresh_keeps_the_basis_as_far_as_it_can(shape: tuple[int, int], rng) -> None:
    """The same subspace under other signs, another order or rotation gives the old basis; a moved one the nearest."""
    galore = GaLore(3)
    gradient = rng.normal(size=shape)
    old = galore.projection(gradient)
    spread = np.diag(rng.uniform(0.5, 2, 3)) @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
    for values in (old, old[:, ::-1] * 2.0 ** np.arange(3), -old, old @ spread):
        if shape[1] == 5:
            again = galore.projection(values @ rng.normal(size=(3, 5)), old)
            np.testing.assert_allclose(again, old, atol=1e-12)
    moved = galore.projection(gradient + 0.3 * rng.normal(size=shape), old)
    count = min(3, shape[1])
    assert (moved[:, count:] == 0).all()
    np.testing.assert_allclose(moved.T @ moved, np.diag(np.arange(3) < count), atol=1e-12)
    for _ in range(50):
        turn = np.linalg.qr(rng.normal(size=(count, count)))[0]
        assert np.linalg.norm(moved - old) <= np.linalg.norm(moved[:, :count] @ turn - old[:, :count]) + 1e-12


def test_only_matrices_of_more_rows_than_the_rank_are_projected() -> None:
    galore = GaLore(4)
    assert galore.projects((5, 2))
    assert not any(map(galore.projects, [(4, 9), (9,), (9, 0), (9, 2, 2), ()]))
