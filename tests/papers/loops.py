"""algorithms.md section 1 as a loop over single examples in plain NumPy; only the normals come from the package.

What a method does is said by three functions of its test: the query, the filter and the update.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

import dpcore
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.stages.strategies import BLT, NamedStrategy
from dpcore_numpy import normal

KEY = bytes(range(32))
N, D, T = 40, 7, 13
rng = np.random.default_rng(0)
FEATURES = rng.normal(size=(N, D))
TARGETS = FEATURES @ rng.normal(size=D) + rng.normal(size=N)
START = rng.normal(size=D)
# No batch or example is like another; one batch is empty, and none is as large as the denominator SIZE.
BATCHES = [np.sort(rng.choice(N, size=rng.integers(1, 11), replace=False)) for _ in range(T)]
BATCHES[4] = np.arange(0)
SIZE = 12

Array = np.ndarray
Query = Callable[[int, Sequence[Array], int], Array]
Smooth = Callable[[int, Array], Array]


def gradient(x: Array, indices: Array) -> Array:
    """Of losses log cosh(a.x - y): smooth and not quadratic, so that every point matters."""
    a = FEATURES[indices]
    return np.tanh(a @ x - TARGETS[indices])[:, None] * a


def of(x: Array, i: int) -> Array:
    """The gradient of one example."""
    return gradient(x, np.array([i]))[0]


def clip_one(v: Array, c: float, rule: str) -> Array:
    norm = math.sqrt(math.fsum(v * v))
    if rule == "standard":
        return v * min(1, c / norm) if norm else v
    if rule == "automatic":
        return v * c / (norm + 0.01)
    if rule == "psac":
        return v * c / (norm + 0.1 / (norm + 0.1))
    if rule == "automatic_v":
        return v * c / norm if norm else v
    return v / c * min(1, c / norm) if norm else v


def seed_noise(steps: int = T, stream: int = 0, d: int = D) -> Array:
    """Z, one row a step."""
    return np.stack([normal(KEY, t, stream, 0, d) for t in range(steps)])


def correlated(c: Array | None, stream: int = 0) -> Array:
    """C^{-1} Z by solving the system, with the largest column norm of C scaled to 1."""
    z = seed_noise(stream=stream)
    return z if c is None else np.linalg.solve(c / np.sqrt((c**2).sum(axis=0).max()), z)


def plain(t: int, points: Sequence[Array], i: int) -> Array:
    return of(points[-1], i)


def window(k: int, beta: float, inner: Query = plain, *, normalized: bool = True) -> Query:
    """DP-PMLF's window over the last k parameters."""

    def query(t: int, points: Sequence[Array], i: int) -> Array:
        count = min(k, t + 1)
        c = sum(beta**j for j in range(count)) if normalized else 1.0
        return sum(beta**j / c * inner(t - j, points[: t - j + 1], i) for j in range(count))

    return query


def two_points(gain: Callable[[int], float], gamma: float) -> Query:
    """DiSK: v = w grad(x + gamma d) + (1 - w) grad(x), w = (1 - k) / (k gamma), the plain gradient at first."""

    def query(t: int, points: Sequence[Array], i: int) -> Array:
        k, x = gain(t), points[-1]
        d = points[-1] - points[-2] if t else np.zeros(D)
        w = (1 - k) / (k * gamma) if t else 0.0
        return w * of(x + gamma * d, i) + (1 - w) * of(x, i)

    return query


def difference(c: Callable[[int], float], inner: Query = plain) -> Query:
    """DP-SRG-MEMF's query: what changed since the last step, with c_t of it taken off."""

    def query(t: int, points: Sequence[Array], i: int) -> Array:
        return inner(t, points, i) - (c(t) * inner(t - 1, points[:-1], i) if t else 0.0)

    return query


def averaging(gain: Callable[[int], float], then: Smooth | None = None) -> Smooth:
    """DiSK's average, which begins with the first gradient."""
    kept: list[Array] = []

    def smooth(t: int, g: Array) -> Array:
        k = gain(t)
        kept.append(g if t == 0 else (1 - k) * kept[-1] + k * g)
        return kept[-1] if then is None else then(t, kept[-1])

    return smooth


