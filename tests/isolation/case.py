"""A model of the isolation suite: how it is built, and whether it treats its examples apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Tree = Any
"""A tensor, or mappings and sequences of tensors."""

Built = tuple[nn.Module, Tree, Tree | None, Callable[..., Any] | None]
"""The model, its inputs, targets or None, and the loss or None for dpcore's default; of BATCH + 1 examples."""

BATCH = 12
"""Examples in a batch. `Case.build` returns one more: the spare one, with which others are replaced."""


@dataclass(frozen=True)
class Case:
    """One model of the suite.

    `build` is called under ``torch.manual_seed``. `kind` is "apart" for a model that must be accepted, by whichever way;
    "mixer" for one that treats examples together, so that it must be refused or bounded; "either" for all else.
    """

    name: str
    build: Callable[[], Built]
    kind: str
