"""The projection of GaLore."""

from __future__ import annotations

import numpy as np
import pytest

from dpcore.stages.updates.galore import GaLore


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_columns_span_the_leading_left_singular_space(dtype, rng) -> None:
    gradient = rng.normal(size=(8, 5)).astype(dtype)
    p = GaLore(3).projection(gradient)
    assert p.dtype == dtype
    assert p.shape == (8, 3)
    np.testing.assert_allclose(p.T @ p, np.eye(3), atol=1e-6)
    values, vectors = np.linalg.eigh(gradient.astype(np.float64) @ gradient.astype(np.float64).T)
    leading = vectors[:, np.argsort(values)[::-1][:3]]
    np.testing.assert_allclose(p @ p.T, leading @ leading.T, atol=1e-5)


def test_fewer_columns_than_the_rank_leave_columns_of_zeros(rng) -> None:
    p = GaLore(3).projection(rng.normal(size=(8, 2)))
    assert p.shape == (8, 3)
    assert (p[:, 2] == 0).all()
    np.testing.assert_allclose(p[:, :2].T @ p[:, :2], np.eye(2), atol=1e-12)


def test_a_gradient_that_is_not_finite_has_a_projection(rng) -> None:
    gradient = rng.normal(size=(4, 4))
    gradient[1, 2] = np.inf
    np.testing.assert_array_equal(GaLore(2).projection(gradient), np.eye(4, 2))


@pytest.mark.parametrize("shape", [(8, 5), (8, 2)])
def test_a_refresh_keeps_the_basis_as_far_as_it_can(shape: tuple[int, int], rng) -> None:
    """The same subspace under other signs, another order or rotation gives the old basis; a moved one the nearest."""
    galore = GaLore(3)
    gradient = rng.normal(size=shape)
    old = galore.projection(gradient)
    spread = np.diag(rng.uniform(0.5, 2, 3)) @ np.linalg.qr(rng.normal(size=(3, 3)))[0]
    for values in (old, old[:, ::-1] * 2.0 ** np.arange(3), -old, old @ spread):
        if shape[1] == 5:
            again = galore.projection(values @ rng.normal(size=(3, 5)), old)
            np.testing.assert_allclose(again, old, atol=1e-12)
    moved = galore.projection(gradient + 0.3 * rng.normal(size=shape), old)
    count = min(3, shape[1])
    assert (moved[:, count:] == 0).all()
    np.testing.assert_allclose(moved.T @ moved, np.diag(np.arange(3) < count), atol=1e-12)
    for _ in range(50):
        turn = np.linalg.qr(rng.normal(size=(count, count)))[0]
        assert np.linalg.norm(moved - old) <= np.linalg.norm(moved[:, :count] @ turn - old[:, :count]) + 1e-12


def test_only_matrices_of_more_rows_than_the_rank_are_projected() -> None:
    galore = GaLore(4)
    assert galore.projects((5, 2))
    assert not any(map(galore.projects, [(4, 9), (9,), (9, 0), (9, 2, 2), ()]))
