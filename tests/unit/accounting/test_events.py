"""Events: what they accept, and that a statement written to JSON gives the same event back."""

import json
import math
from collections.abc import Callable

import pytest

from dpcore.accounting import Adjacency, Composed, Event, FixedSizeSampledGaussian, Gaussian, MatrixGaussian, epsilon
from dpcore.accounting.events import (
    CyclicPoissonSampledGaussian,
    NonPrivate,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    SelfComposed,
    TruncatedPoissonSampledGaussian,
)
from dpcore.errors import ArgumentError, ArgumentTypeError
from tests.refused import refused

GAUSSIAN = Gaussian(1.5, 4, Adjacency.ZERO_OUT)
MATRIX = MatrixGaussian(1.5, 1.25, 100, "tree(steps=100)")
POISSON = PoissonSampledGaussian(0.01, 1.1, 1000)
FIXED_SIZE = FixedSizeSampledGaussian(100, 10, 0.5, 7)
NOISELESS = NonPrivate("the noise was given by the caller")
SINGLE = [GAUSSIAN, MATRIX, POISSON, FIXED_SIZE, NOISELESS]
EVENTS = [*SINGLE, Composed((POISSON, GAUSSIAN, MATRIX, NOISELESS)), Composed(())]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_survives_json(event: Event) -> None:
    again = Event.from_dict(json.loads(json.dumps(event.to_dict())))
    assert again == event
    assert type(again) is type(event)
    assert again.adjacency is event.adjacency


def test_dict_holds_every_field() -> None:
    poisson = {"event": "PoissonSampledGaussian", "sample_rate": 0.01, "noise_multiplier": 1.1, "steps": 1000}
    assert POISSON.to_dict() == poisson
    assert GAUSSIAN.to_dict()["adjacency"] == "zero-out"
    assert MATRIX.to_dict() == {
        "event": "MatrixGaussian", "noise_multiplier": 1.5, "sensitivity": 1.25, "steps": 100,
        "strategy": "tree(steps=100)", "adjacency": "zero-out",
    }  # fmt: skip


def test_adjacency_of_each() -> None:
    assert POISSON.adjacency is Adjacency.ADD_REMOVE
    assert FIXED_SIZE.adjacency is Adjacency.REPLACE_ONE
    assert Gaussian(1.0).adjacency is Adjacency.ADD_REMOVE
    assert Gaussian(1.0, adjacency="replace-one").adjacency is Adjacency.REPLACE_ONE  # type: ignore[arg-type]
    assert NOISELESS.adjacency is None
    assert MATRIX.adjacency is Adjacency.ZERO_OUT


def test_composition_has_one_adjacency() -> None:
    assert Composed((POISSON, POISSON)).adjacency is Adjacency.ADD_REMOVE
    assert Composed((POISSON, GAUSSIAN)).adjacency is Adjacency.ZERO_OUT
    assert Composed((POISSON, MATRIX)).adjacency is Adjacency.ZERO_OUT
    assert Composed((POISSON, NOISELESS)).adjacency is Adjacency.ADD_REMOVE
    assert Composed((FIXED_SIZE, FIXED_SIZE)).adjacency is Adjacency.REPLACE_ONE
    for other in (POISSON, GAUSSIAN, MATRIX):
        refused(ArgumentError, "replace-one cannot be composed", Composed, (FIXED_SIZE, other))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1])
def test_refuses_bad_noise_multipliers(bad: float) -> None:
    for make in (
        lambda: Gaussian(bad),
        lambda: MatrixGaussian(bad, 1.0, 1, "identity()"),
        lambda: PoissonSampledGaussian(0.1, bad, 1),
        lambda: FixedSizeSampledGaussian(10, 1, bad, 1),
    ):
        refused(ArgumentError, "noise_multiplier=", make)


@pytest.mark.parametrize("beyond", [9.9e-10, 1e-154, 1.1e9, 1e154])
def test_noise_is_in_the_range_in_which_accountants_are_right(beyond: float) -> None:
    words = "noise_multiplier=.*: must be 0, which is not private, or from 1e-9 to 1e9"
    for make in (
        lambda: Gaussian(beyond), lambda: PoissonSampledGaussian(0.1, beyond, 1),
        lambda: FixedSizeSampledGaussian(10, 2, beyond, 1), lambda: RandomAllocationGaussian(10, beyond, 1),
        lambda: TruncatedPoissonSampledGaussian(10, 0.1, 2, beyond, 1), lambda: MatrixGaussian(beyond, 1.0, 1, "C"),
        lambda: CyclicPoissonSampledGaussian(0.1, 2, beyond, 1.0, 1),
    ):  # fmt: skip
        refused(ArgumentError, words, make)
    words = f"sensitivity=.*{words}"
    refused(ArgumentError, words, lambda: CyclicPoissonSampledGaussian(0.1, 2, 1.0, 1 / beyond, 1))
    if beyond < 1:
        refused(ArgumentError, words, lambda: MatrixGaussian(1.0, 1 / beyond, 1, "C"))
    else:  # as the first steps of a matrix whose first columns are tiny
        assert MatrixGaussian(1.0, 1 / beyond, 1, "C").mu == 1e-9


