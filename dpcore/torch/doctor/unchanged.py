"""Leaves everything as it was found: model, loss, optimizer, data, and the generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from dpcore.torch.model.functional import local
from dpcore.torch.model.state_probe import GLOBAL_HOOKS, Snapshot
from dpcore.torch.randomness import TRIAL, seeded
from dpcore.torch.reachable import walk

LARGE = 64 * 2**20
"""Bytes of an array of the data from which on no copy is made of it: reading changes the state beside it, if any."""
_SEARCHED = 1000  # items of each container of the data that are looked at


@contextmanager
def unchanged(objects: Mapping[str, Any], data: Any, device: torch.device) -> Iterator[None]:
    """Put back what changes in the block: everything reachable from `objects` and `data`, and all generators.

    Parameters of the model are among it, in their own memory, so that the block may train. They are held a second time
    meanwhile. Arrays of the data of `LARGE` bytes and more, and items of its containers beyond the 1000th, are not.
    """
    large = [value for _, value, first in walk({"data": data}, most=_SEARCHED) if not first and _bytes(value) >= LARGE]
    before = [Snapshot({**objects, **GLOBAL_HOOKS}, [data, *large]), Snapshot({"data": data}, large, _SEARCHED)]
    with seeded(device, TRIAL):
        try:
            yield
        finally:
            for snapshot in before:
                snapshot.restore()


@contextmanager
def kept_values(model: nn.Module) -> Iterator[None]:
    """Put the values of a model's parameters back after the block, which takes steps: later checks see the user's."""
    before = [local(parameter).clone() for parameter in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                local(parameter).copy_(value)


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return value.nbytes if isinstance(value, np.ndarray) else 0
