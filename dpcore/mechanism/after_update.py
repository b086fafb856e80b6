"""Steps after the update: the projection onto a ball, and the average over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dpcore.mechanism.peers import Peers
from dpcore.spec.ops import Backend, Slot, UpdateSettings
from dpcore.stages.method import Method
from dpcore.stages.updates.averaging import Averaging


def constrain(
    backend: Backend[Any],
    method: Method,
    slots: Sequence[Slot[Any]],
    numbers: Sequence[UpdateSettings],
    peers: Peers,
) -> None:
    """Project onto the ball of the method's `radius` around 0 after an update, in place; the displacements too.

    What is projected are the parameters, or both sequences of the accelerated method, of which they are a mean;
    `numbers` are those that the update used.
    """
    if method.radius is None:
        return
    accelerated = method.update.rule == "accelerated"
    parameters = [[slot.parameter for slot in slots]]
    sequences: Iterable[Sequence[Any]] = zip(*(s.moments for s in slots), strict=True) if accelerated else parameters
    before = [None if slot.displacement is None else slot.parameter + 0 for slot in slots]
    for vectors in sequences:
        own = float(backend.row_norms([vector.reshape(1, -1) for vector in vectors])[0])
        norm = own if peers.world_size == 1 else math.sqrt(peers.added([own**2])[0])
        if norm > method.radius:
            for vector in vectors:
                vector *= method.radius / norm
    for slot, used, earlier in zip(slots, numbers, before, strict=True):
        if accelerated:
            z, y = slot.moments
            slot.parameter[...] = (1 - used.coupling) * y + used.coupling * z
        if slot.displacement is not None:
            slot.displacement[...] = slot.displacement + (slot.parameter - earlier)


def average(averaging: Averaging, averages: Sequence[Any], outcome: Sequence[Any], step: int) -> None:
    """Take the method's outcome after step `step` into the averages, in place."""
    weight = averaging.weight(step)
    for kept, x in zip(averages, outcome, strict=True):
        kept[...] = kept + weight * (x.reshape(-1) - kept) if weight < 1 else x.reshape(-1)
