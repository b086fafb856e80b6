"""The noise of separately released second moments: a search for neighbors that move more than the bound allows."""

import math

import numpy as np
import pytest
from scipy.optimize import minimize

from dpcore import accounting
from dpcore.errors import ArgumentError
from dpcore.plan import scales
from dpcore.plan.noise_variance import noise_variances
from dpcore.stages.filters import NAMED_FILTERS, Accumulation, Averaging, Chain, Identity, ScalarKalman, named_filter
from dpcore.stages.strategies import from_matrix, strategy
from dpcore.stages.updates import SGD, AdaGrad, Adam
from dpcore_numpy import recurrence
from tests.depth import pairs


def in_ball(v: np.ndarray, radius: float) -> np.ndarray:
    norm = np.linalg.norm(v)
    return v if norm <= radius else v * radius / norm


def joint_distance(points: np.ndarray, k: float, d: int) -> float:
    """||(g, k g^2) - (g', k g'^2)|| of two vectors in the unit ball."""
    g, h = in_ball(points[:d], 1.0), in_ball(points[d:], 1.0)
    return math.sqrt(((g - h) ** 2).sum() + k**2 * ((g**2 - h**2) ** 2).sum())


def largest(distance, start: np.ndarray, tries: int, size: int) -> float:
    """The largest value that random starts and a simplex search from the best of them find."""
    rng = np.random.default_rng(0)
    points = np.vstack([start, rng.normal(size=(tries, size)) * rng.choice([0.5, 1, 2], size=(tries, 1))])
    values = np.array([distance(p) for p in points])
    best = float(values.max())
    for place in values.argsort()[::-1][:4]:
        found = minimize(lambda p: -distance(p), points[place], method="Nelder-Mead", options={"maxiter": 400})
        best = max(best, -float(found.fun))
    return best


@pytest.mark.parametrize("d", [1, 2, 3])
def test_no_pair_of_joint_vectors_is_further_apart_than_twice_the_clip_norm(d: int) -> None:
    k = scales.JOINT_BOUND_1D if d == 1 else scales.JOINT_BOUND
    opposite = np.concatenate([np.full(d, 1 / math.sqrt(d)), np.full(d, -1 / math.sqrt(d))])
    assert 2 - 1e-9 <= largest(lambda p: joint_distance(p, k, d), opposite, 3000, 2 * d) <= 2 + 1e-12


def test_a_larger_joint_scale_has_a_counterexample() -> None:
    """So the bounds are tight: 1.66509 in one dimension, 1/sqrt(2) near g = -g' in two."""
    line = np.linspace(-1, 1, 4001)
    for k, tight in ((1.666, False), (scales.JOINT_BOUND_1D, True)):
        worst = max(joint_distance(np.array([1.0, h]), k, 1) for h in line)
        assert (worst <= 2 + 1e-12) == tight
    angle = np.linspace(0, 0.3, 301)
    for k, tight in ((1.01 * scales.JOINT_BOUND, False), (scales.JOINT_BOUND, True)):
        one, other = math.pi / 4 + angle, math.pi / 4 + math.pi - angle
        pairs = np.stack([np.cos(one), np.sin(one), np.cos(other), np.sin(other)], axis=1)
        assert (max(joint_distance(p, k, 2) for p in pairs) <= 2 + 1e-12) == tight


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_no_example_moves_the_square_of_the_sum_by_more_than_2b_minus_1_clip_norms_squared(d: int, batch: int) -> None:
    c = 0.7

    def distance(p: np.ndarray) -> float:
        vectors = [in_ball(v, c) for v in p.reshape(batch, d)]
        with_it, without = sum(vectors), sum(vectors[1:], np.zeros(d))
        return float(np.linalg.norm(with_it**2 - without**2))

    aligned = np.tile(np.eye(d)[0] * c, batch)
    found = largest(distance, aligned, 2000, batch * d)
    bound = (2 * batch - 1) * c**2
    assert bound * (1 - 1e-9) <= found <= bound * (1 + 1e-12)  # reached by aligned vectors: 2B - 1, not B nor 2B + 1


