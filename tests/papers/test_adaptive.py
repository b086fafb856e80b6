"""DP-Adam and DP-AdaGrad in all variants (algorithms.md 5) against loops, with independent and correlated noise."""

import math

import numpy as np
import pytest

from loops import (  # isort: skip
    BATCHES, SIZE, STRATEGIES, D, T, assert_same, averaging, correlated, given, gradient, loop, low_pass, run,
    strategy_and_matrix, two_points
)  # fmt: skip

import dpcore
from dpcore import methods
from dpcore.stages.filters import NAMED_FILTERS

C, SIGMA, LR, B1, B2 = 0.7, 0.5, 0.1, 0.8, 0.9
COMMON = {"lr": LR, "max_grad_norm": C, "noise_multiplier": SIGMA, "batch_size": SIZE}
S0 = SIGMA * C / SIZE
LARGEST = max(map(len, BATCHES))


class Adam:
    """mu and nu with their corrections as algorithms.md 5 prints them; t counts from 1."""

    def __init__(self, denominator, square=None, wd: float = 0.0) -> None:
        self.mu, self.nu, self.nuhat = np.zeros(D), np.zeros(D), np.zeros(D)
        self.denominator, self.square, self.wd = denominator, square, wd

    def __call__(self, t, x, g, y, clean):
        step = t + 1
        y = y + self.wd * x
        h = y**2 if self.square is None else self.square(t, x, g, clean)
        self.mu = B1 * self.mu + (1 - B1) * y
        self.nu = B2 * self.nu + (1 - B2) * h
        self.nuhat = self.nu / (1 - B2**step)
        return x - LR * self.mu / (1 - B1**step) / self.denominator(step, self.nuhat)


class AdaGrad(Adam):
    """nu is the sum; 0/0 = 0."""

    def __call__(self, t, x, g, y, clean):
        y = y + self.wd * x
        self.nu = self.nu + (y**2 if self.square is None else self.square(t, x, g, clean))
        self.nuhat = self.nu
        bottom = self.denominator(t + 1, self.nu)
        return x - LR * np.divide(y, bottom, out=np.zeros(D), where=bottom != 0)


def added(eps: float):
    return lambda step, nuhat: np.sqrt(np.maximum(nuhat, 0)) + eps


def floored(eps: float, bias=lambda step: 0.0):
    return lambda step, nuhat: np.sqrt(np.maximum(nuhat - bias(step), eps**2))


def adam_bias(row_norms: np.ndarray, s0: float = S0):
    """The recursion of algorithms.md 5, from bias_0 = 0."""
    biases = [0.0]
    for t in range(1, T + 1):
        biases.append(((B2 - B2**t) * biases[-1] + (1 - B2) * row_norms[t - 1] * s0**2) / (1 - B2**t))
    return biases.__getitem__


def row_norms(name: str | None) -> np.ndarray:
    """r_t: squared norms of the rows of C^{-1}."""
    if name is None:
        return np.ones(T)
    c = STRATEGIES[name]
    return (np.linalg.inv(c / np.sqrt((c**2).sum(axis=0).max())) ** 2).sum(axis=1)


def clean_square(t, x, g, clean):
    return clean**2


def public(x: np.ndarray) -> np.ndarray:
    return np.cos(x) + 0.1


NOISES = [None, "square-root", "tree", "banded", "dense", "blt", "banded inverse"]


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize("wd", [0.0, 0.3])
def test_post_processing(noise: str | None, wd: float) -> None:
    strategy, matrix = strategy_and_matrix(noise)
    adam = methods.dp_adam(betas=(B1, B2), eps=1e-3, weight_decay=wd, strategy=strategy, **COMMON)
    assert_same(run(adam), loop(move=Adam(added(1e-3), wd=wd), strategy=matrix))
    adagrad = methods.dp_adagrad(weight_decay=wd, strategy=strategy, **COMMON)
    assert_same(run(adagrad), loop(move=AdaGrad(added(0.0), wd=wd), strategy=matrix))


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_bias_corrected_adam(noise: str | None) -> None:
    bias, (strategy, matrix) = adam_bias(row_norms(noise)), strategy_and_matrix(noise)
    method = methods.dp_adam(variant="bias_corrected", betas=(B1, B2), eps=0.02, strategy=strategy, **COMMON)
    assert_same(run(method), loop(move=Adam(floored(0.02, bias)), strategy=matrix))
    if noise is None:
        assert [bias(t) for t in range(1, T + 1)] == pytest.approx([S0**2] * T)
    else:
        assert len({round(bias(t) / S0**2, 6) for t in range(1, T + 1)}) > 3