def accumulation(c: Callable[[int], float]) -> Smooth:
    """The sum of differences, which undoes `difference`."""
    kept = np.zeros(D)

    def smooth(t: int, g: Array) -> Array:
        nonlocal kept
        kept = (c(t) if t else 0.0) * kept + g
        return kept

    return smooth


def always(value: float) -> Callable[[int], float]:
    return lambda t: value


def as_it_is(t: int, g: Array) -> Array:
    return g


def sgd(lr: float) -> Callable[..., Array]:
    return lambda t, x, g, y, clean: x - lr * y


def heavy_ball(lr: float, momentum: float) -> Callable[..., Array]:
    m = np.zeros(D)

    def move(t: int, x: Array, g: Array, y: Array, clean: Array) -> Array:
        nonlocal m
        m = momentum * m + y
        return x - lr * m

    return move


class AdamLoop:
    """Adam and AdamW on the filtered gradient, as their papers print them."""

    def __init__(self, lr: float, b1: float, b2: float, eps: float = 1e-3, decoupled_decay: float = 0.0) -> None:
        self.m, self.v, self.nuhat = np.zeros(D), np.zeros(D), np.zeros(D)
        self.lr, self.b1, self.b2, self.eps, self.wd = lr, b1, b2, eps, decoupled_decay

    def __call__(self, t: int, x: Array, g: Array, y: Array, clean: Array) -> Array:
        self.m, self.v = self.b1 * self.m + (1 - self.b1) * y, self.b2 * self.v + (1 - self.b2) * y**2
        self.nuhat = self.v / (1 - self.b2 ** (t + 1))
        step = self.m / (1 - self.b1 ** (t + 1)) / (np.sqrt(self.nuhat) + self.eps)
        return x - self.lr * step - self.lr * self.wd * x


def low_pass(b: Sequence[float], a: Sequence[float]) -> Smooth:
    """DOPPLER's recurrence and its normalizer, as algorithms.md 3 prints them."""
    g_all: list[Array] = []
    m_all: list[Array] = []
    c_all: list[float] = []

    def smooth(t: int, g: Array) -> Array:
        g_all.append(g)
        m, c = np.zeros_like(g), 0.0
        for r, value in enumerate(b):
            if t - r >= 0:
                m = m + value * g_all[t - r]
                c += value
        for r, value in enumerate(a, start=1):
            if t - r >= 0:
                m = m - value * m_all[t - r]
                c -= value * c_all[t - r]
        m_all.append(m)
        c_all.append(c)
        return m / c

    return smooth


def loop(
    query: Callable[..., Array] = plain,
    smooth: Callable[[int, Array], Array] = as_it_is,
    move: Callable[..., Array] | None = None,
    *,
    clip: float | Callable[[int], float] = 0.7,
    rule: str = "standard",
    sigma: float = 0.5,
    share: float = 1.0,
    size: float = SIZE,
    strategy: Array | None = None,
    scale: Callable[[int], Array] | None = None,
    batches: Sequence[Array] = BATCHES,
) -> Array:
    """Query, scale, clip, sum, noise, average, unscale, filter, update. Returns x_0 .. x_T.

    ``query(t, points, i)`` sees x_0 .. x_t; ``move(t, x, g, y, clean)`` the released average, the filter's output and
    the clipped average without noise. `share` multiplies the noise of the gradient.
    """
    move = sgd(0.3) if move is None else move
    noise = correlated(strategy)
    points = [START.copy()]
    for t, batch in enumerate(batches):
        w = np.ones(D) if scale is None else scale(t)
        c = clip(t) if callable(clip) else clip
        total = np.zeros(D)
        for i in batch:
            total = total + clip_one(w * query(t, points, i), c, rule)
        sensitivity = 1.0 if rule == "normalized" else c
        g = (total + share * sigma * sensitivity * noise[t]) / size / w
        y = smooth(t, g)
        points.append(move(t, points[-1], g, y, total / size))
    return np.stack(points)