@pytest.mark.parametrize("bad", [math.nan, 0.0, -0.1, 1.0000001, math.inf])
def test_refuses_bad_sample_rates(bad: float) -> None:
    refused(ArgumentError, "sample_rate=", PoissonSampledGaussian, bad, 1.0, 1)


def test_refuses_other_bad_fields() -> None:
    refused(ArgumentError, "steps=-1", PoissonSampledGaussian, 0.1, 1.0, -1)
    refused(ArgumentTypeError, r"steps=1\.5", PoissonSampledGaussian, 0.1, 1.0, 1.5)
    refused(ArgumentError, "count=-1", Gaussian, 1.0, -1)
    refused(ArgumentError, "did you mean 'zero-out'", Gaussian, 1.0, adjacency="zero_out")
    refused(ArgumentError, "batch_size=11: must be at most dataset_size=10", FixedSizeSampledGaussian, 10, 11, 1.0, 1)
    refused(ArgumentError, "sensitivity=-1", MatrixGaussian, 1.0, -1.0, 1, "tree")
    refused(ArgumentError, "steps=-1", MatrixGaussian, 1.0, 1.0, -1, "tree")
    refused(ArgumentError, "strategy=''", MatrixGaussian, 1.0, 1.0, 1, "")
    refused(ArgumentError, "reason=", NonPrivate, " ")
    refused(ArgumentTypeError, "must be an event", Composed, (1.0,))


def test_refuses_damaged_dicts() -> None:
    refused(ArgumentError, "did you mean 'Gaussian'", Event.from_dict, {"event": "Gausian"})
    with pytest.raises(ArgumentError, match="did you mean 'sample_rate'"):
        Event.from_dict({"event": "PoissonSampledGaussian", "sampling_rate": 0.1, "noise_multiplier": 1.0, "steps": 1})
    with pytest.raises(ArgumentError, match="also needs steps"):
        Event.from_dict({"event": "PoissonSampledGaussian", "sample_rate": 0.1, "noise_multiplier": 1.0})
    for damaged in ({}, None, [], "Gaussian"):
        refused(ArgumentTypeError, "must be a mapping", Event.from_dict, damaged)


@pytest.mark.parametrize("nested", [lambda event: Composed((event,)), lambda event: SelfComposed(event, 1)])
def test_events_nested_too_deep_are_refused(nested: Callable[[Event], Event]) -> None:
    event: Event = PoissonSampledGaussian(0.1, 1.0, 1)
    for _ in range(100):
        event = nested(event)
    assert Event.from_dict(event.to_dict()) == event
    refused(ArgumentError, "100 deep", nested, event)
    data = nested(PoissonSampledGaussian(0.1, 1.0, 1)).to_dict()
    for _ in range(3000):
        data = {**data, "events": [data]} if "events" in data else {**data, "repeated": data}
    refused(ArgumentError, "deep", Event.from_dict, data)


@pytest.mark.parametrize("digits", [400, 6000])  # Python prints no more than 4300
def test_numbers_beyond_float64_are_refused(digits: int) -> None:
    for make in (
        lambda: PoissonSampledGaussian(0.1, 1.0, 10**digits),
        lambda: PoissonSampledGaussian(0.1, 10**digits, 1),
        lambda: SelfComposed(PoissonSampledGaussian(0.1, 1.0, 1), 10**digits),
    ):
        refused(ArgumentError, r"must be at most 1\.798e\+308", make)


@pytest.mark.parametrize("part", [GAUSSIAN, POISSON])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_counts_that_multiply_beyond_float64_are_refused(part: Event, accountant: str) -> None:
    with pytest.raises(ArgumentError, match=r"^count: must be at most 1\.798e\+308 in size"):
        epsilon(SelfComposed(SelfComposed(part, 10**200), 10**200), 1e-5, accountant)
    refused(ArgumentError, "must be at most", epsilon, SelfComposed(POISSON, 10**307), 1e-5, accountant)