@pytest.mark.parametrize("noise", [None, "tree"], ids=str)
def test_bias_corrected_adagrad(noise: str | None) -> None:
    """nu is a sum, so the noise's share is the sum of its variances."""
    share, (strategy, matrix) = S0**2 * np.cumsum(row_norms(noise)), strategy_and_matrix(noise)
    method = methods.dp_adagrad(variant="bias_corrected", eps=0.02, strategy=strategy, **COMMON)
    assert_same(run(method), loop(move=AdaGrad(floored(0.02, lambda step: share[step - 1])), strategy=matrix))


def noisy_square(noise: str | None, scale: float):
    z = correlated(strategy_and_matrix(noise)[1], stream=1)
    return lambda t, x, g, clean: clean**2 + scale * z[t]


@pytest.mark.parametrize("noise", [None, "tree", "banded"], ids=str)
@pytest.mark.parametrize("wd", [0.0, 0.3])
def test_independent_moments(noise: str | None, wd: float) -> None:
    """Noise sqrt(2) sigma C / B on g and sqrt(2) sigma (2 B_max - 1) C^2 / B^2 on the square of the clipped mean."""
    scale = math.sqrt(2) * SIGMA * (2 * LARGEST - 1) * C**2 / SIZE**2
    strategy, matrix = strategy_and_matrix(noise)
    settings = {"variant": "independent_moments", "strategy": strategy, "weight_decay": wd, **COMMON}
    expected = loop(move=Adam(added(0.05), noisy_square(noise, scale), wd), strategy=matrix, share=math.sqrt(2))
    assert_same(run(methods.dp_adam(betas=(B1, B2), eps=0.05, **settings)), expected)
    # AdaGrad divides by max(1, sqrt(nu)).
    expected = loop(move=AdaGrad(floored(1.0), noisy_square(noise, scale), wd), strategy=matrix, share=math.sqrt(2))
    assert_same(run(methods.dp_adagrad(**settings)), expected)


@pytest.mark.parametrize("k", [None, 0.4])
def test_joint_moments(k: float | None) -> None:
    """One vector (g, k g^2) with noise sigma C on every coordinate, for batches of one example."""
    batches = [np.array([i]) for i in (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9)]
    scale = SIGMA * C / (1 / (math.sqrt(2) * C) if k is None else k)
    settings = {**COMMON, "variant": "joint_moments", "joint_scale": k, "batch_size": 1}
    square = noisy_square(None, scale)
    adam, adagrad = methods.dp_adam(betas=(B1, B2), eps=0.05, **settings), methods.dp_adagrad(**settings)
    assert_same(run(adam, batches), loop(move=Adam(added(0.05), square), size=1, batches=batches))
    assert_same(run(adagrad, batches), loop(move=AdaGrad(floored(1.0), square), size=1, batches=batches))


@pytest.mark.parametrize("norm", [None, 2.5])
@pytest.mark.parametrize("cycle", [(0, 1), (2, 3), (5, 20)], ids=str)
@pytest.mark.parametrize("noise", [None, "banded"], ids=str)
@pytest.mark.parametrize("update", ["adam", "adagrad"])
def test_delayed_scale(cycle: tuple[int, int], norm: float | None, noise: str | None, update: str) -> None:
    """s1 unscaled steps, then s2 whose scale is frozen at nuhat as it is when they begin; nu runs on at every step."""
    s1, s2 = cycle
    move = Adam(added(1e-3)) if update == "adam" else AdaGrad(added(1e-3))
    frozen = np.ones(D)

    def scale(t):
        nonlocal frozen
        place = t % (s1 + s2)
        if place == s1:
            frozen = 1 / (np.sqrt(move.nuhat) + 0.05)
        return np.ones(D) if place < s1 else frozen

    def clip(t):
        return C if t % (s1 + s2) < s1 or norm is None else norm

    strategy, matrix = strategy_and_matrix(noise)
    expected = loop(move=move, scale=scale, clip=clip, strategy=matrix)
    settings = {
        "variant": "delayed_scale", "unscaled_steps": s1, "scaled_steps": s2, "scale_eps": 0.05, "eps": 1e-3,
        "max_scaled_norm": norm, "strategy": strategy, **COMMON,
    }  # fmt: skip
    method = methods.dp_adam(betas=(B1, B2), **settings) if update == "adam" else methods.dp_adagrad(**settings)
    assert_same(run(method), expected)


