"""Optimal strategies: their certificates against brute force, and published values."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dpcore.strategies import (
    Dense,
    Workload,
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
from scipy.optimize import minimize

from dpcore import strategies
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.stages.strategies.search import matrices
from dpcore.stages.strategies.search.optimize import KINDS


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


@pytest.mark.parametrize("seed", range(3))
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


def test_kinds_are_in_order():
    dense, series = optimal("dense", 128), optimal("banded-inverse", 128, bands=128)
    few = optimal("banded-toeplitz", 128, bands=16).error
    assert dense.error < series.error <= optimal("blt", 128).error < few
    root = error_of(strategies.strategy("square-root", 128), workloads.ones(128))
    assert series.error < root
    assert lower_bound(128) <= dense.error


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
    with pytest.raises(ArgumentError, match="at most 4096 for kind='dense'"):
        optimal("dense", 5000)


def test_an_interrupted_search_keeps_the_best(monkeypatch: pytest.MonkeyPatch):
    def told(_: Any) -> None:
        raise KeyboardInterrupt

    found = optimal("dense", workloads.momentum(40, 0.5), told=told)
    assert not found.finished
    assert found.lower_bound is not None
    assert found.lower_bound <= found.error <= 1.2 * found.lower_bound
    assert optimal("dense", workloads.momentum(40, 0.5)).finished  # it was not kept


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
    with pytest.raises(ArgumentError, match="its name stands for it"):
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
