"""Events in the terms of Google's dp-accounting, to be checked by its accountants."""

from __future__ import annotations

from typing import Any

from dpcore.accounting import events
from dpcore.accounting.events import Adjacency, Event, check_event
from dpcore.errors import PrivacyError

_RELATIONS = {
    None: "ADD_OR_REMOVE_ONE",
    Adjacency.ADD_REMOVE: "ADD_OR_REMOVE_ONE",
    Adjacency.ZERO_OUT: "REPLACE_SPECIAL",
    Adjacency.REPLACE_ONE: "REPLACE_ONE",
}


def to_dp_accounting(event: Event) -> Any:
    """Return the event as a `dp_accounting.DpEvent`, to be composed with `neighboring_relation(event)`.

    A multiplier is passed on as it is, relative to the sensitivity under the event's own adjacency. That is what
    dp-accounting's `RdpAccountant` takes it for under any relation; its `PLDAccountant` under REPLACE_ONE takes a
    Gaussian's multiplier relative to half of that, and says more than the event costs.

    A matrix mechanism becomes the one Gaussian mechanism that it is, and a cyclic run the steps that one example may
    enter.

    Raises
    ------
    PrivacyError
        If dp-accounting is not installed, or has no such event.
    """
    names = _dp_accounting()
    check_event(event=event)
    if isinstance(event, events.NonPrivate):
        return names.NonPrivateDpEvent()
    if isinstance(event, events.Composed):
        return names.ComposedDpEvent([to_dp_accounting(part) for part in event.events])
    if isinstance(event, events.SelfComposed):
        return _repeated(names, to_dp_accounting(event.repeated), event.count)
    if isinstance(event, events.Gaussian):
        return _repeated(names, names.GaussianDpEvent(event.noise_multiplier), event.count)
    if isinstance(event, events.MatrixGaussian):
        if event.mu == 0.0:
            return names.NoOpDpEvent()
        return names.GaussianDpEvent(event.noise_multiplier / event.sensitivity)
    if isinstance(event, events.PoissonSampledGaussian):
        step = names.PoissonSampledDpEvent(event.sample_rate, names.GaussianDpEvent(event.noise_multiplier))
        return _repeated(names, step, event.steps)
    if isinstance(event, events.CyclicPoissonSampledGaussian):
        gaussian = names.GaussianDpEvent(event.noise_multiplier / event.sensitivity)
        return _repeated(names, names.PoissonSampledDpEvent(event.sample_rate, gaussian), event.participations)
    if isinstance(event, events.TruncatedPoissonSampledGaussian):
        step = names.TruncatedSubsampledGaussianDpEvent(
            event.dataset_size, event.sample_rate, event.max_batch_size, event.noise_multiplier
        )
        return _repeated(names, step, event.steps)
    if isinstance(event, events.FixedSizeSampledGaussian):
        gaussian = names.GaussianDpEvent(event.noise_multiplier)
        step = names.SampledWithoutReplacementDpEvent(event.dataset_size, event.batch_size, gaussian)
        return _repeated(names, step, event.steps)
    raise PrivacyError(f"event={type(event).__name__}: dp-accounting has no event for it")


def neighboring_relation(event: Event) -> Any:
    """Return the event's adjacency as a `dp_accounting.NeighboringRelation`: zero-out is REPLACE_SPECIAL."""
    _dp_accounting()
    from dp_accounting import NeighboringRelation  # type: ignore[import-untyped]

    check_event(event=event)
    return NeighboringRelation[_RELATIONS[event.adjacency]]


def _repeated(names: Any, event: Any, count: int) -> Any:
    return names.SelfComposedDpEvent(event, count) if count > 0 else names.NoOpDpEvent()


def _dp_accounting() -> Any:
    try:
        from dp_accounting import dp_event
    except ImportError as cause:
        raise PrivacyError("to_dp_accounting: needs Google's library: pip install dp-accounting") from cause
    return dp_event
