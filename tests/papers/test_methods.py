"""Each method against an explicit loop written from algorithms.md, and the papers' own identities."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import lfilter

import dpcore
from dpcore import methods
from dpcore.filters import NAMED_FILTERS
from dpcore.keys import RunKeys
from dpcore.mechanism import Mechanism
from dpcore.plan import Plan
from dpcore.spec.layout import Layout
from dpcore_numpy import normal

KEY = bytes(range(32))
N, D, T = 40, 7, 25
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(N, D))
TARGETS = FEATURES @ rng.normal(size=D) + rng.normal(size=N)
START = rng.normal(size=D)
BATCHES = [np.sort(rng.choice(N, size=rng.integers(0, 12), replace=False)) for _ in range(T)]
FULL = [np.arange(N)] * T


def gradient(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Of logistic-like losses log cosh(a.x - y): smooth and not quadratic, so that both points matter."""
    a = FEATURES[indices]
    return np.tanh(a @ x - TARGETS[indices])[:, None] * a


def quadratic_gradient(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    a = FEATURES[indices]
    return (a @ x - TARGETS[indices])[:, None] * a


def clip_one(v: np.ndarray, c: float, rule: str) -> np.ndarray:
    norm = math.sqrt(math.fsum(v * v))
    if rule == "standard":
        return v * min(1, c / norm)
    if rule == "automatic":
        return v * c / (norm + 0.01)
    if rule == "automatic_v":
        return v * c / norm
    return v / c * min(1, c / norm)


def slow_run(query, smooth, move, *, clip: float, rule: str, sigma: float, batch_size: float) -> np.ndarray:
    """algorithms.md section 1 as a loop: query, clip, sum, noise, average, filter, update."""
    x, d, path = START.copy(), np.zeros(D), [START.copy()]
    for t, batch in enumerate(BATCHES):
        total = np.zeros(D)
        for i in batch:
            total += clip_one(query(t, x, d, np.array([i])), clip, rule)
        sensitivity = 1.0 if rule == "normalized" else clip
        z = normal(KEY, t, 0, 0, D, dtype="float64")
        g = smooth(t, (total + sigma * sensitivity * z) / batch_size)
        moved = move(t, x, g)
        x, d = moved, moved - x
        path.append(x.copy())
    return np.stack(path)


def plain(t, x, d, i):
    return gradient(x, i)[0]


def sgd(lr: float):
    return lambda t, x, g: x - lr * g


def run(method: dpcore.Method, batches=BATCHES, grad=gradient, dtype=np.float64) -> np.ndarray:
    result = dpcore.minimize(grad, START.astype(dtype), batches, method, key=KEY, exact_key=True, record=True)
    return result.path


@pytest.mark.parametrize("rule", ["standard", "automatic", "automatic_v", "normalized"])
def test_dp_sgd_is_its_loop(rule: str) -> None:
    expected = slow_run(plain, lambda t, g: g, sgd(0.3), clip=0.7, rule=rule, sigma=0.5, batch_size=6)
    method = methods.dp_sgd(lr=0.3, max_grad_norm=0.7, clipping=rule, noise_multiplier=0.5, batch_size=6)
    np.testing.assert_allclose(run(method), expected, rtol=1e-10)


@pytest.mark.parametrize("name", NAMED_FILTERS)
def test_doppler_is_scipys_filter_between_noise_and_update(name: str) -> None:
    b, a = NAMED_FILTERS[name]
    released: list[np.ndarray] = []

    def smooth(t, g):
        released.append(g)
        ones = lfilter(b, (1.0, *a), np.ones(t + 1))[-1]
        return lfilter(b, (1.0, *a), np.stack(released), axis=0)[-1] / ones

    batch_size = max(map(len, BATCHES))
    expected = slow_run(plain, smooth, sgd(0.3), clip=0.7, rule="standard", sigma=0.5, batch_size=batch_size)
    method = methods.doppler(lr=0.3, filter=name, max_grad_norm=0.7, noise_multiplier=0.5)
    np.testing.assert_allclose(run(method), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.3, 1.0), (0.5, 1.0), (0.6, -1.0), (1.0, 0.5)])
def test_disk_is_its_loop(kappa: float, gamma: float) -> None:
    w = (1 - kappa) / (kappa * gamma)
    average: list[np.ndarray] = []

    def query(t, x, d, i):
        return w * gradient(x + gamma * d, i)[0] + (1 - w) * gradient(x, i)[0]

    def smooth(t, g):
        average.append(g if t == 0 else (1 - kappa) * average[-1] + kappa * g)
        return average[-1]

    batch_size = max(map(len, BATCHES))
    expected = slow_run(query, smooth, sgd(0.3), clip=1.0, rule="automatic", sigma=0.5, batch_size=batch_size)
    method = methods.disk(lr=0.3, kappa=kappa, gamma=gamma, noise_multiplier=0.5)
    np.testing.assert_allclose(run(method), expected, rtol=1e-9, atol=1e-12)


