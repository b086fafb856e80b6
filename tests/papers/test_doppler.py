"""DOPPLER (algorithms.md 3) against loops: over SGD and Adam, bias-corrected, in GaLore's subspaces, optimal FIR."""

import math

import numpy as np
import pytest

from loops import (  # isort: skip
    BATCHES, KEY, SIZE, START, D, N, T, assert_same, clip_one, gradient, loop, low_pass, mechanism_of, run
)  # fmt: skip
from scipy.linalg import polar
from scipy.signal import lfilter

import dpcore
from dpcore import methods
from dpcore.errors import ArgumentError
from dpcore.sampling import FixedBatches
from dpcore.stages.filters import NAMED_FILTERS, OptimalFIR
from dpcore.stages.updates.galore import GaLore
from dpcore_numpy import normal

COMMON = {"max_grad_norm": 0.7, "noise_multiplier": 0.5, "batch_size": SIZE}
S = 0.5 * 0.7 / SIZE  # the standard deviation of the noise in a released average


@pytest.mark.parametrize("name", NAMED_FILTERS)
def test_doppler_is_scipys_filter_between_noise_and_update(name: str) -> None:
    b, a = NAMED_FILTERS[name]
    released: list[np.ndarray] = []

    def smooth(t, g):
        released.append(g)
        ones = lfilter(b, (1.0, *a), np.ones(t + 1))[-1]
        return lfilter(b, (1.0, *a), np.stack(released), axis=0)[-1] / ones

    assert_same(run(methods.doppler(lr=0.3, filter=name, **COMMON)), loop(smooth=smooth))


def adam_on_released(lr: float, beta: float, eps: float, bias: float, wd: float = 0.0, decoupled: bool = False):
    v = 0.0

    def move(t, x, g, y, clean):
        nonlocal v
        v = beta * v + (1 - beta) * g**2
        vhat = v / (1 - beta ** (t + 1))
        if decoupled:
            x = x - lr * wd * x
        else:
            y = y + wd * x
        return x - lr * y / np.sqrt(np.maximum(vhat - bias, eps**2))

    return move


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("base", ["adam", "adamw"])
def test_doppler_with_adam_is_its_loop(base: str, corrected: bool) -> None:
    """The filter replaces the first moment; the second is that of the released gradient; max(sqrt, eps)."""
    b, a = NAMED_FILTERS["second-order"]
    method = methods.doppler(
        lr=0.1, filter="second-order", base=base, betas=(0.0, 0.9), eps=0.02, weight_decay=0.1,
        bias_corrected=corrected, **COMMON,
    )  # fmt: skip
    move = adam_on_released(0.1, 0.9, 0.02, S**2 if corrected else 0.0, 0.1, base == "adamw")
    assert_same(run(method), loop(smooth=low_pass(b, a), move=move))


@pytest.mark.parametrize("weighting", ["optimal", "paper"])
@pytest.mark.parametrize("nb", [1, 3])
def test_optimal_fir_is_its_loop(weighting: str, nb: int) -> None:
    """chat as algorithms.md 3 prints it, from means over all released averages so far."""
    released: list[np.ndarray] = []

    def smooth(t, g):
        released.append(g)
        power = D * S**2
        clean = [max(float(h @ h) - power, 0.0) for h in released]
        mean_power = np.mean([max(float(h @ h) - power, 1e-3) for h in released])
        c = [0.5]
        for tau in range(1, min(t, nb) + 1):
            products = [float(released[r] @ released[r - tau]) - clean[r - tau] / 2 for r in range(tau, t + 1)]
            c.append(max(0.0, np.mean(products)) / mean_power)
        c = np.array(c)
        b = c if weighting == "paper" else c + math.sqrt((c**2).sum()) / math.sqrt(len(c))
        b = b / b.sum()
        return sum(b[tau] * released[t - tau] for tau in range(len(b)))

    method = methods.doppler(lr=0.3, filter=OptimalFIR(nb, weighting), **COMMON)
    assert_same(run(method), loop(smooth=smooth), rtol=1e-6, atol=1e-8)


def test_optimal_fir_under_adam_uses_the_released_second_moment() -> None:
    method = methods.doppler(
        lr=0.1, filter=OptimalFIR(2), base="adam", betas=(0.0, 0.9), eps=0.02, bias_corrected=True, **COMMON
    )
    released = dpcore.minimize(gradient, START, BATCHES, method, key=KEY, exact_key=True, record_gradients=True)
    x, v = START.copy(), 0.0
    for t in range(T):
        v = 0.9 * v + 0.1 * released.gradients[t] ** 2
        x = x - 0.1 * released.filtered[t] / np.sqrt(np.maximum(v / (1 - 0.9 ** (t + 1)) - S**2, 0.02**2))
    np.testing.assert_allclose(released.x, x, rtol=1e-9)


