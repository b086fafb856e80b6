"""The public functions: names, refusals, calibration, and golden figures."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dpcore import accounting
from dpcore.accounting import (
    Adjacency,
    Composed,
    Event,
    Gaussian,
    NonPrivate,
    PrivateSelection,
    RdpAccountant,
    SelfComposed,
)
from dpcore.accounting.events import FixedSizeSampledGaussian, PoissonSampledGaussian, TruncatedPoissonSampledGaussian
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from tests.refused import refused


@dataclass(frozen=True)
class Unknown(Event):
    """An event of a kind that no accountant knows."""

    @property
    def adjacency(self) -> Adjacency:
        return Adjacency.ADD_REMOVE


POISSON = PoissonSampledGaussian(0.01, 1.1, 1000)
FIXED_SIZE = FixedSizeSampledGaussian(1000, 20, 0.6, 100)
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "accounting.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['event']['event']}-{row['accountant']}-{row['delta']:g}")
def test_golden_figures(row: dict[str, object]) -> None:
    event = Event.from_dict(row["event"])  # type: ignore[arg-type]
    figure = accounting.epsilon(event, row["delta"], row["accountant"])  # type: ignore[arg-type]
    # PLD rounds up by at most this; where it stops depends on its grids.
    close = {"rel": 1e-3, "abs": 1e-4} if row["accountant"] == "pld" else {"rel": 1e-9}
    assert figure == pytest.approx(row["epsilon"], **close)
    assert figure >= row["epsilon"] * (1 - 1e-9)  # type: ignore[operator]


def test_which_accountants_there_are() -> None:
    assert accounting.available_accountants() == ("pld", "selection", "rdp", "gaussian")
    assert accounting.accountants_for(POISSON) == ("pld", "rdp")
    assert accounting.accountants_for(PoissonSampledGaussian(1.0, 1.0, 1)) == ("pld", "rdp", "gaussian")
    assert accounting.accountants_for(Gaussian(1.0)) == ("pld", "rdp", "gaussian")
    assert accounting.accountants_for(NonPrivate("a baseline")) == ("pld", "rdp", "gaussian")
    assert accounting.accountants_for(FixedSizeSampledGaussian(10, 2, 1.0, 1)) == ("pld", "rdp")
    assert accounting.accountants_for(Unknown()) == ()


def test_the_default_is_the_first_that_covers_the_event() -> None:
    for event in (POISSON, Gaussian(1.0), FIXED_SIZE, Composed((POISSON, Gaussian(2.0)))):
        first = accounting.accountants_for(event)[0]
        assert accounting.epsilon(event, 1e-5) == accounting.epsilon(event, 1e-5, first)
        assert accounting.delta(event, 1.0) == accounting.delta(event, 1.0, first)
    assert accounting.epsilon(POISSON, 1e-5, RdpAccountant()) == accounting.epsilon(POISSON, 1e-5, "rdp")


@pytest.mark.parametrize("ask", [accounting.epsilon, accounting.delta])
def test_refuses_accountants(ask: Callable[..., float]) -> None:
    refused(ArgumentError, "did you mean 'gaussian'", ask, POISSON, 0.5, accountant="gausian")
    refused(ArgumentTypeError, "accountant=3", ask, POISSON, 0.5, accountant=3)
    others = {POISSON: "Poisson.* use accountant='pld' or accountant='rdp'", FIXED_SIZE: "FixedSize.* use accountant="}
    for event, said in others.items():
        refused(PrivacyError, f"does not cover the event {said}", ask, event, 0.5, accountant="gaussian")
    for name in (None, "pld", "rdp", "gaussian"):
        refused(ArgumentTypeError, "event='Gaussian': must be an event", ask, "Gaussian", 0.5, accountant=name)
        with pytest.raises(PrivacyError, match="event=Unknown: no accountant of this version covers it"):
            ask(Unknown(), 0.5, accountant=name)
        with pytest.raises(PrivacyError, match="event=Composed: no accountant of this version covers it or one of its"):
            ask(Composed((POISSON, Unknown())), 0.5, accountant=name)


def test_refuses_delta_and_epsilon_outside_of_their_intervals() -> None:
    for bad in (0, 1, -0.1, 1.5, math.nan, math.inf):
        refused(ArgumentError, "delta=", accounting.epsilon, POISSON, bad)
    for bad in (-0.1, math.nan, math.inf):
        refused(ArgumentError, "epsilon=", accounting.delta, POISSON, bad)


@pytest.mark.parametrize("delta", [0.001, 0.0010001, 0.5])
def test_remark_on_a_delta_above_one_over_n(delta: float) -> None:
    said = accounting.delta_remark(delta, 1000)
    assert said is not None
    assert said.startswith(f"delta={delta}: is at least 1/n for n = 1000 examples")
    assert accounting.delta_remark(delta, None) is None
    assert accounting.delta_remark(delta / 1000, 1000) is None


def test_known_size_of_the_data() -> None:
    truncated = TruncatedPoissonSampledGaussian(500, 0.1, 80, 1.0, 10)
    assert accounting.known_dataset_size(truncated) == 500
    assert accounting.known_dataset_size(FIXED_SIZE) == 1000
    assert accounting.known_dataset_size(POISSON) is None
    assert accounting.known_dataset_size(Composed((POISSON, SelfComposed(truncated, 3)))) == 500
    assert accounting.known_dataset_size(Composed(())) is None
    refused(ArgumentError, "dataset_size=0", accounting.delta_remark, 0.1, 0)
    refused(ArgumentError, "delta=0", accounting.delta_remark, 0, 10)


def test_the_smallest_epsilon_is_the_least_upper_bound() -> None:
    each = accounting.epsilons(POISSON, 1e-5)
    assert each == {name: accounting.epsilon(POISSON, 1e-5, name) for name in ("pld", "rdp")}
    assert accounting.smallest_epsilon(POISSON, 1e-5) == (each["pld"], "pld")
    assert accounting.smallest_epsilon(NonPrivate("a baseline"), 1e-5)[0] == math.inf
    refused(PrivacyError, "event=Unknown", accounting.smallest_epsilon, Unknown(), 1e-5)


def test_what_is_no_list_of_events_is_refused_and_numpy_numbers_are_written() -> None:
    refused(ArgumentTypeError, "events=Gaussian.*must be a tuple of events", Composed, Gaussian(1.0))
    refused(ArgumentTypeError, "events=5: must be a tuple", Event.from_dict, {"event": "Composed", "events": 5})
    chosen = PrivateSelection(FixedSizeSampledGaussian(100, 10, 1.0, 5), np.int64(10), 1.0)
    assert Event.from_dict(json.loads(json.dumps(chosen.to_dict()))) == chosen
    assert accounting.known_dataset_size(chosen) == 100
