"""DP-MEMF, DP-SRG-MEMF and Accelerated-DP-SRGD (algorithms.md 6 and 7) against loops; their identities."""

import math
from dataclasses import replace

import numpy as np
import pytest

from loops import (  # isort: skip
    BATCHES, SIZE, START, STRATEGIES, D, N, T, accumulation, assert_same, difference, given, gradient, heavy_ball,
    loop, of, run
)  # fmt: skip

import dpcore
from dpcore import methods, sampling

COMMON = {"max_grad_norm": 0.7, "noise_multiplier": 0.5, "batch_size": SIZE}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("base", ["sgd", "momentum"])
def test_memf_is_its_loop(name: str, base: str) -> None:
    method = methods.memf(lr=0.3, strategy=given(name), base=base, **COMMON)
    move = None if base == "sgd" else heavy_ball(0.3, 0.9)
    assert_same(run(method), loop(move=move, strategy=STRATEGIES[name]))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("decay", [math.exp(-2.5), 1.0, [0.9, *np.linspace(0, 1, T - 1).tolist()]], ids=str)
def test_srg_memf_is_its_loop(name: str, decay) -> None:
    def c_of(t):
        return decay[t] if isinstance(decay, list) else decay

    method = methods.srg_memf(lr=0.05, decay=decay, strategy=given(name), **COMMON)
    expected = loop(difference(c_of), accumulation(c_of), heavy_ball(0.05, 0.9), strategy=STRATEGIES[name])
    assert_same(run(method), expected)


def test_the_papers_decay_and_momentum_are_the_defaults() -> None:
    """Section 5.1 takes momentum 0.9 for both methods: what differs between them by default is the query alone."""
    method, plain = methods.srg_memf(lr=0.1), methods.memf(lr=0.1)
    assert method.query.decay == method.filter.decay == math.exp(-2.5)
    assert method.update == plain.update == dpcore.updates.Momentum(0.1, 0.9)
    chosen, without = method.noise.strategy, plain.noise.strategy
    assert chosen == replace(without, decay=math.exp(-2.5))
    assert without == dpcore.strategies.Recommended(momentum=0.9)


def test_memf_with_the_identity_is_dp_sgd_and_costs_the_same() -> None:
    sampler = sampling.FixedOrderSampler(dataset_size=N, batch_size=8)
    common = {"lr": 0.3, "noise_multiplier": 0.8}
    memf, plain = methods.memf(strategy="identity", base="sgd", **common), methods.dp_sgd(**common)
    assert run(memf, sampler, steps=T).tobytes() == run(plain, sampler, steps=T).tobytes()
    matrix = dpcore.Plan(memf, sampler, T).epsilon(1e-5)
    assert matrix == pytest.approx(dpcore.Plan(plain, sampler, T).epsilon(1e-5), rel=1e-9)


def accelerated_loop(variant: str, radius: float | None, lr: float, strategy, clip: float, sigma: float) -> np.ndarray:
    """algorithms.md 7 with sums of eta written out; returns x_0 .. x_T and y_T."""

    def eta(t):
        return t + 1

    def tau(t):
        return eta(t) / sum(eta(j) for j in range(t + 1))

    def project(v):
        norm = math.sqrt((v**2).sum())
        return v if radius is None or norm <= radius else v * radius / norm

    z, y, total, beta = START.copy(), START.copy(), np.zeros(D), 1 / lr

    def query(t, points, i):
        if variant == "independent":
            return of(points[t], i)
        return eta(t) * of(points[t], i) - (eta(t - 1) * of(points[t - 1], i) if t else 0.0)

    def move(t, x, g, _, clean):
        nonlocal z, y, total
        total = eta(t) * g if variant == "independent" else total + g
        z = project(z - total / beta)
        y = project(x - total / (eta(t) * beta))
        return y if variant == "unaccelerated" else (1 - tau(t + 1)) * y + tau(t + 1) * z

    path = loop(query, move=move, clip=clip, sigma=sigma, strategy=strategy)
    return np.vstack([path, y])


@pytest.mark.parametrize("radius", [None, 1.5])
@pytest.mark.parametrize("variant", ["accelerated", "unaccelerated", "independent"])
@pytest.mark.parametrize("name", ["tree", "banded", "none"])
def test_accelerated_srgd_is_its_loop(variant: str, radius: float | None, name: str) -> None:
    strategy = None if name == "none" else given(name)
    method = methods.accelerated_srgd(
        variant=variant, lr=0.05, radius=radius, max_grad_norm=3.0, noise_multiplier=0.3, batch_size=SIZE,
        strategy=strategy,
    )  # fmt: skip
    if name == "none":
        method = dpcore.Method(
            query=method.query, clip=method.clip, filter=method.filter, update=method.update, radius=radius,
            noise=dpcore.noise.IndependentGaussian(0.3), batch_size=SIZE,
        )  # fmt: skip
    expected = accelerated_loop(variant, radius, 0.05, None if name == "none" else STRATEGIES[name], 3.0, 0.3)
    result = dpcore.minimize(gradient, START, BATCHES, method, key=bytes(range(32)), exact_key=True, record=True)
    assert_same(np.vstack([result.path, result.x]), expected)
    if radius is not None:
        assert np.linalg.norm(result.path[1:], axis=1).max() <= radius * (1 + 1e-12)
        assert np.linalg.norm(expected[1:], axis=1).max() > 0.99 * radius  # the ball was felt


def test_the_default_strategy_is_the_tree_and_none_where_gradients_are_independent() -> None:
    assert methods.accelerated_srgd(lr=0.1).noise.strategy.name == "tree"
    assert methods.accelerated_srgd(lr=0.1, variant="independent").noise.strategy is None
