"""The backend of a run with ``compile=True``: sums of rows and noise, each by one kernel that torch.compile makes.

What is compiled is exact, so that no kernel can change a bit or a bound, in whatever order it adds: integers of int32
that do not overflow, and float64 numbers that are integers below 2^53. A contribution ``round(w x)`` is one product,
rounded, and then one rounding to an integer, for which no compiler has another form. So the examples stay apart as they
do without: the rest of a sum, its norms and factors, is not compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from dpcore.errors import SpeedWarning
from dpcore_torch.clip import add_rows, weighted_sum
from dpcore_torch.linear import TORCH, add_tiles, linear_sums
from dpcore_torch.noise import integers, normal, numbers
from dpcore_torch.step import step

# Fewer numbers cost less than the call of a compiled function; a kernel for one row would be another one.
_LEAST = 1 << 14


class Compiled:
    """The backend of one run; all that is not compiled is as it is without."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._sum, self._rounded = Kernel(weighted), Kernel(rounded)
        tiles = partial(add_tiles, add=self._add)
        self._arithmetic, self._numbers = TORCH._replace(add_tiles=tiles), Kernel(numbers)

    def __getattr__(self, name: str) -> Any:
        """Return any other member of the backend."""
        return getattr(self._backend, name)

    def weighted_sum(self, *args: Any, **options: Any) -> None:
        """See `dpcore.spec.ops.Backend.weighted_sum`."""
        weighted_sum(*args, **options, add=self._add)

    def linear_sums(self, *args: Any, **options: Any) -> None:
        """See `dpcore.spec.pair_ops.PairOperations.linear_sums`."""
        linear_sums(*args, **options, arithmetic=self._arithmetic)

    def normal(self, *args: Any, **options: Any) -> torch.Tensor:
        """See `dpcore.spec.ops.Backend.normal`."""
        return normal(*args, **options, numbers_of=self._numbers)

    def step(self, *args: Any, **options: Any) -> None:
        """See `dpcore.spec.ops.Backend.step`."""
        step(*args, **options, draw=partial(integers, numbers_of=self._numbers))

    def _add(
        self,
        block: torch.Tensor,
        total: torch.Tensor,
        weights: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        if scale is not None or len(block) == 1 or block.numel() < _LEAST:
            add_rows(block, total, weights, scale)
        elif weights is None:
            total += self._rounded(block)
        else:
            total += self._sum(block, weights)


def weighted(block: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return what `add_rows` adds, of rows (B, d) and weights (B,)."""
    addends = torch.round(block.double() * weights[:, None])
    return torch.where(weights[:, None] == 0, 0.0, addends).sum(0)


def rounded(block: torch.Tensor) -> torch.Tensor:
    """Return what `add_rows` adds without weights."""
    return torch.round(block.double()).sum(0)


class Kernel:
    """A function as torch.compile makes it for any sizes, or as it is written where that fails."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = torch.compile(function, dynamic=True, fullgraph=True)

    def __call__(self, *args: torch.Tensor) -> Any:
        """Return what the function returns."""
        if self._compiled is not None:
            try:
                return self._compiled(*args)
            except TorchDynamoException as cause:  # raised before anything runs
                self._compiled = None
                told = str(cause).splitlines()[0]
                warnings.warn(
                    f"compile: {self._function.__name__} runs as written ({told})", SpeedWarning, stacklevel=2
                )
        return self._function(*args)
