"""Optimal strategies, recommended ones and workloads: certificates against brute force, and published values."""

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
    Dense,
    Identity,
    Recommended,
    Workload,
    banded_inverse_square_root,
    candidates,
    check_steps,
    check_streaming,
    error_of,
    lower_bound,
    optimal,
    recommend,
    rmse,
    sensitivity,
    workloads,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import eigvalsh_tridiagonal, sqrtm
from scipy.optimize import approx_fprime, minimize

from dpcore import methods, strategies
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.plan.plan import Plan
from dpcore.sampling import CyclicPoissonSampler, FixedOrderSampler, RandomAllocationSampler
from dpcore.stages.strategies.kinds import root
from dpcore.stages.strategies.search import matrices, optimize, series
from dpcore.stages.strategies.search.optimize import KINDS
from dpcore.stages.strategies.search.series import adjoint, divided, fractional_root, lagged
from tests.depth import chosen
from tests.refused import refused


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPCORE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def some(steps: int, rng: np.random.Generator) -> Workload:
    kinds = [
        workloads.ones(steps), workloads.momentum(steps, 0.9), workloads.weight_decay(steps, 0.2),
        workloads.learning_rates(rng.uniform(0.2, 1.0, steps)), workloads.srg(steps, 0.3, 0.5),
    ]  # fmt: skip
    return kinds[rng.integers(len(kinds))]


def norm(values: np.ndarray, order: float) -> float:
    top = float(values.max())
    with np.errstate(under="ignore"):
        return top * float(np.linalg.norm(values / top, order))


def brute(workload: Workload, patterns: list[np.ndarray], rng: np.random.Generator) -> float:
    """The least error that a generic search over all lower-triangular C finds, by the definition of the error."""
    steps, a = workload.steps, np.asarray(workload)
    place = np.tril_indices(steps)

    signed = [(list(p), np.array(signs)) for p in patterns for signs in itertools.product([1, -1], repeat=len(p))]

    def error(free: np.ndarray, sharp: float) -> float:
        """With maxima replaced by norms of order `sharp`, which are smooth; infinite for the error itself."""
        c = np.zeros((steps, steps))
        c[place] = free
        np.fill_diagonal(c, np.exp(np.diagonal(c)))
        rows = np.square(a @ np.linalg.inv(c)).sum(axis=1)
        moved = np.array([np.square(c[:, p] @ signs).sum() for p, signs in signed])
        return math.sqrt(float(rows.mean()) * norm(moved, sharp))

    found = []
    for _ in range(2):
        free = 0.1 * rng.standard_normal(len(place[0]))
        for sharp in (4, 16, 64, 256, 1024, 4096):
            free = minimize(error, free, args=(sharp,), method="BFGS", options={"gtol": 1e-9}).x
        found.append(error(free, np.inf))
    return min(found)


@pytest.mark.parametrize("seed", range(chosen(2, 6)))
def test_no_search_is_below_the_bound_nor_much_below_the_optimum(seed: int):
    rng = np.random.default_rng(seed)
    workload = some(4, rng)
    found = optimal("dense", workload, tolerance=1e-4)
    assert found.lower_bound is not None
    best = brute(workload, [np.array([t]) for t in range(4)], rng)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert best == pytest.approx(found.error, rel=2e-3)
    matrix, once = found.strategy.matrix(4), [[t] for t in range(4)]
    assert rmse(Dense(matrix), workload, 4, once) == pytest.approx(found.error, rel=1e-9)


@pytest.mark.parametrize("seed", range(2))
def test_several_epochs_against_brute_force(seed: int):
    rng = np.random.default_rng(seed)
    workload = some(4, rng)
    found = optimal("dense", workload, epochs=2, tolerance=1e-4)
    assert found.lower_bound is not None
    patterns = [np.array([0, 2]), np.array([1, 3])]
    best = brute(workload, patterns, rng)
    assert found.lower_bound <= best * (1 + 1e-9)
    assert found.error == pytest.approx(best, rel=5e-3)
    assert rmse(found.strategy, workload, 4, patterns) == pytest.approx(found.error, rel=1e-9)