M, COLUMNS, RANK, EVERY = 6, 4, 2, 3
VALUES = np.random.default_rng(1).normal(size=(N, M * COLUMNS + 5))


def two_tensors(x: np.ndarray, i: int) -> np.ndarray:
    """A gradient over the matrix and the vector together."""
    return np.tanh(VALUES[i] @ x) * VALUES[i] + 0.1 * np.sin(3 * x + i)


def layout_normals(t: int) -> np.ndarray:
    """The vector begins at the next multiple of 4096."""
    parts = (normal(KEY, t, 0, 0, M * COLUMNS), normal(KEY, t, 0, 4096, 5))
    return np.concatenate(parts)


def run_mechanism(method: dpcore.Method, start: np.ndarray) -> np.ndarray:
    x = [start[: M * COLUMNS].reshape(M, COLUMNS).copy(), start[M * COLUMNS :].copy()]
    mechanism = mechanism_of(method, FixedBatches(BATCHES, batch_size=SIZE), {"w": x[0], "b": x[1]}, T)
    path = [start]
    for batch in BATCHES:
        flat = np.concatenate([p.reshape(-1) for p in x])
        rows = np.stack([two_tensors(flat, i) for i in batch]) if len(batch) else np.zeros((0, flat.size))
        mechanism.add([np.ascontiguousarray(rows[:, : M * COLUMNS]), np.ascontiguousarray(rows[:, M * COLUMNS :])])
        mechanism.release(x)
        path.append(np.concatenate([p.reshape(-1) for p in x]))
    return np.stack(path)


@pytest.mark.parametrize("base", ["sgd", "adam", "adamw", "corrected"])
def test_galore_is_its_loop(base: str) -> None:
    """Algorithm 3 with all its switches: P of the matrix's released gradient every 3 steps, states kept in between."""
    b, a = NAMED_FILTERS["first-order v2"]
    lr, wd, beta, eps = 0.2, 0.05, 0.8, 0.02
    smooth_w, smooth_b = low_pass(b, a), low_pass(b, a)
    start = np.random.default_rng(2).normal(size=M * COLUMNS + 5)
    x, path, v_w, v_b, p = start.copy(), [start.copy()], 0.0, 0.0, None
    bias = S**2 if base == "corrected" else 0.0
    for t, batch in enumerate(BATCHES):
        total = np.zeros(x.size)
        for i in batch:
            total = total + clip_one(two_tensors(x, i), 0.7, "standard")
        g = (total + 0.5 * 0.7 * layout_normals(t)) / SIZE
        g_w, g_b = g[: M * COLUMNS].reshape(M, COLUMNS), g[M * COLUMNS :]
        if t % EVERY == 0:
            values, vectors = np.linalg.eigh(g_w @ g_w.T)  # the left singular vectors, up to their signs,
            u = vectors[:, np.argsort(values)[::-1][:RANK]]
            # which are a convention at first, read off NumPy's; then the basis nearest to the last one is taken.
            near = (
                np.diag((u * np.linalg.svd(g_w, full_matrices=False)[0][:, :RANK]).sum(axis=0)) if t == 0 else u.T @ p
            )
            p = u @ polar(near)[0]
        w, bb = x[: M * COLUMNS].reshape(M, COLUMNS), x[M * COLUMNS :]
        low = p.T @ g_w
        y_w, y_b = smooth_w(t, low), smooth_b(t, g_b)
        if base == "adamw":
            w, bb = (1 - lr * wd) * w, (1 - lr * wd) * bb
        else:
            y_w, y_b = y_w + wd * p.T @ w, y_b + wd * bb
        if base == "sgd":
            d_w, d_b = y_w, y_b
        else:
            v_w, v_b = beta * v_w + (1 - beta) * low**2, beta * v_b + (1 - beta) * g_b**2
            power = 1 - beta ** (t + 1)
            d_w = y_w / np.sqrt(np.maximum(v_w / power - bias, eps**2))
            d_b = y_b / np.sqrt(np.maximum(v_b / power - bias, eps**2))
        x = np.concatenate([(w - lr * p @ d_w).reshape(-1), bb - lr * d_b])
        path.append(x)
    settings = {} if base == "sgd" else {"betas": (0.0, beta), "eps": eps, "bias_corrected": base == "corrected"}
    method = methods.doppler(
        lr=lr, filter="first-order v2", base="adam" if base == "corrected" else base, weight_decay=wd,
        galore=GaLore(RANK, EVERY), **settings, **COMMON,
    )  # fmt: skip
    assert_same(run_mechanism(method, start), np.stack(path), rtol=1e-7, atol=1e-9)


def test_galore_without_a_matrix_to_project_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"galore=GaLore\(rank=2, every=200\): projects no tensor"):
        run(methods.doppler(lr=0.1, base="adam", galore=GaLore(2), **COMMON))