def run(method: dpcore.Method, batches=BATCHES, grad=gradient, dtype=np.float64, **arguments) -> Array:
    """The package's run: x_0 .. x_T."""
    path = dpcore.minimize(
        grad, START.astype(dtype), batches, method, key=KEY, exact_key=True, record=True, **arguments
    ).path
    assert path is not None
    return path


def mechanism_of(method: dpcore.Method, sampler, tensors: dict[str, Array], steps: int, key: bytes = KEY) -> Mechanism:
    """The mechanism below `minimize`, over named tensors."""
    plan, layout = Plan(method, sampler, steps, tuple(tensors)), Layout.of([(k, x.shape) for k, x in tensors.items()])
    keys = RunKeys.new(key, exact_key=True)
    return Mechanism(plan, layout, list(tensors.values()), backend=load_backend("numpy"), keys=keys)


def strategy_and_matrix(name: str | None):
    """What the method is given, and the matrix of the loop; None is independent noise."""
    return (None, None) if name is None else (given(name), STRATEGIES[name])


def assert_same(got: Array, expected: Array, rtol: float = 1e-6, atol: float = 1e-8) -> None:
    assert np.isfinite(expected).all()
    assert np.abs(np.diff(expected, axis=0)).max() > 1e-3  # it moved at all
    np.testing.assert_allclose(got, expected, rtol=rtol, atol=atol)


# Strategies, each written down by itself.


def dense_matrix(steps: int = T) -> Array:
    c = np.tril(np.random.default_rng(5).uniform(0.05, 0.5, (steps, steps)))
    np.fill_diagonal(c, 1.0)
    return c


def banded_matrix(steps: int = T, bands: int = 3) -> Array:
    c = np.tril(np.random.default_rng(6).uniform(0.1, 0.6, (steps, steps)))
    c[np.subtract.outer(np.arange(steps), np.arange(steps)) >= bands] = 0
    np.fill_diagonal(c, 1.0)
    return c


def tree_matrix(steps: int = T) -> Array:
    """Row t (from 1) marks (t - lowbit(t), t]."""
    c = np.zeros((steps, steps))
    for t in range(1, steps + 1):
        c[t - 1, t - (t & -t) : t] = 1
    return c


def square_root_matrix(steps: int = T) -> Array:
    """The Toeplitz square root of the ones matrix: coefficients binom(2k, k) / 4^k."""
    return toeplitz([math.comb(2 * k, k) / 4**k for k in range(steps)])


def toeplitz(series: Sequence[float]) -> Array:
    steps = len(series)
    return np.array([[series[i - j] if i >= j else 0.0 for j in range(steps)] for i in range(steps)])


def blt_matrix(steps: int = T) -> Array:
    """c_0 = 1, c_k = sum_j w_j u_j^(k-1)."""
    return toeplitz([1.0] + [0.4 * 0.9**k + 0.1 * 0.3**k for k in range(steps - 1)])


def banded_inverse_matrix(steps: int = T, bands: int = 4) -> Array:
    """C^{-1} is the Toeplitz matrix of the first 4 coefficients of sqrt(1 - x)."""
    series = [1.0]
    for k in range(1, steps):
        series.append(series[-1] * (k - 1.5) / k if k < bands else 0.0)
    return np.linalg.inv(toeplitz(series))


STRATEGIES = {
    "identity": np.eye(T),
    "tree": tree_matrix(),
    "square-root": square_root_matrix(),
    "dense": dense_matrix(),
    "banded": banded_matrix(),
    "blt": blt_matrix(),
    "banded inverse": banded_inverse_matrix(),
}


def given(name: str):
    """What the method is given as its strategy."""
    if name == "blt":
        return BLT([0.4, 0.1], [0.9, 0.3], T)
    if name == "banded inverse":
        return NamedStrategy("banded-inverse-square-root", bands=4)
    return STRATEGIES[name] if name in ("dense", "banded") else name
