"""The noise that each method really adds: its size, its distribution, and its covariance over the steps.

Gradients are zero and the keys are real, so that what is released is the noise alone. Whitened by what algorithms.md
says, it must be standard normal; the same tests must reject nine tenths of it. Keys are fixed, and so is the outcome.
"""

import math

import numpy as np
import pytest

from loops import banded_inverse_matrix, banded_matrix, blt_matrix, dense_matrix, mechanism_of  # isort: skip
from loops import square_root_matrix, toeplitz, tree_matrix  # isort: skip
from scipy import stats

from dpcore import methods, sampling
from dpcore.stages.filters import OptimalFIR, ScalarKalman
from dpcore.stages.strategies import BLT, BandedToeplitz, Dense, NamedStrategy, in_blocks
from tests.depth import pairs

STEPS, D, SIGMA, C, B = 8, 4096, 1.3, 2.0, 7
COMMON = {"lr": 0.01, "max_grad_norm": C, "noise_multiplier": SIGMA}
BETA2 = 0.9


def release(method, size: int = B, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Run on zero gradients; return the released averages and Adam's second moments after each step, (T, d) each."""
    x, sampler = [np.zeros(D)], sampling.FixedOrderSampler(dataset_size=3 * size, batch_size=size)
    mechanism = mechanism_of(method, sampler, {"x": x[0]}, STEPS, seed.to_bytes(32, "big"))
    averages, moments = [], []
    for step in range(STEPS):
        for point in mechanism.points():
            mechanism.at(x, point)
        mechanism.add([np.zeros((size, D))])
        if step % 2:
            mechanism.add([np.zeros((0, D))])
        mechanism.release(x, observe=lambda g, y: averages.append(g[0].copy()))
        moments.append(mechanism.state_dict()["public"]["arrays"].get("x/moment/1", np.zeros(D)).copy())
    return np.stack(averages), np.stack(moments)


def looks_standard_normal(white: np.ndarray) -> bool:
    """Chi-square of all squares, Kolmogorov-Smirnov of all values, and every covariance between two rows."""
    n = white.size
    size = 2 * min(stats.chi2.cdf((white**2).sum(), n), stats.chi2.sf((white**2).sum(), n))
    shape = stats.kstest(white.ravel(), "norm").pvalue
    rows = white @ white.T / white.shape[1] - np.eye(len(white))
    return bool(size > 1e-4 and shape > 1e-4 and np.abs(rows).max() < 5 * math.sqrt(2 / white.shape[1]))


def scaled(matrix: np.ndarray) -> np.ndarray:
    return matrix / np.sqrt((matrix**2).sum(axis=0).max())


INDEPENDENT = {
    "dp_sgd": methods.dp_sgd(**COMMON),
    "dp_sgd, automatic": methods.dp_sgd(clipping="automatic", **COMMON),
    "momentum": methods.dp_sgd(base="momentum", **COMMON),
    "doppler": methods.doppler(filter="second-order", **COMMON),
    "doppler, adam": methods.doppler(base="adam", bias_corrected=True, **COMMON),
    "doppler, optimal": methods.doppler(filter=OptimalFIR(3), **COMMON),
    "disk": methods.disk(**COMMON),
    "disk, kalman": methods.disk(kappa=ScalarKalman(0.1, 0.2, 0.7), base="adamw", **COMMON),
    "pmlf": methods.pmlf(window=3, **COMMON),
    "inner_outer": methods.inner_outer(**COMMON),
    "accelerated, independent": methods.accelerated_srgd(variant="independent", **COMMON),
    "dp_adam": methods.dp_adam(**COMMON),
    "dp_adam, bias": methods.dp_adam(variant="bias_corrected", **COMMON),
    "dp_adam, noiseless": methods.dp_adam(variant="noiseless_preconditioner", allow_nonprivate=True, **COMMON),
    "dp_adagrad": methods.dp_adagrad(**COMMON),
}
CORRELATED = {
    f"{name}, {kind}": (make(strategy=strategy, **COMMON), matrix)
    for (name, make), (kind, strategy, matrix) in pairs((
        ("memf", methods.memf), ("srg_memf", methods.srg_memf), ("accelerated_srgd", methods.accelerated_srgd),
        ("dp_adam", methods.dp_adam), ("pmlf", methods.pmlf), ("disk", methods.disk),
    ), (
        ("tree", "tree", tree_matrix(STEPS)),
        ("square-root", "square-root", square_root_matrix(STEPS)),
        ("dense", dense_matrix(STEPS), dense_matrix(STEPS)),
        ("banded", banded_matrix(STEPS), banded_matrix(STEPS)),
        ("banded inverse", NamedStrategy("banded-inverse-square-root", 4), banded_inverse_matrix(STEPS)),
        ("blt", BLT([0.4, 0.1], [0.9, 0.3], STEPS), blt_matrix(STEPS)),
    ), 2)
}  # fmt: skip
INVERSE = NamedStrategy("banded-inverse-square-root", 4)
STREAMED = {
    f"{name}, {kind}": (make(strategy=strategy, **COMMON), matrix)
    for name, make in (("memf", methods.memf), ("dp_adam", methods.dp_adam))
    for kind, strategy, matrix in (
        ("toeplitz bands", BandedToeplitz((1.0, 0.6, 0.3)), toeplitz((1.0, 0.6, 0.3, *[0.0] * (STEPS - 3)))),
        ("bands", banded_matrix(STEPS), banded_matrix(STEPS)),
        ("ring of rows", INVERSE, banded_inverse_matrix(STEPS)),
        ("redrawn rows", in_blocks(INVERSE, 1), banded_inverse_matrix(STEPS)),
        ("blocks of 3", in_blocks(NamedStrategy("square-root"), 3), square_root_matrix(STEPS)),
        ("dense blocks of 5", in_blocks(Dense(dense_matrix(STEPS)), 5), dense_matrix(STEPS)),
        ("tree in one block", in_blocks(NamedStrategy("tree"), 100), tree_matrix(STEPS)),
    )
}


def test_the_check_itself() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal((STEPS, D))
    assert looks_standard_normal(noise)
    assert not looks_standard_normal(0.9 * noise)
    assert not looks_standard_normal(np.sqrt(3) * rng.uniform(-1, 1, (STEPS, D)))
    assert not looks_standard_normal(np.vstack([noise[:-1], noise[:1]]))  # a row twice
    assert not looks_standard_normal(np.vstack([0.9 * noise[:1], noise[1:]]))  # one step only


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_noise_has_standard_deviation_sigma_c_over_b(name: str) -> None:
    noise = release(INDEPENDENT[name])[0] / (SIGMA * C / B)
    assert looks_standard_normal(noise)
    assert not looks_standard_normal(0.9 * noise)


def one_band_off(matrix: np.ndarray) -> np.ndarray:
    """The matrix with all below its diagonal moved down by a row: every weight meets the vector of a step earlier."""
    below = np.tril(matrix, -1)
    return np.diag(np.diagonal(matrix)) + np.vstack([np.zeros((1, len(matrix))), below[:-1]])


@pytest.mark.parametrize("name", STREAMED)
def test_every_way_of_streaming_whitens_under_its_strategy_and_not_one_band_off(name: str) -> None:
    """The covariance of what is released, over several turns of the ring and several blocks."""
    method, matrix = STREAMED[name]
    noise = release(method)[0] / (SIGMA * C / B)
    assert looks_standard_normal(scaled(matrix) @ noise)
    assert not looks_standard_normal(scaled(one_band_off(matrix)) @ noise)
    inverse = np.linalg.inv(scaled(matrix))
    covariance = noise @ noise.T / D
    spread = np.sqrt(np.outer(*[np.diagonal(inverse @ inverse.T)] * 2))
    assert np.abs((covariance - inverse @ inverse.T) / spread).max() < 5 * math.sqrt(2 / D)


@pytest.mark.parametrize("name", CORRELATED)
def test_correlated_noise_whitens_under_its_strategy_and_no_other(name: str) -> None:
    """C times the noise is Z; the noise itself is not white."""
    method, matrix = CORRELATED[name]
    noise = release(method)[0] / (SIGMA * C / B)
    white = scaled(matrix) @ noise
    assert looks_standard_normal(white)
    assert not looks_standard_normal(0.9 * white)
    assert not looks_standard_normal(noise)
    rows = (np.linalg.inv(scaled(matrix)) ** 2).sum(axis=1)
    np.testing.assert_allclose((noise**2).mean(axis=1), rows, rtol=6 * math.sqrt(2 / D))


@pytest.mark.parametrize(("clipping", "sensitivity"), [("normalized", 1.0), ("automatic_v", C)])
def test_the_noise_follows_the_sensitivity_of_the_clip(clipping: str, sensitivity: float) -> None:
    noise = release(methods.dp_sgd(clipping=clipping, **COMMON))[0] / (SIGMA * sensitivity / B)
    assert looks_standard_normal(noise)
    assert not looks_standard_normal(0.9 * noise)


@pytest.mark.parametrize("norm", [None, 5.0])
@pytest.mark.parametrize("cycle", [(0, 1), (2, 3)])
@pytest.mark.parametrize("matrix", [np.eye(STEPS), banded_matrix(STEPS)], ids=["independent", "banded"])
def test_scaled_steps_have_noise_of_the_norm_in_force_on_the_scaled_sum(norm, cycle, matrix) -> None:
    s1, s2 = cycle
    method = methods.dp_adam(
        variant="delayed_scale", betas=(0.9, BETA2), unscaled_steps=s1, scaled_steps=s2, scale_eps=0.05,
        max_scaled_norm=norm, strategy=None if (matrix == np.eye(STEPS)).all() else matrix, **COMMON,
    )  # fmt: skip
    averages, _ = release(method)
    nu, nuhat, scale, white = np.zeros(D), np.zeros(D), np.ones(D), []
    for t, g in enumerate(averages):
        place = t % (s1 + s2)
        if place == s1:
            scale = 1 / (np.sqrt(nuhat) + 0.05)
        now, bound = (np.ones(D), C) if place < s1 else (scale, C if norm is None else norm)
        white.append(g * now / (SIGMA * bound / B))
        nu = BETA2 * nu + (1 - BETA2) * g**2
        nuhat = nu / (1 - BETA2 ** (t + 1))
    white = scaled(matrix) @ np.stack(white)
    assert looks_standard_normal(white)
    assert not looks_standard_normal(0.9 * white)


def squares(moments: np.ndarray) -> np.ndarray:
    """What entered Adam's second moment at each step."""
    before = np.vstack([np.zeros((1, D)), moments[:-1]])
    return (moments - BETA2 * before) / (1 - BETA2)


@pytest.mark.parametrize("kind", ["independent", "banded", "tree"])
def test_independent_moments_release_two_streams_that_know_nothing_of_each_other(kind: str) -> None:
    """sqrt(2) sigma C / B on the average, sqrt(2) sigma (2B - 1) C^2 / B^2 on its square."""
    matrix = {"independent": np.eye(STEPS), "banded": banded_matrix(STEPS), "tree": tree_matrix(STEPS)}[kind]
    strategy = {"independent": None, "banded": matrix, "tree": "tree"}[kind]
    method = methods.dp_adam(variant="independent_moments", betas=(0.9, BETA2), strategy=strategy, **COMMON)
    averages, moments = release(method)
    first = scaled(matrix) @ averages / (math.sqrt(2) * SIGMA * C / B)
    second = scaled(matrix) @ squares(moments) / (math.sqrt(2) * SIGMA * (2 * B - 1) * C**2 / B**2)
    for white in (first, second):
        assert looks_standard_normal(white)
        assert not looks_standard_normal(0.9 * white)
    assert looks_standard_normal(np.vstack([first, second]))  # uncorrelated, at equal steps and at others
    assert not looks_standard_normal(np.vstack([first, first]))


def test_joint_moments_have_noise_sigma_c_on_every_coordinate_of_one_vector() -> None:
    method = methods.dp_adam(variant="joint_moments", betas=(0.9, BETA2), joint_scale=0.3, **COMMON)
    averages, moments = release(method, size=1)
    white = np.vstack([averages / (SIGMA * C), squares(moments) * 0.3 / (SIGMA * C)])
    assert looks_standard_normal(white)
    assert not looks_standard_normal(0.9 * white)


def test_the_fused_step_adds_the_noise_that_the_composed_step_shows() -> None:
    """Without an observer the backend's one operation runs: x moves by -lr times the noise."""
    for strategy, matrix in ((None, np.eye(STEPS)), (banded_matrix(STEPS), banded_matrix(STEPS))):
        method = methods.dp_sgd(strategy=strategy, **COMMON)
        x, sampler = [np.zeros(D)], sampling.FixedOrderSampler(dataset_size=3 * B, batch_size=B)
        mechanism = mechanism_of(method, sampler, {"x": x[0]}, STEPS, bytes(32))
        path = [x[0].copy()]
        for _ in range(STEPS):
            mechanism.add([np.zeros((B, D))])
            mechanism.release(x)
            path.append(x[0].copy())
        noise = -np.diff(path, axis=0) / COMMON["lr"]
        white = scaled(matrix) @ noise / (SIGMA * C / B)
        assert looks_standard_normal(white)
        assert not looks_standard_normal(0.9 * white)