@pytest.mark.parametrize(
    ("cycle", "noise", "wd", "factor"), [((2, 3), None, 0.3, 4.0), ((3, 1), "banded", 0.0, None), ((1, 2), None, 0, 1)]
)
@pytest.mark.parametrize("update", ["adam", "adagrad"])
def test_delayed_preconditioner(cycle: tuple[int, int], noise: str | None, wd: float, factor, update: str) -> None:
    """Section 3.4: s1 un-preconditioned steps; nu takes the square of their mean, once; s2 steps scaled by that nu."""
    (s1, s2), adam, total = cycle, update == "adam", np.zeros(D)
    mu, nu, nuhat, cycles = np.zeros(D), np.zeros(D), np.zeros(D), 0

    def move(t, x, g, y, clean):
        nonlocal mu, nu, nuhat, cycles, total
        place, y = t % (s1 + s2), y + wd * x
        mu = B1 * mu + (1 - B1) * y if adam else y
        muhat = mu / (1 - B1 ** (t + 1)) if adam else y
        if place >= s1:
            return x - LR * muhat / (np.sqrt(nuhat) + 1e-3)
        total = (0 if place == 0 else total) + g
        if place == s1 - 1:
            cycles += 1
            nu = B2 * nu + (1 - B2) * (total / s1) ** 2 if adam else nu + (total / s1) ** 2
            nuhat = nu / (1 - B2**cycles) if adam else nu
        return x - (factor or 1) * LR * muhat

    strategy, matrix = strategy_and_matrix(noise)
    expected = loop(
        move=move,
        scale=lambda t: np.ones(D) if t % (s1 + s2) < s1 else 1 / (np.sqrt(nuhat) + 0.05),
        clip=lambda t: C if t % (s1 + s2) < s1 else 2.5,
        strategy=matrix,
    )
    method = (methods.dp_adam if adam else methods.dp_adagrad)(
        variant="delayed_preconditioner", unscaled_steps=s1, scaled_steps=s2, unscaled_lr_factor=factor,
        scale_eps=0.05, eps=1e-3, max_scaled_norm=2.5, weight_decay=wd, strategy=strategy, **COMMON,
        **({"betas": (B1, B2)} if adam else {}),
    )  # fmt: skip
    assert_same(run(method), expected)
    own_scale = run(methods.dp_adam(variant="delayed_scale", unscaled_steps=s1, scaled_steps=s2, **COMMON))
    assert not np.allclose(own_scale[-1], expected[-1])


@pytest.mark.parametrize("name", ["bias_corrected", "delayed", "disk"])
def test_a_clipped_update_is_shortened_and_displacements_are_of_what_it_became(name: str) -> None:
    """Section 4.4.2: a move longer than lr times the bound is shortened to it; moments stay those of the gradients."""
    bound, free = 2.0, Adam(floored(0.02, adam_bias(row_norms(None))) if name == "bias_corrected" else added(1e-3))

    def move(t, x, g, y, clean):
        moved = free(t, x, g, y, clean) - x
        return x + moved * min(1, LR * bound / np.linalg.norm(moved))

    adam = {"betas": (B1, B2), "max_update_norm": bound, **COMMON}
    if name == "bias_corrected":
        method, expected = methods.dp_adam(variant=name, eps=0.02, **adam), loop(move=move)
    elif name == "disk":
        update = dpcore.updates.Adam(LR, (B1, B2), 1e-3, max_update_norm=bound)
        method = methods.disk(base=update, clipping="standard", **{**COMMON, "lr": None})
        expected = loop(two_points(lambda t: 0.7, 0.5), averaging(lambda t: 0.7), move)
    else:  # from the composed step, too
        method = methods.dp_adam(
            variant="delayed_preconditioner", unscaled_steps=1, scaled_steps=1, unscaled_lr_factor=9.0,
            **adam | {"max_update_norm": 0.05},
        )  # fmt: skip
        lengths = np.linalg.norm(np.diff(run(method), axis=0), axis=1)
        rates = LR * np.where(np.arange(len(lengths)) % 2, 1.0, 9.0)  # an unscaled step's rate has its factor
        np.testing.assert_allclose(lengths, 0.05 * rates, rtol=1e-9)
        return
    lengths = np.linalg.norm(np.diff(expected, axis=0), axis=1) / LR
    assert (lengths > 0.999 * bound).any()
    assert (lengths < 0.99 * bound).any()
    assert_same(run(method), expected)


@pytest.mark.parametrize("make", [methods.dp_adam, methods.dp_adagrad])
def test_the_cycle_of_no_unscaled_and_one_scaled_step_is_scale_then_privatize(make) -> None:
    common = {"scale_eps": 0.05, "max_scaled_norm": 1.5, **COMMON}
    delayed = make(variant="delayed_preconditioner", unscaled_steps=0, scaled_steps=1, **common)
    scaled = make(variant="scale_then_privatize", **common)
    assert run(delayed).tobytes() == run(scaled).tobytes()
    assert run(scaled).tobytes() != run(make(**COMMON)).tobytes()


