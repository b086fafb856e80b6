"""The variance of the noise behind filters and strategies, against the matrices written out."""

from __future__ import annotations

import numpy as np
import pytest

from dpcore.plan.noise_variance import noise_variances
from dpcore.stages.filters import NAMED_FILTERS, Accumulation, Averaging, Chain, Identity, ScalarKalman, named_filter
from dpcore.stages.strategies import from_matrix, strategy
from dpcore_numpy import recurrence

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


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("kind", [None, "identity", "tree", "square-root", "tree-optimal", "dense", "banded"], ids=str)
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