@settings(max_examples=max(30, settings().max_examples))
@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_every_bracket_is_below_every_strategy(steps: int, seed: int):
    rng = np.random.default_rng(seed)
    workload = some(steps, rng)
    c = np.tril(rng.standard_normal((steps, steps)), -1) + np.diag(rng.uniform(0.5, 2, steps))
    error = error_of(Dense(c), workload)
    for bracket, _ in zip(matrices.brackets(workload), range(4), strict=False):
        assert math.sqrt(bracket.lower_bound) <= error * (1 + 1e-9)
        assert bracket.lower_bound <= bracket.squared_error * (1 + 1e-9)
        own = Dense(matrices.factor(bracket.square))
        assert error_of(own, workload) ** 2 == pytest.approx(bracket.squared_error, rel=1e-7)


@pytest.mark.parametrize("steps", [1, 2, 16, 258, 1024])
def test_prefix_sums_are_certified(steps: int):
    found = optimal("dense", steps)
    assert found.above is not None
    assert 0 <= found.above <= 5e-6
    if steps == 1024:
        assert found.error**2 <= 8.7348  # jax-privacy 2.0.0 stops at 8.7613 after 210 s
    below = math.log(steps) / math.pi  # arXiv 2509.14334, for many steps
    assert below + 0.701 <= found.error <= below + 0.748 + 0.3 / math.sqrt(steps)


