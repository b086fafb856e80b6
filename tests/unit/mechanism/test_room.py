"""What a run would keep from step to step is refused before it is allocated, in one sentence."""

import re
from typing import Any

import numpy as np
import pytest
from dpcore.noise import IndependentGaussian
from dpcore.queries import ParameterWindow, Point
from dpcore.strategies import BandedToeplitz, NamedStrategy, strategy

import dpcore
from dpcore import filters, methods
from dpcore.errors import ArgumentError
from dpcore.mechanism import vectors
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler, PoissonSampler
from dpcore.spec import free_memory
from dpcore.spec.backends import load_backend
from dpcore.stages.strategies import base
from tests.refused import refused

SHARED: dict[str, Any] = {"lr": 0.1, "noise_multiplier": 1.0, "batch_size": 5}
X0, DATA = np.zeros(10, np.float32), np.zeros((20, 10), np.float32)
ROOM = 2000, "this machine"  # bytes: 50 vectors of 10 float32


class Behind:
    """A query of a caller's own."""

    uses_displacement = False
    lags = 60

    def points(self, step: int) -> tuple[Point, ...]:
        return (Point(1.0, lag=min(step, self.lags)),)


def gradients(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return x - DATA[indices]


def run(method: Any, steps: int = 100, sampler: type = PoissonSampler) -> None:
    dpcore.minimize(gradients, X0, sampler(dataset_size=20, batch_size=5), method, steps=steps)


@pytest.fixture
def _little(monkeypatch) -> None:
    monkeypatch.setattr(vectors, "host_memory", lambda: ROOM)

    def zeros(*_: object, **__: object) -> None:
        raise AssertionError("something was allocated")

    monkeypatch.setattr(load_backend("numpy"), "zeros_like", zeros)


REFUSED = {
    "window=61: keeps 60 vectors of 10 float32 coordinates, which takes 2.34 KiB, but this machine has 1.95 KiB free; "
    "take window=51 at most": methods.pmlf(window=61, **SHARED),
    "window=52: keeps 51 vectors": methods.inner_outer(window=52, **SHARED),
    "lags=60: keeps 60 vectors of 10 float32 coordinates": dpcore.Method(
        update=dpcore.updates.SGD(0.1), query=Behind(), noise=IndependentGaussian(1.0), batch_size=5
    ),
    "length=60: keeps 60 vectors of 10": methods.doppler(filter=filters.OptimalFIR(60), **SHARED),
}


@pytest.mark.usefixtures("_little")
@pytest.mark.parametrize("words", REFUSED)
def test_it_is_refused_before_it_is_allocated(words: str):
    with pytest.raises(ArgumentError, match=re.escape(words)):
        run(REFUSED[words])


@pytest.mark.usefixtures("_little")
def test_a_ring_of_noise_is_refused_too():
    ring = BandedToeplitz(tuple(0.5**k for k in range(61)))
    with pytest.raises(ArgumentError, match="strategy='banded-toeplitz', order=60: keeps 60 vectors of 10 float64"):
        run(methods.memf(strategy=ring, **SHARED), sampler=FixedOrderSampler)


def test_what_fits_is_not_refused(monkeypatch):
    monkeypatch.setattr(vectors, "host_memory", lambda: ROOM)
    run(methods.pmlf(window=51, **SHARED), steps=51)
    monkeypatch.setattr(vectors, "host_memory", lambda: (None, "this machine"))
    run(methods.pmlf(window=61, **SHARED), steps=61)


def test_a_window_beyond_the_run_is_refused_by_the_plan():
    sampler = PoissonSampler(dataset_size=20, batch_size=5)
    with pytest.raises(ArgumentError, match="window=1,000,000,000: must be at most 20, the steps of the run"):
        Plan(methods.pmlf(window=10**9, **SHARED), sampler, 20)
    Plan(methods.pmlf(window=20, **SHARED), sampler, 20)


def test_points_of_no_weight_are_not_counted_one_by_one():
    """Their weights are 0 in float64, and the points that are left are the same to the bit."""
    few, many = ParameterWindow(400, 0.1), ParameterWindow(10**9, 0.1)
    assert few.points(10**9) == many.points(10**9)
    assert 300 < len(many.points(10**9)) < 330
    assert ParameterWindow(10**9, 0.0).points(10**9) == (Point(1.0),)
    slow = ParameterWindow(3000, 0.999).points(10**6)
    c = sum(0.999**j for j in range(3000))
    assert slow == tuple(Point(0.999**j / c, 0.0, j) for j in range(3000))


@pytest.mark.parametrize("name", ["identity", "tree", "tree-optimal", "square-root", "banded-inverse-square-root"])
def test_a_plan_of_more_rows_than_memory_holds_is_refused(name: str, monkeypatch):
    monkeypatch.setattr(base, "host_memory", lambda: (2**30, "this machine"))
    bands = 10**9 if name.startswith("banded") else None
    sampler = FixedOrderSampler(dataset_size=20, batch_size=5)
    method = methods.memf(strategy=NamedStrategy(name, bands), **SHARED)
    with pytest.raises(ArgumentError, match="steps=1,000,000,000: planning correlated noise ") as told:
        Plan(method, sampler, 10**9)
    assert f"({name}) looks at every " in str(told.value)
    assert "this machine has 1 GiB free; take at most " in str(told.value)
    Plan(method, sampler, 40)


def test_a_name_of_more_rows_than_memory_holds_is_refused(monkeypatch):
    monkeypatch.setattr(base, "host_memory", lambda: (3200, "this machine"))
    with pytest.raises(ArgumentError, match=r"\(tree-optimal\) looks at every entry of C, which .* at most 10 steps"):
        strategy("tree-optimal", 11)
    assert strategy("tree-optimal", 10).steps == 10
    refused(ArgumentError, r"\(tree\) looks at every row, which .* at most 100 steps", strategy, "tree", 101)
    assert strategy("tree", 100).steps == 100


def test_memory_that_nobody_knows_refuses_nothing(monkeypatch):
    monkeypatch.setattr(free_memory, "_bounds", lambda: iter(()))
    assert free_memory.host_memory() == (None, "this machine")
    free_memory.check_room(2**60, "x=1: keeps much", "take less", *free_memory.host_memory())
