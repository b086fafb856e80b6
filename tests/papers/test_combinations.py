"""Stages of different papers together, and what stands around them: schedules, averages, weight decay, balls."""

import math

import numpy as np
import pytest

from loops import (  # isort: skip
    BATCHES, KEY, SIZE, START, STRATEGIES, D, T, accumulation, always, assert_same, averaging, difference, given,
    gradient, loop, low_pass, run, seed_noise, sgd, two_points, window, AdamLoop
)  # fmt: skip

import dpcore
from dpcore import methods
from dpcore.stages import queries
from dpcore.stages.filters import NAMED_FILTERS, Accumulation, Averaging, Chain, named_filter
from dpcore.stages.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.stages.strategies import from_matrix
from dpcore.stages.updates import SGD, Adam
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from dpcore.stages.updates.schedules import WarmupCosine

COMMON = {"max_grad_norm": 0.7, "noise_multiplier": 0.5, "batch_size": SIZE}


def composed(query, filter, update, strategy=None) -> dpcore.Method:  # noqa: A002
    noise = IndependentGaussian(0.5) if strategy is None else CorrelatedGaussian(0.5, from_matrix(strategy))
    return dpcore.Method(
        query=query, filter=filter, update=update, noise=noise, clip=dpcore.clipping.Clip(0.7), batch_size=SIZE
    )


ADAM = Adam(0.1, (0.8, 0.9), 1e-3)


def test_a_window_of_preconditioned_gradients() -> None:
    b, a = NAMED_FILTERS["pmlf-cifar"]
    method = composed(
        queries.Preconditioned(queries.ParameterWindow(3, 0.4), scale_eps=0.1), named_filter("pmlf-cifar"), ADAM
    )
    move = AdamLoop(0.1, 0.8, 0.9)
    expected = loop(window(3, 0.4), low_pass(b, a), move, scale=lambda t: 1 / (np.sqrt(move.nuhat) + 0.1))
    assert_same(run(method), expected)


@pytest.mark.parametrize("gamma", [0.5, -1.0])
@pytest.mark.parametrize("k", [2, 4])
def test_pmlf_over_disk_points(gamma: float, k: int) -> None:
    method = composed(queries.ParameterWindow(k, 0.6, query=queries.TwoPoint(0.7, gamma)), Averaging(0.7), SGD(0.2))
    expected = loop(window(k, 0.6, two_points(always(0.7), gamma)), averaging(always(0.7)), sgd(0.2))
    assert_same(run(method), expected)


@pytest.mark.parametrize("name", ["tree", "banded"])
def test_srg_with_adam_under_correlated_noise(name: str) -> None:
    method = methods.srg_memf(
        lr=0.1, decay=0.6, base="adam", betas=(0.8, 0.9), eps=1e-3, strategy=given(name), **COMMON
    )
    expected = loop(
        difference(always(0.6)), accumulation(always(0.6)), AdamLoop(0.1, 0.8, 0.9), strategy=STRATEGIES[name]
    )
    assert_same(run(method), expected)


def test_srg_over_disk_points_through_a_chain_of_filters() -> None:
    b, a = NAMED_FILTERS["second-order"]
    method = composed(
        queries.RecursiveDifference(0.6, queries.TwoPoint(0.7, 0.5)),
        Chain(Accumulation(0.6), Averaging(0.7), named_filter("second-order")),
        SGD(0.2),
        STRATEGIES["banded"],
    )
    first, second, third = accumulation(always(0.6)), averaging(always(0.7)), low_pass(b, a)
    expected = loop(
        difference(always(0.6), two_points(always(0.7), 0.5)),
        lambda t, g: third(t, second(t, first(t, g))),
        sgd(0.2),
        strategy=STRATEGIES["banded"],
    )
    assert_same(run(method), expected)


def test_disk_over_scaled_gradients_under_correlated_noise() -> None:
    method = composed(
        queries.Preconditioned(queries.TwoPoint(0.7, 0.5), 0.1, 1.5, 2, 3), Averaging(0.7), ADAM, STRATEGIES["dense"]
    )
    move, frozen = AdamLoop(0.1, 0.8, 0.9), np.ones(D)

    def scale(t):
        nonlocal frozen
        if t % 5 == 2:
            frozen = 1 / (np.sqrt(move.nuhat) + 0.1)
        return np.ones(D) if t % 5 < 2 else frozen

    expected = loop(
        two_points(always(0.7), 0.5), averaging(always(0.7)), move, scale=scale,
        clip=lambda t: 0.7 if t % 5 < 2 else 1.5, strategy=STRATEGIES["dense"],
    )  # fmt: skip
    assert_same(run(method), expected)


