"""Events from an Opacus accountant's history, and events in the terms of Google's dp-accounting."""

import reprlib
from collections.abc import Mapping
from typing import Any

from dpcore.accounting import events
from dpcore.accounting.events import Adjacency, Composed, Event, PoissonSampledGaussian, check_event
from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError, PrivacyError
from dpcore.spec import validate

CHECKPOINT_KEY = "privacy_accountant_state_dict"
"""Where `PrivacyEngine.save_checkpoint` puts the accountant's state."""

OPACUS_ASSUMPTIONS = (
    (
        "Batches were drawn by Poisson sampling, Opacus's default. With poisson_sampling=False it writes the same "
        "history and reports the same epsilon, and neither that number nor this one holds."
    ),
    (
        "The history is whole: all training and tuning on these data went through this accountant, and an example "
        "entered a step at most once (no gradients accumulated over several batches)."
    ),
    (
        "Clipping was flat or per layer, with norms fixed beforehand. Adaptive clipping divides by the true size of a "
        "batch, which has no noise; before Opacus 1.6 it also recorded more noise than the gradients had."
    ),
    (
        "The gradient of an example depended on that example alone, and none was NaN or infinite: one such example "
        "turns all weights into NaN, which tells of it."
    ),
    (
        "Nobody can guess the batches or the noise (secure_mode=True). Torch's default generator is no secret, and a "
        "noise_generator that starts again from its seed adds the same noise twice."
    ),
)
"""What a history cannot say, and what its epsilon rests on."""


def from_opacus(state: Mapping[str, Any]) -> Event:
    """Return the event that the history of an Opacus accountant describes; the adjacency is add-remove.

    Parameters
    ----------
    state : mapping
        ``accountant.state_dict()`` of Opacus's "prv", "rdp" or "gdp" accountant, or a checkpoint's dictionary that has
        it under "privacy_accountant_state_dict". The history holds (noise multiplier, sample rate, steps).

    Returns
    -------
    Event
        Poisson-subsampled Gaussian steps, phase after phase. What it costs is true under `OPACUS_ASSUMPTIONS` only.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If there is no history, it is empty, or an entry is not what Opacus writes.
    """
    history = validate.sequence(history=accountant_state(state)["history"])
    if len(history) == 0:
        raise ArgumentError("history=[]: Opacus recorded no step; save the checkpoint after training")
    phases = tuple(_phase(number, entry) for number, entry in enumerate(history))
    return phases[0] if len(phases) == 1 else Composed(phases)


def accountant_state(content: Any) -> Mapping[str, Any]:
    """Return the accountant's part of a checkpoint, or the content itself if it is such a part."""
    found = content.get(CHECKPOINT_KEY, content) if isinstance(content, Mapping) else content
    if isinstance(found, Mapping) and "history" in found:
        return found
    has = f"has {reprlib.repr(sorted(map(str, found)))}" if isinstance(found, Mapping) else f"is {reprlib.repr(found)}"
    raise ArgumentTypeError(
        f"state: must be an Opacus accountant's state_dict(), with a 'history', or hold it under {CHECKPOINT_KEY!r}; "
        f"this one {has}"
    )


def _phase(number: int, entry: Any) -> PoissonSampledGaussian:
    if not isinstance(entry, (tuple, list)) or len(entry) != 3:
        raise ArgumentTypeError(
            f"history[{number}]={reprlib.repr(entry)}: must be (noise multiplier, sample rate, number of steps)"
        )
    noise_multiplier, sample_rate, steps = entry
    try:
        return PoissonSampledGaussian(sample_rate, noise_multiplier, validate.integer(steps=steps, minimum=1))
    except DpcoreError as cause:
        raise type(cause)(f"history[{number}]: {cause}") from cause


# Events in the terms of dp-accounting, to be checked by its accountants.


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
    if isinstance(event, events.MatrixGaussian):  # the one Gaussian mechanism that it is
        return names.NoOpDpEvent() if event.mu == 0.0 else names.GaussianDpEvent(1.0 / event.mu)
    if isinstance(event, events.CyclicPoissonSampledGaussian):  # the steps that one example may enter
        sigma = event.noise_multiplier / event.sensitivity
        event = events.PoissonSampledGaussian(event.sample_rate, sigma, event.participations)
    sigma = getattr(event, "noise_multiplier", 0.0)
    if isinstance(event, events.Gaussian):
        return _repeated(names, names.GaussianDpEvent(sigma), event.count)
    if isinstance(event, events.PoissonSampledGaussian):
        step = names.PoissonSampledDpEvent(event.sample_rate, names.GaussianDpEvent(sigma))
        return _repeated(names, step, event.steps)
    if isinstance(event, events.TruncatedPoissonSampledGaussian):
        cut = event.dataset_size, event.sample_rate, event.max_batch_size
        return _repeated(names, names.TruncatedSubsampledGaussianDpEvent(*cut, sigma), event.steps)
    if isinstance(event, events.FixedSizeSampledGaussian):
        sizes = event.dataset_size, event.batch_size
        step = names.SampledWithoutReplacementDpEvent(*sizes, names.GaussianDpEvent(sigma))
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
