"""Every event in dp-accounting's terms, and what its PLD accountant says of it."""

import builtins
from typing import Any

import pytest

pytest.importorskip("dp_accounting")
from dp_accounting import NeighboringRelation, dp_event

from dpcore.accounting import Composed, Event, Gaussian, events, neighboring_relation, to_dp_accounting
from dpcore.errors import ArgumentTypeError, PrivacyError
from tests.refused import refused

# fmt: off
POISSON, REPEATED = events.PoissonSampledGaussian(0.01, 1.1, 100), dp_event.SelfComposedDpEvent
THEIR_POISSON = REPEATED(dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(1.1)), 100)
THEIR_FIXED_SIZE = dp_event.SampledWithoutReplacementDpEvent(1000, 20, dp_event.GaussianDpEvent(0.7))
PAIRS: list[tuple[Event, Any, str]] = [
    (POISSON, THEIR_POISSON, "ADD_OR_REMOVE_ONE"),
    (Gaussian(2.0, 3), REPEATED(dp_event.GaussianDpEvent(2.0), 3), "ADD_OR_REMOVE_ONE"),
    (Gaussian(2.0, 0), dp_event.NoOpDpEvent(), "ADD_OR_REMOVE_ONE"),
    (Gaussian(2.0, 1, events.Adjacency.REPLACE_ONE), REPEATED(dp_event.GaussianDpEvent(2.0), 1), "REPLACE_ONE"),
    (events.MatrixGaussian(3.0, 1.5, 9, "tree"), dp_event.GaussianDpEvent(2.0), "REPLACE_SPECIAL"),
    (events.MatrixGaussian(3.0, 1.5, 0, "tree"), dp_event.NoOpDpEvent(), "REPLACE_SPECIAL"),
    (events.MatrixGaussian(0.0, 0.0, 5, "tree"), dp_event.NoOpDpEvent(), "REPLACE_SPECIAL"),
    (events.FixedSizeSampledGaussian(1000, 20, 0.7, 5), REPEATED(THEIR_FIXED_SIZE, 5), "REPLACE_ONE"),
    (events.TruncatedPoissonSampledGaussian(1000, 0.01, 15, 0.9, 5, events.Adjacency.ADD_REMOVE),
     REPEATED(dp_event.TruncatedSubsampledGaussianDpEvent(1000, 0.01, 15, 0.9), 5), "ADD_OR_REMOVE_ONE"),
    (events.CyclicPoissonSampledGaussian(0.1, 4, 2.2, 2.0, 9),
     REPEATED(dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(1.1)), 3), "REPLACE_SPECIAL"),
    (events.NonPrivate("a baseline"), dp_event.NonPrivateDpEvent(), "ADD_OR_REMOVE_ONE"),
    (Composed((POISSON, events.SelfComposed(events.NonPrivate("twice"), 2))),
     dp_event.ComposedDpEvent([THEIR_POISSON, REPEATED(dp_event.NonPrivateDpEvent(), 2)]), "ADD_OR_REMOVE_ONE"),
    (Composed((POISSON, Gaussian(1.0, 1, events.Adjacency.ZERO_OUT))),
     dp_event.ComposedDpEvent([THEIR_POISSON, REPEATED(dp_event.GaussianDpEvent(1.0), 1)]), "REPLACE_SPECIAL"),
    (events.SelfComposed(POISSON, 0), dp_event.NoOpDpEvent(), "ADD_OR_REMOVE_ONE"),
]
# fmt: on


@pytest.mark.parametrize(("ours", "theirs", "relation"), PAIRS, ids=lambda value: type(value).__name__)
def test_says_the_same(ours: Event, theirs: Any, relation: str) -> None:
    assert to_dp_accounting(ours) == theirs
    assert neighboring_relation(ours) is NeighboringRelation[relation]


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unknown(Event):
        """Not one of dpcore's."""

    refused(PrivacyError, "event=Unknown: dp-accounting has no event for it", to_dp_accounting, Unknown())
    for ask in (to_dp_accounting, neighboring_relation):
        refused(ArgumentTypeError, "event=3: must be an event", ask, 3)
    real = builtins.__import__

    def without(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("dp_accounting"):
            raise ImportError(name)
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    refused(PrivacyError, "pip install dp-accounting", to_dp_accounting, POISSON)
