"""DiSK (algorithms.md 4) against loops over every base, and its identities."""

import numpy as np
import pytest

from loops import (  # isort: skip
    SIZE, START, AdamLoop, N, T, always, assert_same, averaging, gradient, heavy_ball, loop, low_pass,
    run, sgd, two_points
)  # fmt: skip

from dpcore import methods
from dpcore.stages.filters import NAMED_FILTERS, ScalarKalman

COMMON = {"noise_multiplier": 0.5, "batch_size": SIZE}


def bases(name: str, lr: float):
    """The base optimizers on the filtered gradient, as their papers print them."""
    if name in ("sgd", "momentum"):
        return sgd(lr) if name == "sgd" else heavy_ball(lr, 0.9)
    return AdamLoop(lr, 0.8, 0.95, 1e-3, 0.2 if name == "adamw" else 0.0)


SETTINGS = {
    "sgd": {},
    "momentum": {},
    "adam": {"betas": (0.8, 0.95), "eps": 1e-3},
    "adamw": {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.2},
}


@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.3, 1.0), (0.5, 1.0), (0.6, -1.0), (1.0, 0.5)])
@pytest.mark.parametrize("base", SETTINGS)
def test_disk_is_its_loop(kappa: float, gamma: float, base: str) -> None:
    method = methods.disk(lr=0.1, kappa=kappa, gamma=gamma, base=base, **SETTINGS[base], **COMMON)
    expected = loop(
        two_points(always(kappa), gamma), averaging(always(kappa)), bases(base, 0.1), clip=1.0, rule="automatic"
    )
    assert_same(run(method), expected)


@pytest.mark.parametrize("name", ["first-order v1", "second-order"])
def test_disk_under_doppler_is_its_loop(name: str) -> None:
    b, a = NAMED_FILTERS[name]
    method = methods.disk(lr=0.1, filter=name, base="adam", **SETTINGS["adam"], **COMMON)
    expected = loop(
        two_points(always(0.7), 0.5), averaging(always(0.7), low_pass(b, a)), bases("adam", 0.1),
        clip=1.0, rule="automatic",
    )  # fmt: skip
    assert_same(run(method), expected)


@pytest.mark.parametrize("base", ["sgd", "adam"])
def test_disk_with_the_scalar_kalman_gain_is_its_loop(base: str) -> None:
    """k_t = (p + sH + sv) / (p + sw + sv), p <- (1 - k_t)(p + sH + sv), from p = sw."""
    sH, sv, sw = 0.1**2, 0.2**2, 0.7**2
    gains, p = [], sw
    for _ in range(T):
        k = (p + sH + sv) / (p + sw + sv)
        p = (1 - k) * (p + sH + sv)
        gains.append(k)
    assert max(np.abs(np.diff(gains[:5]))) > 1e-3
    kalman = ScalarKalman(sigma_H=0.1, sigma_v=0.2, sigma_w=0.7)
    method = methods.disk(lr=0.1, kappa=kalman, gamma=0.5, base=base, **SETTINGS[base], **COMMON)
    expected = loop(
        two_points(gains.__getitem__, 0.5), averaging(gains.__getitem__), bases(base, 0.1), clip=1.0, rule="automatic"
    )
    assert_same(run(method), expected)


def test_disk_at_gamma_minus_one_is_storm() -> None:
    """g~_t = grad(x_t; B_t) + (1 - alpha)(g~_{t-1} - grad(x_{t-1}; B_t)), alpha = kappa (Cutkosky and Orabona 2019)."""
    kappa, lr, size, rng = 0.4, 0.05, 8, np.random.default_rng(1)
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