def test_values_of_jax_privacy():
    # matrix_factorization of jax-privacy 2.0.0 on prefix sums, squared errors (../shared/algorithms.md 12).
    for buffers, value in ((3, 9.355469), (4, 9.347491)):
        assert optimal("blt", 1024, buffers=buffers).error ** 2 <= value * (1 + 1e-6)
    assert optimal("dense", 258, epochs=6).error ** 2 <= 44.43385


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_found_streams_what_it_says(kind: str, epochs: int, tmp_path: Path):
    workload = workloads.momentum(36, 0.8)
    found = optimal(kind, workload, epochs=epochs, tolerance=1e-3)
    check_steps(found.strategy, 36)
    check_streaming(found.strategy, 36)
    patterns = [np.arange(first, 36, 36 // epochs) for first in range(36 // epochs)]
    assert rmse(found.strategy, workload, 36, patterns) == pytest.approx(found.error, rel=1e-9)
    assert found.lower_bound is not None
    assert found.lower_bound <= found.error
    strategies.save(tmp_path / "c.npz", found.strategy)
    again = strategies.load(tmp_path / "c.npz")
    np.testing.assert_array_equal(again.matrix(36), found.strategy.matrix(36))
    assert again.describe() == found.strategy.describe()


@pytest.mark.parametrize(("steps", "epochs"), [(1, 1), (2, 1), (2, 2), (3, 2), (5, 5), (6, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_few_steps_and_workloads_that_change(kind: str, steps: int, epochs: int):
    found = [optimal(kind, steps, epochs=epochs)]
    if kind == "dense":
        found.append(optimal(kind, workloads.learning_rates(np.linspace(1, 0.5, steps)), epochs=epochs))
    for each in found:
        assert each.lower_bound is not None
        assert each.lower_bound <= each.error * (1 + 1e-9)
        check_streaming(each.strategy, steps)


def test_many_steps():
    found = optimal("blt", 100_000)
    assert found.above is not None
    assert found.above < 0.05
    assert optimal("banded-toeplitz", 100_000).lower_bound == found.lower_bound
    with pytest.raises(ArgumentError, match="at most 4096"):
        lower_bound(workloads.momentum(5000, 0.9))
    refused(ArgumentError, "at most 4096 for kind='dense'", optimal, "dense", 5000)


def test_solved_problems_are_kept_and_damage_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DPCORE_CACHE_DIR", str(tmp_path))
    first = optimal("blt", 64, buffers=2)
    files = sorted(strategies.cache_folder().glob("*.npz"))
    assert len(files) == 1
    assert optimal("blt", 64, buffers=2).seconds == first.seconds
    for path in files:
        path.write_bytes(path.read_bytes()[:-40])
    assert optimal("blt", 64, buffers=2).error == pytest.approx(first.error)
    for path in files:
        path.write_bytes(b"not a file of NumPy")
    assert optimal("blt", 64, buffers=2).error == pytest.approx(first.error)
    (tmp_path / "nowhere").write_text("")
    monkeypatch.setenv("DPCORE_CACHE_DIR", str(tmp_path / "nowhere"))
    assert optimal("blt", 64, buffers=2).error == pytest.approx(first.error)


def test_nonsense(tmp_path: Path):
    for words, options in (
        ("kind='dens'", {"kind": "dens"}), ("epochs=70: must be at most 64", {"epochs": 70}),
        ("bands=40: must be at most 32", {"kind": "banded-toeplitz", "bands": 40, "epochs": 2}),
        ("bands=4: is for kind='banded-toeplitz'", {"bands": 4}), ("buffers=4: is for kind='blt'", {"buffers": 4}),
        ("tolerance=0", {"tolerance": 0}),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=words):
            optimal(options.pop("kind", "dense"), 64, **options)
    with pytest.raises(ArgumentError, match="constant along its diagonals"):
        optimal("blt", workloads.learning_rates(np.linspace(1, 2, 20)))
    for bad in ("prefix", 3.5, None):
        with pytest.raises(ArgumentTypeError, match=r"workload=.*: must be a number of steps"):
            optimal("dense", bad)  # type: ignore[arg-type]
    assert optimal("dense", np.int64(4)).error == optimal("dense", 4).error
    with pytest.raises(ArgumentError, match="its name defines it"):
        strategies.save(tmp_path / "tree.npz", strategies.strategy("tree", 8))
    with pytest.raises(DataError, match="cannot be read"):
        strategies.load(tmp_path / "nothing.npz")
    (tmp_path / "text.txt").write_text("1 0\n1 1\n")
    np.testing.assert_allclose(strategies.load(tmp_path / "text.txt").matrix(2) * math.sqrt(2), [[1, 0], [1, 1]])
    (tmp_path / "text.txt").write_text("1 1\n1 1\n")
    with pytest.raises(DataError, match="above the diagonal"):
        strategies.load(tmp_path / "text.txt")
    for content in (b"", b"PK", b"1 2\n3\n"):
        for name in ("a.npz", "a.npy", "a.txt"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(DataError, match="strategy"):
                strategies.load(tmp_path / name)


# Banded inverses: gradients, brute force, the families of one number; and searches that begin with fewer steps.


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


@pytest.mark.parametrize(("epochs", "factor"), chosen([(1, 0.9), (3, 0.0)], [(1, 0.0), (1, 0.9), (3, 0.0), (3, 0.9)]))
def test_a_search_that_begins_with_fewer_steps_ends_where_one_without_does(
    epochs: int, factor: float, monkeypatch: pytest.MonkeyPatch
):
    workload, period = workloads.momentum(12_000, factor), 12_000 // epochs
    monkeypatch.setattr(series, "_INVERSE_SHORTEST", 1000)
    bands = [("banded-toeplitz", {"bands": 40}), ("banded-inverse", {"bands": 5})]
    for kind, given_settings in [*bands, ("blt", {"buffers": 3})]:
        quick = optimize.solved(kind, workload, epochs, period, given_settings)
        with monkeypatch.context() as patch:
            patch.setattr(series, "_SHORTEST", 10**9)
            patch.setattr(series, "_SHORT", 10**9)
            patch.setattr(series, "_INVERSE_SHORTEST", 10**9)
            slow = optimize.solved(kind, workload, epochs, period, given_settings)
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


def test_what_is_found_for_fewer_steps_is_a_start_near_the_end():
    points = np.array([[1.0, -2.0], [4.0, 0.0], [9.0, 3.0], [16.0, 7.0]])
    np.testing.assert_allclose(series._extrapolated(list(points[:3])), points[3])
    np.testing.assert_allclose(series._extrapolated(list(points[:2])), 2 * points[1] - points[0])


# Workloads: the matrices that their recurrences stand for.


T = 7


def lower_series(series: list[float]) -> np.ndarray:
    return np.array([[series[t - s] if s <= t else 0.0 for s in range(T)] for t in range(T)])


def test_each_is_its_definition():
    ones = lower_series([1.0] * T)
    heavy = lower_series([0.9**k for k in range(T)])
    np.testing.assert_allclose(workloads.ones(T), ones)
    np.testing.assert_allclose(workloads.momentum(T, 0.9), ones @ heavy)
    np.testing.assert_allclose(workloads.weight_decay(T, 0.1), heavy)
    np.testing.assert_allclose(workloads.exponential_average(T, 0.9), 0.1 * heavy @ ones)
    np.testing.assert_allclose(workloads.srg(T, 0.9, 0.5), ones @ heavy @ lower_series([0.5**k for k in range(T)]))
    rates = np.linspace(1.0, 0.1, T)
    np.testing.assert_allclose(workloads.learning_rates(rates), ones * rates)
    factors = np.linspace(0.0, 1.0, T)
    expected = np.eye(T)
    for t in range(1, T):
        expected[t, :t] = factors[t] * expected[t - 1, :t]
    np.testing.assert_allclose(workloads.accumulation(T, factors), expected)


@given(st.integers(1, 9), st.data())
def test_products_are_those_of_the_matrices(steps: int, data: st.DataObject):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))

    def some(bands: int) -> Workload:
        inverse = rng.standard_normal((min(bands, steps), steps))
        inverse[0] = 1 + rng.random(steps)
        return Workload(inverse)

    first, second = some(data.draw(st.integers(1, 4))), some(data.draw(st.integers(1, 4)))
    np.testing.assert_allclose(first @ second, np.asarray(first) @ np.asarray(second), rtol=1e-6, atol=1e-8)
    vector = rng.standard_normal(steps)
    np.testing.assert_allclose(first @ vector, np.asarray(first) @ vector, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(np.asarray(first), np.tril(first))


def test_nonsense_of_workloads():
    refused(ArgumentError, "rates: must be positive", workloads.learning_rates, [1.0, 0.0])
    refused(ArgumentError, "steps=0", workloads.ones, 0)
    refused(ArgumentError, r"decay=1\.5", workloads.weight_decay, 3, 1.5)
    with pytest.raises(ArgumentError, match="inverse: the diagonal entry"):
        Workload(np.array([[1.0, 0.0]]))
    with pytest.raises(ArgumentError, match=r"inverse.shape=\(3, 2\)"):
        Workload(np.ones((3, 2)))
    with pytest.raises(ArgumentError, match="steps=3: must be 2"):
        _ = workloads.ones(2) @ workloads.ones(3)


# The strategy that is recommended: it fits the memory, it is the best that does, and runs take it by themselves.


@pytest.mark.parametrize(("steps", "epochs", "vectors", "rows"), [
    (60, 1, 4, 1), (60, 6, 4, 1), (60, 6, 1, 1), (60, 6, 0, 4), (60, 1, 0, 1), (2, 2, 4, 1), (1, 1, 4, 1), (9, 9, 3, 2),
])  # fmt: skip
def test_what_is_recommended_fits_and_is_near_the_best_that_fits(
    steps: int, epochs: int, vectors: int, rows: int
) -> None:
    found = candidates(workloads.momentum(steps, 0.9), epochs=epochs, vectors=vectors, rows=rows)
    patterns = FixedOrderSampler(dataset_size=-(-steps // epochs), batch_size=1).patterns(steps)
    wanted = np.asarray(workloads.momentum(steps, 0.9))
    for one in found:
        assert one.cost == strategies.streaming_cost(one.strategy, steps)
        assert one.cost.vectors <= vectors
        assert one.cost.rows_drawn <= max(rows, 1)
        assert one.error == pytest.approx(strategies.rmse(one.strategy, wanted, steps, patterns), rel=1e-9)
    assert found[0].error <= 1.01 * min(one.error for one in found)
    assert found[0].error <= next(one.error for one in found if one.kind == "identity")
    fewer = [one for one in found if one.error <= 1.01 * min(two.error for two in found)]
    assert found[0].cost.vectors == min(one.cost.vectors for one in fewer)


def test_bands_are_limited_where_sampling_amplifies_them() -> None:
    sampler = CyclicPoissonSampler(dataset_size=1000, batch_size=20, groups=3)
    plan = Plan(methods.memf(lr=0.1, noise_multiplier=1.0), sampler, 60)
    assert strategies.sensitivity(plan.method.noise.strategy, [[0], [30]], 60) == pytest.approx(1.0)
    assert plan.method.noise.strategy.order == 2  # three bands
    assert plan.event.participations == 20


def test_memf_and_srg_memf_take_it_for_their_own_workload_and_participation() -> None:
    sampler = FixedOrderSampler(dataset_size=1000, batch_size=50)  # epochs of 20 steps
    for method, wanted in (
        (methods.memf(lr=0.1, noise_multiplier=1.0), workloads.momentum(80, 0.9)),
        (methods.memf(lr=0.1, noise_multiplier=1.0, base="sgd"), workloads.ones(80)),
        (methods.memf(lr=0.1, noise_multiplier=1.0, base="adam"), workloads.ones(80)),
        (methods.memf(lr=0.1, noise_multiplier=1.0, momentum=0.5), workloads.momentum(80, 0.5)),
        (methods.srg_memf(lr=0.1, noise_multiplier=1.0), workloads.srg(80, math.exp(-2.5), 0.9)),
    ):
        chosen = Plan(method, sampler, 80).method.noise.strategy
        assert chosen == recommend(wanted, epochs=4).strategy
        assert strategies.error_of(chosen, wanted, 4) < 0.7 * strategies.error_of(Identity(), wanted, 4)


def test_it_is_better_than_the_banded_square_root_that_was_the_default() -> None:
    for steps, epochs in ((120, 1), (400, 10), (1000, 1)):
        before = strategies.strategy("banded-inverse-square-root", steps, bands=16)
        wanted = workloads.momentum(steps, 0.9)
        assert recommend(wanted, epochs=epochs).error < 0.95 * strategies.error_of(before, wanted, epochs)


def test_it_says_what_it_is_and_runs_of_any_sampler_that_covers_it() -> None:
    assert Recommended(momentum=0.9).describe() == {
        "kind": "recommended", "vectors": 4, "momentum": 0.9, "decay": None,
    }  # fmt: skip
    sampler = RandomAllocationSampler(dataset_size=100, batch_size=10)
    plan = Plan(methods.memf(lr=0.1, noise_multiplier=1.0), sampler, 30)
    chosen = plan.method.noise.strategy
    blocks = [[i, j, k] for i in range(10) for j in range(10, 20) for k in range(20, 30)]
    assert plan.run_sensitivity >= sensitivity(chosen, blocks, 30) - 1e-12


def test_bad_input() -> None:
    refused(ArgumentError, "vectors=-1", candidates, 10, vectors=-1)
    refused(ArgumentError, "rows=0", candidates, 10, rows=0)
    refused(ArgumentError, "epochs=11", candidates, 10, epochs=11)
    refused(ArgumentError, "bands=0", candidates, 10, bands=0)