@pytest.mark.parametrize("schedule", [WarmupCosine(), WarmupCosine(4, 0.1), WarmupCosine(T - 1)], ids=str)
def test_schedules_multiply_the_learning_rate(schedule: WarmupCosine) -> None:
    warm, final = schedule.warmup_steps, schedule.final

    def factor(t):
        if t < warm:
            return (t + 1) / warm
        share = (t - warm) / max(T - 1 - warm, 1)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share))

    method = methods.doppler(lr=0.3, schedule=schedule, filter="f1", **COMMON)
    b, a = NAMED_FILTERS["f1"]
    expected = loop(smooth=low_pass(b, a), move=lambda t, x, g, y, clean: x - 0.3 * factor(t) * y)
    assert_same(run(method), expected)


@pytest.mark.parametrize(
    "average", [ExponentialAverage(0.7), ExponentialAverage(0.0), UniformAverage(), UniformAverage(4)], ids=str
)
@pytest.mark.parametrize("name", ["dp_sgd", "disk", "accelerated"])
def test_averages_are_of_all_parameters_so_far(average, name: str) -> None:
    make = {
        "dp_sgd": lambda **k: methods.dp_sgd(lr=0.3, **k),
        "disk": lambda **k: methods.disk(lr=0.3, **k),
        "accelerated": lambda **k: methods.accelerated_srgd(lr=0.03, **k),
    }[name]
    arguments = {"key": KEY, "exact_key": True, "record": True}
    result = dpcore.minimize(gradient, START, BATCHES, make(averaging=average, **COMMON), **arguments)
    points = list(result.path[1:])
    if name == "accelerated":
        # Of y_{t+1} = x_t - S_t / (eta_t beta), from the released differences.
        released = dpcore.minimize(gradient, START, BATCHES, make(**COMMON), **arguments, record_gradients=True)
        sums = np.cumsum(released.gradients, axis=0)
        points = [x - 0.03 * s / (t + 1) for t, (x, s) in enumerate(zip(released.path, sums, strict=False))]
    if isinstance(average, ExponentialAverage):
        weights = average.decay ** np.arange(T - 1, -1, -1.0)
    else:
        weights = (np.arange(T) >= average.start).astype(float)
    expected = (weights / weights.sum()) @ np.stack(points)
    np.testing.assert_allclose(result.x, expected, rtol=1e-9)


@pytest.mark.parametrize("name", ["dp_sgd", "disk"])
def test_parameters_stay_in_the_ball_and_displacements_are_of_what_they_became(name: str) -> None:
    radius = 1.2

    def move(t, x, g, y, clean):
        moved = x - 0.3 * y
        norm = np.linalg.norm(moved)
        return moved if norm <= radius else moved * radius / norm

    if name == "dp_sgd":
        method, expected = methods.dp_sgd(lr=0.3, radius=radius, **COMMON), loop(move=move)
    else:
        method = methods.disk(lr=0.3, radius=radius, clipping="standard", **COMMON)
        expected = loop(two_points(always(0.7), 0.5), averaging(always(0.7)), move)
    assert np.linalg.norm(expected[1:], axis=1).max() > 0.999 * radius
    assert_same(run(method), expected)


SUPPLIED = {
    "disk": methods.disk(lr=0.1, **COMMON), "pmlf": methods.pmlf(lr=0.1, window=3, **COMMON),
    "dp_adam": methods.dp_adam(lr=0.1, **COMMON), "memf, tree": methods.memf(lr=0.1, strategy="tree", **COMMON),
    "srg_memf, banded": methods.srg_memf(lr=0.1, strategy=STRATEGIES["banded"], **COMMON),
    "accelerated": methods.accelerated_srgd(lr=0.03, **COMMON),
    "independent": methods.dp_adam(lr=0.1, variant="independent_moments", **COMMON),
    "independent, banded": methods.dp_adam(
        lr=0.1, variant="independent_moments", strategy=STRATEGIES["banded"], **COMMON),
    "scaled": methods.dp_adagrad(lr=0.1, variant="scale_then_privatize", **COMMON),
}  # fmt: skip


@pytest.mark.parametrize("name", SUPPLIED)
def test_observing_and_supplying_the_noise_change_nothing(name: str) -> None:
    """The composed step is the fused one, and the caller's normals stand for the rows of Z."""
    method = SUPPLIED[name]
    straight = run(method)
    np.testing.assert_allclose(run(method, record_gradients=True), straight, rtol=1e-9, atol=1e-10)
    rows = [seed_noise(stream=stream) for stream in (0, 1)]
    noise = np.stack(rows, axis=1) if "independent" in name else rows[0]
    np.testing.assert_allclose(run(method, noise=noise), straight, rtol=1e-9, atol=1e-10)
    assert not np.allclose(run(method, noise=0.9 * noise), straight)