def test_disk_at_gamma_minus_one_is_storm() -> None:
    """g~_t = grad(x_t; B_t) + (1 - alpha)(g~_{t-1} - grad(x_{t-1}; B_t)), alpha = kappa (Cutkosky and Orabona 2019)."""
    kappa, lr, size = 0.4, 0.05, 8
    batches = [np.sort(rng.choice(N, size=size, replace=False)) for _ in range(T)]
    method = methods.disk(lr=lr, kappa=kappa, gamma=-1.0, clipping="standard", max_grad_norm=1e6, noise_multiplier=0.0)
    x, previous, estimate, path = START.copy(), None, None, [START.copy()]
    for batch in batches:
        now = gradient(x, batch).mean(axis=0)
        if estimate is None:
            estimate = now
        else:
            estimate = now + (1 - kappa) * (estimate - gradient(previous, batch).mean(axis=0))
        previous, x = x, x - lr * estimate
        path.append(x.copy())
    np.testing.assert_allclose(run(method, batches), np.stack(path), rtol=1e-9, atol=1e-12)


@given(st.floats(0.05, 1.0), st.floats(-2, 2).filter(lambda g: abs(g) > 0.05))
@settings(max_examples=15)
def test_disk_on_a_full_batch_quadratic_is_gradient_descent(kappa: float, gamma: float) -> None:
    method = methods.disk(
        lr=0.02, kappa=kappa, gamma=gamma, clipping="standard", max_grad_norm=1e9, noise_multiplier=0.0
    )
    x, path = START.copy(), [START.copy()]
    for _ in range(T):
        x = x - 0.02 * quadratic_gradient(x, np.arange(N)).mean(axis=0)
        path.append(x.copy())
    np.testing.assert_allclose(run(method, FULL, quadratic_gradient), np.stack(path), rtol=1e-6, atol=1e-8)


def test_disk_at_kappa_one_is_its_base() -> None:
    common = {"lr": 0.1, "clipping": "automatic", "noise_multiplier": 0.8}
    disk, base = methods.disk(kappa=1.0, gamma=0.3, **common), methods.dp_sgd(**common)
    assert run(disk).tobytes() == run(base).tobytes()


def test_one_point_disk_is_doppler_apart_from_the_start() -> None:
    """Averaging differs from the low-pass filter a = -(1-kappa), b = kappa in how it starts, and in nothing else."""
    kappa = 0.7
    ours = dpcore.Method(
        update=dpcore.updates.SGD(0.1),
        filter=dpcore.filters.Averaging(kappa),
        noise=dpcore.noise.IndependentGaussian(0),
    )
    signal = gradient(START, np.arange(N))
    average, low_pass = signal[0], np.zeros(D)
    weight = 0.0
    for g in signal:
        average, low_pass = (1 - kappa) * average + kappa * g, (1 - kappa) * low_pass + kappa * g
        weight = (1 - kappa) * weight + kappa
    np.testing.assert_allclose(average - low_pass, (1 - weight) * signal[0], atol=1e-12)
    (low_pass_coefficients,) = dpcore.filters.LowPass(b=[kappa], a=[kappa - 1]).coefficients(5)
    assert ours.filter.coefficients(5) == (low_pass_coefficients._replace(normalizer=1.0),)


def test_dp_adam_without_noise_and_clipping_is_torchs_adam() -> None:
    torch = pytest.importorskip("torch")
    method = methods.dp_adam(lr=0.05, betas=(0.8, 0.95), eps=1e-7, max_grad_norm=1e9, noise_multiplier=0.0)
    x = torch.tensor(START, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.05, betas=(0.8, 0.95), eps=1e-7)
    path = [START.copy()]
    for _ in range(T):
        x.grad = torch.tensor(gradient(x.detach().numpy(), np.arange(N)).mean(axis=0))
        optimizer.step()
        path.append(x.detach().numpy().copy())
    np.testing.assert_allclose(run(method, FULL), np.stack(path), rtol=1e-9, atol=1e-11)


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


@pytest.mark.parametrize("clipping", ["standard", "normalized"])
@pytest.mark.parametrize("groups", ["flat", "per_tensor"])
def test_injected_noise_is_sigma_times_the_sensitivity_over_the_batch_size(clipping: str, groups: str) -> None:
    """Through the whole mechanism, on an empty batch; a planted factor of 0.9 is rejected."""
    sizes, sigma, c, batch_size = (40_000, 60_000), 1.3, 2.0, 20
    method = methods.dp_sgd(lr=1.0, max_grad_norm=c, clipping=clipping, clipping_groups=groups, noise_multiplier=sigma)
    sampler = dpcore.sampling.PoissonSampler(dataset_size=100, batch_size=batch_size)
    plan = Plan(method, sampler, 1, ("a", "b"))
    x = [np.zeros(size, np.float32) for size in sizes]
    layout = Layout.of([("a", (sizes[0],)), ("b", (sizes[1],))])
    mechanism = Mechanism(plan, layout, x, backend=dpcore.config.load_backend("numpy"), keys=RunKeys.new(KEY))
    mechanism.release(x)
    sensitivity = {"standard": c, "normalized": 1.0 if groups == "flat" else math.sqrt(2)}[clipping]
    ratio = np.concatenate(x).std() / (sigma * sensitivity / batch_size)
    tolerance = 5 / math.sqrt(2 * sum(sizes))
    assert abs(ratio - 1) < tolerance
    assert abs(0.9 * ratio - 1) > tolerance
