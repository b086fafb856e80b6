"""Banded inverses: gradients, brute force, the families of one number; and searches that begin with fewer steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dpcore.strategies import (
    BandedInverseToeplitz,
    BandedToeplitz,
    Workload,
    banded_inverse_square_root,
    check_steps,
    check_streaming,
    error_of,
    lower_bound,
    optimal,
    rmse,
    workloads,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import eigvalsh_tridiagonal, sqrtm
from scipy.optimize import approx_fprime

from dpcore import strategies
from dpcore.errors import ArgumentError
from dpcore.stages.strategies.kinds import root
from dpcore.stages.strategies.search import matrices, optimize, series
from dpcore.stages.strategies.search.series import adjoint, divided, fractional_root, lagged


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPCORE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def by_definition(p: np.ndarray, workload: Workload, epochs: int) -> float:
    """The error, with the largest sum of |C^T C| of any pattern."""
    steps = workload.steps
    period = -(-steps // epochs)
    decoder = np.zeros((steps, steps))
    for lag, value in enumerate(p):
        decoder += value * np.eye(steps, k=-lag)
    products = np.linalg.inv(decoder).T @ np.linalg.inv(decoder)
    patterns = [np.arange(first, steps, period) for first in range(period)]
    square = max(np.abs(products[np.ix_(pattern, pattern)]).sum() for pattern in patterns)
    return math.sqrt(np.square(np.asarray(workload) @ decoder).sum() / steps * square)


def agrees(objective: Callable[[Any], Any], point: np.ndarray) -> None:
    slope = approx_fprime(point, lambda x: objective(x)[0], 1e-7)
    np.testing.assert_allclose(objective(point)[1], slope, atol=1e-5 * max(1.0, np.abs(slope).max()))


@pytest.mark.parametrize(("steps", "bands", "epochs", "factor"), [(40, 4, 1, 0.0), (40, 5, 4, 0.9), (37, 37, 3, 0.5)])
@pytest.mark.parametrize("signed", [False, True])
def test_gradients_of_inverses(steps: int, bands: int, epochs: int, factor: float, signed: bool):
    rng = np.random.default_rng(bands)
    wanted = workloads.momentum(steps, factor).series()
    assert wanted is not None
    objective = series._inverse_objective(wanted, steps, epochs, -(-steps // epochs))
    falls = -np.diff(np.log(np.cumsum(root(0.5, bands))))
    agrees(objective, falls + (0.5 if signed else 0.0) * rng.standard_normal(bands - 1))


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (2, 1), (60, 4), (2500, 3)])
def test_gradients_of_buffers(steps: int, epochs: int):
    rng = np.random.default_rng(steps)
    wanted = workloads.momentum(steps, 0.5).series()
    assert wanted is not None
    agrees(series._blt_objective(wanted, 3, steps, epochs, -(-steps // epochs)), rng.standard_normal(6) - 1)


@pytest.mark.parametrize(("steps", "bands", "epochs"), [(50, 7, 4), (50, 50, 1), (700, 600, 1), (300, 100, 1)])
def test_gradients_of_series(steps: int, bands: int, epochs: int):
    rng = np.random.default_rng(bands)
    wanted = workloads.momentum(steps, 0.5).series()
    assert wanted is not None
    objective = series._objective(wanted, steps, epochs, -(-steps // epochs))
    agrees(objective, root(-0.5, bands)[1:] * rng.uniform(0.8, 1.0, bands - 1))


@given(st.integers(1, 24), st.integers(1, 24), st.integers(1, 4), st.sampled_from([0.0, 0.5, 0.9]))
def test_errors_are_those_of_the_matrices(steps: int, bands: int, epochs: int, factor: float):
    bands, epochs = min(bands, steps), min(epochs, steps)
    workload = workloads.momentum(steps, factor)
    found = optimal("banded-inverse", workload, epochs=epochs, keep=False, bands=bands)
    period = -(-steps // epochs)
    patterns = [np.arange(first, steps, period) for first in range(period)]
    assert isinstance(found.strategy, BandedInverseToeplitz)
    assert len(found.strategy.series) <= bands
    assert found.error == pytest.approx(rmse(found.strategy, workload, steps, patterns), rel=1e-9)
    assert found.error == pytest.approx(by_definition(np.array(found.strategy.series), workload, epochs), rel=1e-7)
    assert found.lower_bound is not None
    assert found.lower_bound <= found.error * (1 + 1e-9)
    assert found.error <= error_of(banded_inverse_square_root(bands, steps), workload, epochs) * (1 + 1e-12)
    assert found.error <= of_one_number(bands, workload, epochs) * (1 + 1e-12)


def of_one_number(bands: int, workload: Workload, epochs: int) -> float:
    """The error of the best family of one number, where the search for a banded inverse begins."""
    found = fractional_root(workload, bands, epochs, -(-workload.steps // epochs))
    return error_of(BandedInverseToeplitz(tuple(found.tolist()), workload.steps), workload, epochs)


@given(st.integers(0, 2**32 - 1), st.integers(2, 11), st.integers(1, 4))
def test_no_signs_move_a_banded_inverse_further(seed: int, steps: int, epochs: int):
    rng = np.random.default_rng(seed)
    epochs = min(epochs, steps)
    period = -(-steps // epochs)
    p = np.concatenate([[1.0], rng.uniform(-1, 1, min(3, steps) - 1)])
    chosen = BandedInverseToeplitz(tuple(p.tolist()), steps)
    workload, matrix = workloads.ones(steps), chosen.matrix(steps)
    square = math.sqrt(np.square(np.asarray(workload) @ np.linalg.inv(matrix)).sum() / steps)
    moved = max(
        float(np.linalg.norm(matrix[:, first::period] @ np.array(signs)))
        for first in range(period)
        for signs in itertools.product([1.0, -1.0], repeat=len(range(first, steps, period)))
    )
    error = error_of(chosen, workload, epochs)
    assert error >= square * moved * (1 - 1e-9)
    assert error == pytest.approx(by_definition(p, workload, epochs), rel=1e-7)


@pytest.mark.parametrize("epochs", [1, 4])
def test_families_of_one_number_against_a_grid(epochs: int):
    workload = workloads.ones(64)
    grid = 1 - np.geomspace(1e-3, 1, 400)

    def least(series: Callable[[float], Any]) -> float:
        return min(error_of(BandedInverseToeplitz(tuple(series(x)), 64), workload, epochs) for x in grid)

    assert of_one_number(2, workload, epochs) == pytest.approx(least(lambda x: (1.0, -x)), rel=1e-4)
    for bands in (3, 8):
        found = of_one_number(bands, workload, epochs)
        assert found == pytest.approx(least(lambda x, bands=bands: root(x, bands)), rel=1e-4)
        assert found <= error_of(banded_inverse_square_root(bands, 64), workload, epochs)
        assert found > optimal("banded-inverse", workload, epochs=epochs, bands=bands).error


def test_all_bands_reach_the_best_series_and_more_bands_are_better():
    errors = [optimal("banded-inverse", 128, bands=bands).error for bands in (1, 2, 4, 16, 64, 128)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] == pytest.approx(error_of(strategies.strategy("identity", 128), workloads.ones(128)))
    series = optimize.toeplitz(workloads.ones(128), 128, 1, 128)
    assert errors[-1] == pytest.approx(error_of(BandedToeplitz(tuple(series.tolist())), workloads.ones(128)), rel=1e-6)


def test_they_stream_and_are_kept(tmp_path: Path):
    found = optimal("banded-inverse", workloads.momentum(36, 0.8), epochs=3)
    check_steps(found.strategy, 36)
    check_streaming(found.strategy, 36)
    assert len(found.strategy.rows(35)) == len(found.strategy.series)  # type: ignore[attr-defined]
    strategies.save(tmp_path / "c.npz", found.strategy)
    assert strategies.load(tmp_path / "c.npz") == found.strategy
    again = optimal("banded-inverse", workloads.momentum(36, 0.8), epochs=3)
    assert (again.seconds, again.strategy) == (found.seconds, found.strategy)


def test_nonsense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with pytest.raises(ArgumentError, match="must be constant along its diagonals"):
        optimal("banded-inverse", workloads.learning_rates(np.linspace(1, 2, 20)))
    with pytest.raises(ArgumentError, match="bands=17: must be at most 16, the number of steps"):
        optimal("banded-inverse", 16, bands=17)

    def interrupted(*_: Any) -> float:
        raise KeyboardInterrupt

    monkeypatch.setenv("DPCORE_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(series, "summed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimal("banded-inverse", 16)
    assert not list(strategies.cache_folder().glob("*.npz"))
    assert optimal("banded-inverse", 16).finished


def test_series_and_their_transposes():
    rng = np.random.default_rng(0)
    for size, count in ((50, 3), (40_000, 3), (2000, 700)):
        by = np.concatenate([[1.0], rng.uniform(-1, 1, count - 1) / count])
        x, y = rng.standard_normal((2, size))
        assert divided(x, by) @ y == pytest.approx(x @ adjoint(y, by), rel=1e-9)
        np.testing.assert_allclose(np.convolve(by, divided(x, by))[:size], x, atol=1e-9)
        full = [x[lag:] @ y[: size - lag] for lag in range(min(100, size))]
        for lags in (20, len(full)):
            np.testing.assert_allclose(lagged(x, y, lags), full[:lags], atol=1e-8)
    np.testing.assert_allclose(series.square_root(np.array([1.0, -1.0]), 3000), root(-0.5, 3000), rtol=1e-9)


@pytest.mark.parametrize(("epochs", "factor"), [(1, 0.0), (1, 0.9), (3, 0.0)])
def test_a_search_that_begins_with_fewer_steps_ends_where_one_without_does(
    epochs: int, factor: float, monkeypatch: pytest.MonkeyPatch
):
    workload, period = workloads.momentum(12_000, factor), 12_000 // epochs
    monkeypatch.setattr(series, "_INVERSE_SHORTEST", 1000)
    bands = [("banded-toeplitz", {"bands": 40}), ("banded-inverse", {"bands": 5})]
    for kind, settings in [*bands, ("blt", {"buffers": 3})]:
        quick = optimize.solved(kind, workload, epochs, period, settings)
        with monkeypatch.context() as patch:
            patch.setattr(series, "_SHORTEST", 10**9)
            patch.setattr(series, "_SHORT", 10**9)
            patch.setattr(series, "_INVERSE_SHORTEST", 10**9)
            slow = optimize.solved(kind, workload, epochs, period, settings)
        errors = [error_of(optimize.strategy_of(kind, found, 12_000), workload, epochs) for found in (quick, slow)]
        assert errors[0] <= errors[1] * (1 + 1e-6), kind


def test_the_bound_without_eigenvectors():
    rng = np.random.default_rng(0)
    for workload in (
        workloads.ones(200),
        workloads.weight_decay(90, 0.3),
        workloads.learning_rates(rng.uniform(0.1, 1, 70)),
    ):
        inverse_of = np.linalg.inv(np.asarray(workload))
        diagonal = np.diagonal(inverse_of @ inverse_of.T).copy()
        off = np.diagonal(inverse_of @ inverse_of.T, 1).copy()
        expected = np.diagonal(np.linalg.inv(sqrtm(inverse_of @ inverse_of.T).real))
        np.testing.assert_allclose(matrices._root_diagonal(diagonal, off), expected, rtol=1e-6)
        dense = optimal("dense", workload, keep=False)
        assert lower_bound(workload) <= dense.error
        assert lower_bound(workload) == pytest.approx(dense.error, rel=1e-4)
        exact = (eigvalsh_tridiagonal(diagonal, off) ** -0.5).sum()
        assert exact**2 / workload.steps**2 <= dense.error**2 * (1 + 1e-9)


def test_learning_rates_that_fall_far_are_certified():
    found = optimal("dense", workloads.learning_rates(np.linspace(1, 0.01, 512)), keep=False)
    assert found.above is not None
    assert 0 <= found.above <= 5e-6


def test_what_is_found_for_fewer_steps_is_a_start_near_the_end():
    points = np.array([[1.0, -2.0], [4.0, 0.0], [9.0, 3.0], [16.0, 7.0]])
    np.testing.assert_allclose(series._extrapolated(list(points[:3])), points[3])
    np.testing.assert_allclose(series._extrapolated(list(points[:2])), 2 * points[1] - points[0])
