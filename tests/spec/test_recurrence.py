"""The float64 recurrence against its definition, written as sums."""

import numpy as np
import pytest

from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.recurrence import Floats, advance, response


def by_sums(b: tuple[float, ...], a: tuple[float, ...], inputs: Floats) -> Floats:
    outputs = np.zeros_like(inputs)
    for t in range(len(inputs)):
        forward = sum(b[k] * inputs[t - k] for k in range(len(b)) if t >= k)
        outputs[t] = forward - sum(a[k - 1] * outputs[t - k] for k in range(1, len(a) + 1) if t >= k)
    return outputs


FILTERS = [((0.5,), ()), ((0.2, 0.3), (-0.5,)), ((1.0,), (0.4, -0.2)), ((0.1, -0.2, 0.7), (0.3,))]


@pytest.mark.parametrize(("b", "a"), FILTERS)
def test_one_recurrence(b: tuple[float, ...], a: tuple[float, ...]) -> None:
    inputs = np.random.default_rng(0).normal(size=(12, 3))
    state = [np.zeros(3) for _ in range(max(len(a), len(b) - 1))]
    divided = [advance(x, state, [FilterCoefficients(b, a, 4.0)]) for x in inputs]
    assert np.allclose(divided, by_sums(b, a, inputs) / 4, rtol=1e-13)
    for to_ones in (False, True):
        ones = np.ones(12) if to_ones else np.eye(12)[0]
        assert np.allclose(response(b, (1.0, *a), 12, to_ones=to_ones), by_sums(b, a, ones), rtol=1e-13)
    assert response(b, (1.0, *a), 0).shape == (0,)


def test_several_in_a_row_share_no_state() -> None:
    inputs = np.random.default_rng(1).normal(size=(12, 2))
    chain = [FilterCoefficients(b, a, 2.0) for b, a in FILTERS]
    state = [np.zeros(2) for _ in range(sum(max(len(a), len(b) - 1) for b, a in FILTERS))]
    found = [advance(x, state, chain, divide=False) for x in inputs]
    expected = inputs
    for b, a in FILTERS:
        expected = by_sums(b, a, expected)
    assert np.allclose(found, expected, rtol=1e-12)