def test_the_scales_are_the_formulas() -> None:
    independent = Adam(0.1, second_moment="independent")
    joint = Adam(0.1, second_moment="joint", joint_scale=0.2)
    for update in (SGD(0.1), Adam(0.1), AdaGrad(0.1, second_moment="released"), joint):
        assert scales.gradient_noise(update, 1.5, 2.0) == 3.0
    assert scales.gradient_noise(independent, 1.5, 2.0) == pytest.approx(math.sqrt(2) * 3.0)
    assert scales.square_noise(SGD(0.1), 1.5, 2.0, 8, None) == 0
    # B_max above the denominator, as in a list of batches that says batch_size itself.
    assert scales.square_noise(independent, 1.5, 2.0, 8, 10) == pytest.approx(math.sqrt(2) * 1.5 * 19 * 4 / 64)
    assert scales.square_noise(joint, 1.5, 2.0, 1, 1) == pytest.approx(1.5 * 2.0 / 0.2)
    default = Adam(0.1, second_moment="joint")
    assert scales.joint_scale(default, 2.0) == pytest.approx(1 / (math.sqrt(2) * 2.0))


def test_two_releases_at_sqrt_two_sigma_cost_one_at_sigma() -> None:
    sigma = 1.3
    one = accounting.epsilon(accounting.Gaussian(sigma, 1), 1e-5)
    two = accounting.epsilon(accounting.Gaussian(math.sqrt(2) * sigma, 2), 1e-5)
    assert one == pytest.approx(two, rel=1e-12)


@pytest.mark.parametrize(("dimension", "allowed"), [(1, 1.665 / 2), (2, 1 / (2 * math.sqrt(2)))])
def test_a_joint_scale_beyond_the_bound_is_refused(dimension: int, allowed: float) -> None:
    scales.check_joint_scale(Adam(0.1, second_moment="joint", joint_scale=allowed), 2.0, dimension)
    with pytest.raises(ArgumentError, match=f"must be at most {allowed:.6g}"):
        scales.check_joint_scale(Adam(0.1, second_moment="joint", joint_scale=1.001 * allowed), 2.0, dimension)


# The variance of the noise behind filters and strategies, against the matrices written out.


T = 12
FILTERS = {
    **{name: named_filter(name) for name in NAMED_FILTERS}, "identity": Identity(), "averaging": Averaging(0.3),
    "accumulation": Accumulation([0.0, *np.linspace(0, 1, T - 1)]), "kalman": ScalarKalman(0.1, 0.3, 0.7),
    "chain": Chain(Accumulation(0.8), Averaging(0.3), named_filter("f6")),
}  # fmt: skip


def lower(seed: int) -> np.ndarray:
    matrix = np.tril(np.random.default_rng(seed).uniform(-0.4, 0.5, (T, T)))
    np.fill_diagonal(matrix, 1.0)
    return matrix


def filter_matrix(chosen) -> np.ndarray:
    """F, column by column: the response to an impulse at each step, through the backend's recurrence."""
    state, rows = [np.zeros(T) for _ in range(chosen.order)], []
    for t in range(T):
        y, done = np.eye(T)[t], 0
        for coefficients in chosen.coefficients(t):
            order = max(len(coefficients.a), len(coefficients.b) - 1)
            y = recurrence(y, state[done : done + order], coefficients)
            done += order
        rows.append(y.copy())
    return np.stack(rows)


KINDS = [None, "identity", "tree", "square-root", "tree-optimal", "dense", "banded"]


@pytest.mark.parametrize(("name", "kind"), pairs(FILTERS, KINDS, 3))
def test_variances_are_the_row_norms_of_the_product(name: str, kind: str | None) -> None:
    if kind is None:
        chosen, c = None, np.eye(T)
    else:
        matrix = np.triu(lower(1), -2) if kind == "banded" else lower(1)
        chosen = from_matrix(matrix) if kind in ("dense", "banded") else strategy(kind, T)
        c = chosen.matrix(T)
    expected = ((filter_matrix(FILTERS[name]) @ np.linalg.inv(c)) ** 2).sum(axis=1)
    np.testing.assert_allclose(noise_variances(FILTERS[name], chosen, T), expected, rtol=1e-10)


def test_no_filter_and_shorter_runs() -> None:
    assert (noise_variances(None, None, 5) == 1).all()
    tree = strategy("tree", T)
    np.testing.assert_array_equal(noise_variances(None, tree, 5), tree.inverse_row_norms(5))
    full = noise_variances(FILTERS["chain"], tree, T)
    np.testing.assert_allclose(noise_variances(FILTERS["chain"], tree, 5), full[:5], rtol=1e-12)
    assert noise_variances(FILTERS["chain"], None, 0).shape == (0,)
