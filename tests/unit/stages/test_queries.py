"""Queries: the points that they ask for, alone and inside of each other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore import methods

from dpcore.stages.queries import (  # isort: skip
    AcceleratedDifference, ParameterWindow, Phase, Plain, Point, Preconditioned, RecursiveDifference, TwoPoint
)  # fmt: skip

leaves = st.sampled_from(
    [Plain(), TwoPoint(0.7, 0.5), TwoPoint(0.4, -1.0), TwoPoint(1.0, 2.0), AcceleratedDifference()]
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(ParameterWindow, st.integers(1, 4), st.sampled_from([0.0, 0.3, 0.9]), st.booleans(), inner),
        st.builds(RecursiveDifference, st.sampled_from([0.0, 0.5, 1.0]), inner),
    ),
    max_leaves=3,
)


def meaning(query, t: int, points: np.ndarray, loss_gradient) -> np.ndarray:
    """What a query stands for, by its definition, from x_0 .. x_t."""
    if isinstance(query, ParameterWindow):
        count = min(query.window, t + 1)
        c = sum(query.beta**j for j in range(count)) if query.normalized else 1.0
        return sum(query.beta**j / c * meaning(query.query, t - j, points, loss_gradient) for j in range(count))
    if isinstance(query, RecursiveDifference):
        now = meaning(query.query, t, points, loss_gradient)
        return now if t == 0 else now - query.decay * meaning(query.query, t - 1, points, loss_gradient)
    if isinstance(query, AcceleratedDifference):
        before = t * loss_gradient(points[t - 1]) if t else 0.0
        return (t + 1) * loss_gradient(points[t]) - before
    if isinstance(query, TwoPoint) and t and query.kappa != 1:
        w = (1 - query.kappa) / (query.kappa * query.gamma)
        d = points[t] - points[t - 1]
        return w * loss_gradient(points[t] + query.gamma * d) + (1 - w) * loss_gradient(points[t])
    return loss_gradient(points[t])


@given(nested, st.integers(0, 7))
def test_points_mean_what_the_query_says(query, t: int) -> None:
    points = np.random.default_rng(0).normal(size=(t + 1, 3))
    total, places = np.zeros(3), [(point.displacement, point.lag) for point in query.points(t)]
    assert len(places) == len(set(places)) > 0  # no place is asked for twice
    for weight, displacement, lag in query.points(t):
        assert lag <= t
        assert lag + int(displacement != 0) <= t  # a displacement ends at the point before
        at = points[t - lag]
        if displacement:
            at = at + displacement * (points[t - lag] - points[t - lag - 1])
            assert query.uses_displacement
            assert lag == 0 or lag + 1 <= query.lags
        assert lag <= query.lags
        total = total + weight * np.sin(at)
    np.testing.assert_allclose(total, meaning(query, t, points, np.sin), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("kappa", "gamma"), [(0.5, 1.0), (2 / 3, 0.5), (0.8, 0.25), (0.4, 1.5), (0.6, 2 / 3)])
def test_a_displaced_point_of_all_the_weight_is_the_only_one(kappa: float, gamma: float) -> None:
    assert TwoPoint(kappa, gamma).points(3) == (Point(1.0, gamma),)


def test_phases() -> None:
    query = Preconditioned(Plain(), unscaled_steps=2, scaled_steps=3)
    u, r, f = Phase.UNSCALED, Phase.REFRESHED, Phase.FROZEN
    assert [query.phase(t) for t in range(11)] == [u, u, r, f, f, u, u, r, f, f, u]
    assert {Preconditioned().phase(t) for t in range(5)} == {r}


@pytest.mark.parametrize("decay", [np.float32(0.5), np.array([0.0, 0.5]), [0, np.float64(0.5)], (0.0, 0.5)], ids=repr)
def test_decays_are_numbers_or_arrays_of_them(decay) -> None:
    method = methods.srg_memf(lr=0.1, decay=decay)
    assert method.query.points(1) == (Point(1.0), Point(-0.5, lag=1))
    assert method.filter.at(1) == 0.5
    stored = method.query.decay
    assert {type(value) for value in (stored if isinstance(stored, tuple) else (stored,))} == {float}
