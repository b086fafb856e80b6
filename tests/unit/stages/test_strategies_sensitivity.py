"""The sensitivity of a strategy against all signs and many vectors, and its error on a workload against simulation."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpcore.errors import ArgumentError
from dpcore.sampling import FixedOrderSampler

from dpcore.stages.strategies import (  # isort: skip
    Banded, BandedToeplitz, Dense, Identity, SquareRoot, Strategy, Tree, TreeOptimal, banded_inverse_square_root, rmse,
    sensitivity, strategy, workloads
)  # fmt: skip
from dpcore.stages.strategies.saved import load, save
from dpcore.stages.strategies.sensitivity import _squared
from dpcore.stages.strategies.streaming import in_blocks
from dpcore.stages.strategies.workloads import error_of

T = 12
Floats = NDArray[np.float64]


def random_lower(seed: int, bands: int, *, signed: bool) -> Floats:
    rng = np.random.default_rng(seed)
    matrix = np.triu(np.tril(rng.uniform(-1 if signed else 0, 1, (T, T))), 1 - bands)
    np.fill_diagonal(matrix, rng.uniform(0.2, 1, T))
    return matrix


def all_signs(matrix: Floats, pattern: list[int]) -> float:
    """The exact sensitivity for one-dimensional vectors: a convex function is largest at a corner."""
    corners = np.array(list(itertools.product([1.0, -1.0], repeat=len(pattern))))
    return float(np.linalg.norm(matrix[:, pattern] @ corners.T, axis=0).max())


PATTERNS = st.lists(st.integers(0, T - 1), unique=True, min_size=1, max_size=7)


@given(st.integers(0, 10**6), st.integers(1, T), st.lists(PATTERNS, min_size=1, max_size=3))
def test_no_signs_and_no_vectors_of_norm_one_move_it_further(seed: int, bands: int, patterns: list[list[int]]) -> None:
    rng = np.random.default_rng(seed)
    for chosen in (
        Dense(random_lower(seed, bands, signed=True)),
        Banded.from_matrix(random_lower(seed, bands, signed=True)),
    ):
        matrix, value = chosen.matrix(T), sensitivity(chosen, patterns, T)
        assert value >= max(all_signs(matrix, pattern) for pattern in patterns) * (1 - 1e-12)
        for pattern in patterns:
            x = rng.standard_normal((200, len(pattern), 3))
            x /= np.linalg.norm(x, axis=2, keepdims=True)
            moved = np.einsum("tk,nkd->ntd", matrix[:, pattern], x)
            assert np.linalg.norm(moved, axis=(1, 2)).max() <= value * (1 + 1e-12)


@given(st.integers(0, 10**6), st.integers(1, T), st.lists(PATTERNS, min_size=1, max_size=3))
def test_exact_where_no_product_of_columns_is_negative(seed: int, bands: int, patterns: list[list[int]]) -> None:
    given_matrix = random_lower(seed, bands, signed=False)
    for chosen in (Dense(given_matrix), Banded.from_matrix(given_matrix)):
        matrix = chosen.matrix(T)
        columns = max(float(np.linalg.norm(matrix[:, pattern].sum(axis=1))) for pattern in patterns)
        assert sensitivity(chosen, patterns, T) == pytest.approx(columns, rel=1e-12)
        assert columns == pytest.approx(max(all_signs(matrix, pattern) for pattern in patterns), rel=1e-12)


@given(st.integers(0, 10**6), st.integers(1, T), PATTERNS, st.integers(1, T))
def test_one_value_by_bands_by_columns_and_by_the_matrix(seed: int, bands: int, pattern: list[int], steps: int) -> None:
    pattern = [step for step in pattern if step < steps]
    banded = Banded.from_matrix(random_lower(seed, bands, signed=True))
    series = tuple(np.random.default_rng(seed).uniform(-1, 1, bands) + np.eye(1, bands)[0] * 2)
    for chosen in (banded, BandedToeplitz(series)):
        block = chosen.matrix(steps)
        direct = math.sqrt(np.abs((block.T @ block)[np.ix_(pattern, pattern)]).sum())
        assert sensitivity(chosen, [pattern], steps) == pytest.approx(direct, rel=1e-12)
        assert sensitivity(Dense(block), [pattern], steps) == pytest.approx(
            direct / np.linalg.norm(block, axis=0).max()
        )


@given(st.integers(0, 10**6), st.integers(1, T), st.lists(PATTERNS, min_size=1, max_size=3), st.integers(0, 3))
def test_of_patterns_that_are_shifts_the_earliest_counts(seed: int, bands: int, patterns: list, first: int) -> None:
    series = tuple(np.random.default_rng(seed).uniform(0, 1, bands) + np.eye(1, bands)[0])
    shifted = [[place + by for place in pattern] for pattern in patterns for by in (0, 1, 4) if max(pattern) + by < T]
    for chosen in (BandedToeplitz(series), SquareRoot(T)):
        rows = chosen.matrix(T)[first:]
        largest = max(float(np.linalg.norm(rows[:, pattern].sum(axis=1))) for pattern in shifted)
        assert sensitivity(chosen, reversed(shifted), T, first) == pytest.approx(largest, rel=1e-12)


def test_no_pattern_costs_nothing() -> None:
    assert sensitivity(Identity(), [], T) == sensitivity(Identity(), [[]], T) == 0.0


def test_columns_are_added_up_in_pieces() -> None:
    chosen = SquareRoot(700)
    assert _squared(chosen, 700, 0)(np.arange(700)) == pytest.approx(np.square(chosen.matrix(700).sum(axis=1)).sum())


SINGLE: list[Strategy] = [
    Identity(), Tree(T), TreeOptimal(T), SquareRoot(T), banded_inverse_square_root(3, T), BandedToeplitz((1.0, 0.5))
]  # fmt: skip


@pytest.mark.parametrize("chosen", SINGLE, ids=lambda chosen: str(chosen.describe()["kind"]))
def test_single_participation_is_one_and_fixed_order_the_sum_of_columns(chosen: Strategy) -> None:
    assert sensitivity(chosen, [[step] for step in range(T)], T) == pytest.approx(1, rel=1e-12)
    matrix = chosen.matrix(T)
    value = sensitivity(chosen, FixedOrderSampler(dataset_size=50, batch_size=10).patterns(T), T)
    assert value == pytest.approx(max(np.linalg.norm(matrix[:, j::5].sum(axis=1)) for j in range(5)), rel=1e-12)
    # A stopped run is the leading block.
    stopped = sensitivity(chosen, FixedOrderSampler(dataset_size=50, batch_size=10).patterns(7), 7)
    assert stopped == pytest.approx(max(np.linalg.norm(matrix[:7, j:7:5].sum(axis=1)) for j in range(5)), rel=1e-12)
    assert stopped <= value


def test_the_optimal_tree_costs_what_all_nodes_cost() -> None:
    patterns = FixedOrderSampler(dataset_size=8, batch_size=2).patterns(16)
    nodes = np.array([[i // 2**k == j for i in range(16)] for k in range(5) for j in range(16 >> k)], np.float64)
    touched = max(np.linalg.norm(nodes[:, pattern].sum(axis=1)) for pattern in patterns)
    assert sensitivity(TreeOptimal(16), patterns, 16) == pytest.approx(touched / math.sqrt(5))
    # The naive tree leaves the right-hand nodes out.
    assert sensitivity(TreeOptimal(16), patterns, 16) >= sensitivity(Tree(16), patterns, 16)


def test_error_is_that_of_the_noise_at_mu_one() -> None:
    sampler = FixedOrderSampler(dataset_size=40, batch_size=10)
    chosen, wanted, patterns = TreeOptimal(T), workloads.momentum(T, 0.9), sampler.patterns(T)
    sigma = sensitivity(chosen, patterns, T)  # mu = sensitivity / sigma = 1
    noise = wanted @ np.linalg.inv(chosen.matrix(T)) @ np.random.default_rng(1).standard_normal((T, 100_000)) * sigma
    assert rmse(chosen, wanted, T, patterns) == pytest.approx(math.sqrt(np.square(noise).mean()), rel=0.01)
    with pytest.raises(ArgumentError, match=r"workload.shape=\(11, 11\): must be \(12, 12\)"):
        rmse(chosen, workloads.ones(11), T, patterns)


@pytest.mark.parametrize("chosen", [Identity(), in_blocks(banded_inverse_square_root(8, 100_000), 1)])
def test_the_error_of_many_steps_takes_no_matrix(chosen: Strategy) -> None:
    for epochs, period in ((1, 300), (3, 100)):
        patterns = [np.arange(first, 300, period) for first in range(period)]
        exact = rmse(chosen, np.asarray(workloads.ones(300)), 300, patterns)
        assert error_of(chosen, workloads.ones(300), epochs) == pytest.approx(exact, rel=1e-9)
    assert error_of(chosen, workloads.ones(100_000)) > 1


def test_a_file_is_known_by_what_it_holds(tmp_path: Path) -> None:
    for name in ("best", "best.NPZ"):
        save(tmp_path / name, BandedToeplitz((1.0, 0.5)))
        assert load(tmp_path / name) == BandedToeplitz((1.0, 0.5))


def test_figures_of_the_page() -> None:
    steps, wanted = 1000, workloads.momentum(1000, 0.9)
    once = [[step] for step in range(steps)]
    ten = FixedOrderSampler(dataset_size=50_000, batch_size=500).patterns(steps)
    page = {
        "tree": (7.03, 52.2, 3.225, 22.66, 168.4),
        "tree-optimal": (3.89, 31.3, 3.755, 14.62, 117.3),
        "square-root": (3.10, 24.1, 5.066, 15.72, 121.9),
    }
    for name, figures in page.items():
        chosen = strategy(name, steps)
        errors = [rmse(chosen, a, steps, p) for p in (once, ten) for a in (workloads.ones(steps), wanted)]
        found = (errors[0], errors[1], sensitivity(chosen, ten, steps), errors[2], errors[3])
        assert found == pytest.approx(figures, rel=2e-3)