def test_side_information() -> None:
    def square(t, x, g, clean):
        return public(x) ** 2

    for method, move in (
        (methods.dp_adam(variant="side_information", betas=(B1, B2), **COMMON), Adam(added(1e-8), square)),
        (methods.dp_adagrad(variant="side_information", **COMMON), AdaGrad(added(0.0), square)),
    ):
        assert_same(run(method, public_gradient=public), loop(move=move))


def test_the_noiseless_preconditioner_is_its_loop_and_not_private() -> None:
    settings = {"variant": "noiseless_preconditioner", "allow_nonprivate": True, **COMMON}
    for method, move in (
        (methods.dp_adam(betas=(B1, B2), eps=1e-3, **settings), Adam(added(1e-3), clean_square)),
        (methods.dp_adagrad(eps=1e-3, **settings), AdaGrad(added(1e-3), clean_square)),
    ):
        assert_same(run(method), loop(move=move))
        result = dpcore.minimize(gradient, np.zeros(D), BATCHES, method)
        assert isinstance(result.event, dpcore.accounting.NonPrivate)
        assert all(math.isinf(epsilon) for epsilon in result.statement(1e-5).epsilon.values())


@pytest.mark.parametrize("update", ["adam", "adagrad"])
def test_noiseless_scale_then_privatize_is_its_loop_and_not_private(update: str) -> None:
    """Figure 3's "Scale-Then-Privatize + Noiseless Preconditioner": nu and scale of the clipped mean, scaled back."""

    def square(t, x, g, clean):
        return (clean / scale(t)) ** 2

    make, kind = {"adam": (methods.dp_adam, Adam), "adagrad": (methods.dp_adagrad, AdaGrad)}[update]
    move = kind(added(1e-3), square)

    def scale(t):  # `move` runs after the step's gradients, so its nuhat is that of the step before
        return 1 / (np.sqrt(move.nuhat) + 0.05)

    own = {"betas": (B1, B2)} if update == "adam" else {}
    method = make(
        variant="noiseless_scale_then_privatize", allow_nonprivate=True, eps=1e-3, scale_eps=0.05, max_scaled_norm=2.5,
        **own, **COMMON,
    )  # fmt: skip
    assert_same(run(method), loop(move=move, scale=scale, clip=2.5))
    result = dpcore.minimize(gradient, np.zeros(D), BATCHES, method)
    assert isinstance(result.event, dpcore.accounting.NonPrivate)
    assert all(math.isinf(epsilon) for epsilon in result.statement(1e-5).epsilon.values())


@pytest.mark.parametrize("name", ["second-order", "p3"])
@pytest.mark.parametrize("noise", [None, "tree"], ids=str)
def test_bias_correction_behind_a_filter_takes_off_the_filtered_noise(name: str, noise: str | None) -> None:
    """Adam on the filtered gradient: V_t is the squared norm of row t of F C^{-1}, F the filter as a matrix."""
    b, a = NAMED_FILTERS[name]
    impulses = np.eye(T)
    smooth = low_pass(b, a)
    filter_matrix = np.stack([smooth(t, impulses[t]) for t in range(T)])
    c = np.eye(T) if noise is None else STRATEGIES[noise]
    c = c / np.sqrt((c**2).sum(axis=0).max())
    variances = ((filter_matrix @ np.linalg.inv(c)) ** 2).sum(axis=1)
    update = dpcore.updates.Adam(LR, (B1, B2), 0.02, denominator="floored", bias_corrected=True)
    method = methods.doppler(
        filter=name, base=update, max_grad_norm=C, noise_multiplier=SIGMA, batch_size=SIZE,
        strategy=None if noise is None else given(noise),
    )  # fmt: skip
    move = Adam(floored(0.02, adam_bias(variances)))
    assert_same(run(method), loop(smooth=low_pass(b, a), move=move, strategy=None if noise is None else c))


def test_the_negative_share_is_of_the_debiased_moment() -> None:
    method = methods.dp_adam(variant="bias_corrected", betas=(B1, B2), eps=0.02, **{**COMMON, "noise_multiplier": 4.0})
    result = dpcore.minimize(
        gradient, np.zeros(D), BATCHES, method, key=bytes(range(32)), exact_key=True, record_gradients=True
    )
    nu, shares = np.zeros(D), []
    for t, g in enumerate(result.gradients):
        nu = B2 * nu + (1 - B2) * g**2
        shares.append(np.mean(nu / (1 - B2 ** (t + 1)) < (4.0 * C / SIZE) ** 2))
    np.testing.assert_allclose(result.negative_share, shares)
    assert 0 < np.mean(shares) < 1
