"""Events from an Opacus accountant's history."""

import reprlib
from collections.abc import Mapping
from typing import Any

from dpcore.accounting.events import Composed, Event, PoissonSampledGaussian
from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError
from dpcore.spec import validate

CHECKPOINT_KEY = "privacy_accountant_state_dict"
"""The key under which `PrivacyEngine.save_checkpoint` stores the accountant's state."""

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
"""Facts that a history does not contain, and on which its epsilon relies."""


def from_opacus(state: Mapping[str, Any]) -> Event:
    """Return the event that the history of an Opacus accountant describes; the adjacency is add-remove.

    Parameters
    ----------
    state : mapping
        ``accountant.state_dict()`` of Opacus's "prv", "rdp" or "gdp" accountant, or a checkpoint's dictionary that has
        it under "privacy_accountant_state_dict". The history has (noise multiplier, sample rate, steps).

    Returns
    -------
    Event
        Poisson-subsampled Gaussian steps, phase after phase. Its cost is correct only under `OPACUS_ASSUMPTIONS`.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If there is no history, it is empty, or an entry is not in Opacus's form.
    """
    history = validate.sequence(history=accountant_state(state)["history"])
    if len(history) == 0:
        raise ArgumentError("history=[]: Opacus recorded no step; save the checkpoint after training")
    phases = tuple(_phase(number, entry) for number, entry in enumerate(history))
    return phases[0] if len(phases) == 1 else Composed(phases)


def accountant_state(content: Any) -> Mapping[str, Any]:
    """Return the accountant's part of a checkpoint, or the content itself if it is such a part."""
    state = content.get(CHECKPOINT_KEY, content) if isinstance(content, Mapping) else content
    if isinstance(state, Mapping) and "history" in state:
        return state
    has = f"has {reprlib.repr(sorted(map(str, state)))}" if isinstance(state, Mapping) else f"is {reprlib.repr(state)}"
    raise ArgumentTypeError(
        f"state: must be an Opacus accountant's state_dict(), with a 'history', or have it under {CHECKPOINT_KEY!r}; "
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
