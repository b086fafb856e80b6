"""Rows: blocks that hold each example's vector itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from dpcore.spec.check import dtype_name
from dpcore.spec.contributions import rounding_of_rows
from dpcore.spec.ops import Backend

_SHAPE = attrgetter("shape")


@dataclass(frozen=True)
class Rows:
    """Each example's vector itself.

    Attributes
    ----------
    values : (B, d) array
    """

    values: Any

    @property
    def examples(self) -> int:
        """B."""
        return int(self.values.shape[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """(d,)."""
        return tuple(self.values.shape[1:])

    @property
    def dtype(self) -> str:
        """Name of the arrays' dtype."""
        return dtype_name(self.values)

    @property
    def rounding(self) -> float:
        """See `Block.rounding`."""
        return rounding_of_rows(self.values.shape[1])

    def norms(self, backend: Backend[Any], scale: Any = None) -> Any:
        """See `Block.norms`."""
        return backend.row_norms([self.values], [scale])

    def add_sum(self, backend: Backend[Any], weights: Any, out: Any, scale: Any = None) -> None:
        """See `Block.add_sum`."""
        backend.weighted_sum([self.values], [weights], [out], [scale])

    def rows(self) -> Any:
        """See `Block.rows`."""
        return self.values

    @np.errstate(all="ignore")  # a warning of an overflow would tell of one example
    def weighted(self, weight: float) -> Rows:
        """See `Block.weighted`."""
        return self if weight == 1 else Rows(weight * self.values)

    @np.errstate(all="ignore")
    def units(self, size: int) -> Rows:
        """See `Block.units`."""
        return self if size == 1 else Rows(self.values.reshape(self.examples // size, size, *self.shape).sum(1))

    def map(self, function: Callable[[Any], Any]) -> Rows:
        """See `Block.map`."""
        return Rows(function(self.values))


def as_rows(values: Sequence[Any], sizes: Sequence[int]) -> list[Any] | None:
    """Return arrays (B, d) of one B, with d of these sizes, as blocks: hundreds at every step, by one call for each.

    None where one is something else, of which `as_blocks` knows whether it is right.
    """
    try:
        shapes = list(map(_SHAPE, values))
        if any(hasattr(kind, "add_sum") for kind in set(map(type, values))):
            return None
        return list(map(Rows, values)) if shapes == [(shapes[0][0], size) for size in sizes] else None
    except (AttributeError, IndexError, TypeError):
        return None
