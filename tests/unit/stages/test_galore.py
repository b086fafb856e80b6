"""The projection of GaLore."""

from __future__ import annotations

import numpy as np
import pytest

from dpcore.errors import ArgumentError
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


def test_a_matrix_of_low_rank_is_kept_whole(rng) -> None:
    gradient = rng.normal(size=(8, 2)) @ rng.normal(size=(2, 5))
    p = GaLore(2).projection(gradient)
    np.testing.assert_allclose(p @ (p.T @ gradient), gradient, atol=1e-12)


def test_fewer_columns_than_the_rank_leave_columns_of_zeros(rng) -> None:
    p = GaLore(3).projection(rng.normal(size=(8, 2)))
    assert p.shape == (8, 3)
    assert (p[:, 2] == 0).all()
    np.testing.assert_allclose(p[:, :2].T @ p[:, :2], np.eye(2), atol=1e-12)


def test_a_gradient_that_is_not_finite_has_a_projection(rng) -> None:
    gradient = rng.normal(size=(4, 4))
    gradient[1, 2] = np.inf
    np.testing.assert_array_equal(GaLore(2).projection(gradient), np.eye(4, 2))


def test_only_matrices_of_more_rows_than_the_rank_are_projected() -> None:
    galore = GaLore(4)
    assert galore.projects((5, 2))
    assert not any(map(galore.projects, [(4, 9), (9,), (9, 0), (9, 2, 2), ()]))


@pytest.mark.parametrize(("settings", "words"), [({"rank": 0}, "rank=0"), ({"rank": 2, "every": 0}, "every=0")])
def test_bad_settings(settings: dict, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        GaLore(**settings)
    assert words in str(caught.value)
