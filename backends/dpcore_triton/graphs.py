"""The backend of a run that repeats its launches as CUDA graphs (`dpcore.torch.make_private`, ``cuda_graphs=True``).

Nothing is decided here about privacy: `Mechanism` calls `step` and `repeat` as it always does, having checked the step,
written the ledger and marked the row as spent. A graph can only repeat launches on what they depend on:

- **A graph's key has all that its launches depend on.** `step` makes its launches from a key, and from nothing else
  (`dpcore_triton.step.plan`); `repeat` makes the key from the function and all of its arguments: tensors by address,
  shape, stride, dtype and device, everything else by its value. An argument without such a description is refused.
- **Numbers that change from step to step are written before each replay**: the row, scales, coefficients and settings
  of a step go to the memory that its launch reads, by one copy before it on the stream, from pinned memory
  that torch keeps until the copy is through (`launch.upload`): the host cannot overwrite numbers that are still read.
- **Nothing is uploaded or freed under a graph**: a recording has launches, no uploads, and keeps their tensors.
- **A stream has its own graphs**, since their memory is ordered with its kernels only.

The first call of a key runs as usual, the second is recorded and captured, later ones are replayed. So values that
change every time (an adapted clip norm and its grid, the size of a batch) are never captured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from types import FunctionType
from typing import Any, TypeVar, cast

import numpy as np
import torch

from dpcore.errors import ArgumentTypeError, SpeedWarning
from dpcore_triton.described import places
from dpcore_triton.kept import Kept
from dpcore_triton.launch import Launch, current_stream, default_device, upload
from dpcore_triton.passes import Passes
from dpcore_triton.recording import recording, repeated
from dpcore_triton.step import plan, start

T = TypeVar("T")

# A capture waits for the device and empties torch's cache. `FREE_CAPTURES` are allowed at first, and one more for every
# `WORTH` replays.
FREE_CAPTURES, WORTH = 16, 16
_EXACT = (int, str, bytes, type(None))  # equal values of these kinds are the same
_PLAIN = (str, bytes, int, float, np.generic, type(None))


class Graph:
    """One piece of work: seen once, then recorded and captured, then replayed."""

    def __init__(self) -> None:
        self.numbers: Any = None  # the memory that a step's launches read
        self.replays = 0
        self._repeat: Callable[[], None] | None = None
        self._result: Any = None
        self._refused = False

    def run(self, work: Callable[[], T], device: torch.device) -> T:
        """Return what the work returns; under a graph the same tensors, with new values."""
        if self._repeat is not None:
            self._repeat()
            self.replays += 1
            return cast(T, self._result)
        if self._refused:
            return work()
        with recording() as record:
            result = work()
        if record.refused is None:
            try:
                # Of the tables that launches read a graph has addresses only, and caches forget them.
                tables = [call.args for call in record.calls if isinstance(call, Launch)]
                self._repeat, self._result, self._kept = repeated(record.calls, device), result, (record.kept, tables)
                return result
            except RuntimeError as cause:
                record.refused = str(cause).splitlines()[0]
        self._refused = True
        warnings.warn(
            f"cuda_graphs=True: a part of the step is not captured ({record.refused}); it runs as without",
            SpeedWarning,
            stacklevel=2,
        )
        return result


class Graphs:
    """The backend of one run: `step` and `repeat` are captured, and the rest is unchanged."""

    def __init__(self, backend: Any, most: int = 8) -> None:
        self._backend = backend
        # Few: each keeps the memory that its work allocates. Those with a key from before a fork are not used again,
        # and go first.
        self.kept = Kept[Graph](most)
        self._seen = Kept[bool](256)
        self.captured = self.found = 0

    def __getattr__(self, name: str) -> Any:
        """Return any other member of the backend."""
        return getattr(self._backend, name)

    def step(
        self,
        slots: Any,
        noise: Any,
        batch_size: float,
        filters: Any,
        rule: str,
        settings: Any,
        step_number: int,
        *,
        unit: float,
        correlation: Any = None,
        square: str = "filtered",
        square_noise: Any = None,
    ) -> None:
        """See `dpcore.spec.ops.Backend.step`."""
        planned = plan(
            slots, noise, batch_size, filters, rule, settings, step_number, unit, correlation, square, square_noise
        )  # fmt: skip
        graph, device = self._graph(planned.key), planned.launches.device
        numbers = upload(planned.numbers, device)
        if graph is None:
            start(planned, numbers)
            return
        if graph.numbers is None:
            graph.numbers = torch.empty_like(numbers)
        graph.numbers.copy_(numbers)
        graph.run(lambda: start(planned, graph.numbers), device)

    def passes(self) -> Passes:
        """Return the object that captures the passes of a run's model."""
        return Passes()

    def repeat(self, work: Callable[..., T], *args: Any) -> T:
        """See `dpcore.spec.ops.Backend.repeat`."""
        device = next(filter(None, map(_device, args)), default_device())
        key = (described(work), tuple(map(described, args)), current_stream(device))
        graph = self._graph(key)
        return work(*args) if graph is None else graph.run(lambda: work(*args), device)

    def _graph(self, key: Hashable) -> Graph | None:
        """Return the graph of a key; None if the key is new, or captures failed too often."""
        graph = self.kept.get(key)
        if graph is not None:
            self.found += 1
        elif not self._seen.get(key):
            self._seen.put(key, True)
        elif self.captured < FREE_CAPTURES + self.found // WORTH:
            self.captured += 1
            graph = self.kept.put(key, Graph())
        return graph


def described(value: Any) -> Hashable:
    """Return all of an argument on which launches can depend.

    Raises
    ------
    ArgumentTypeError
        If its kind may have other content at the next call.
    """
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return places((value,))
    if kind is tuple or kind is list:
        return _described_each(value)
    if issubclass(kind, _PLAIN):
        return repr(value)  # 0.0 is not -0.0 here, and 1 not 1.0
    if kind is Graphs or (kind is FunctionType and value.__closure__ is None):
        return cast(Hashable, value)
    if hasattr(kind, "__dataclass_fields__"):
        return (kind, *[described(getattr(value, name)) for name in kind.__dataclass_fields__])
    raise ArgumentTypeError(
        f"repeat: an argument of type {type(value).__name__}: must be a tensor, a number, a string, a function without "
        "a closure, or a tuple, list or dataclass of such"
    )


def _described_each(values: Sequence[Any]) -> Hashable:
    """Return the same for each value; hundreds of one kind are described attribute by attribute."""
    kinds = tuple(map(type, values))
    if len(different := dict.fromkeys(kinds)) > 1:
        return "kinds", kinds, *[_described_each([v for v in values if type(v) is kind]) for kind in different]
    kind: Any = kinds[0] if kinds else object
    if issubclass(kind, torch.Tensor):
        return "each", places(values)
    if kind in _EXACT:
        return "each", kind, tuple(values)
    if issubclass(kind, _PLAIN):
        return "each", kind, tuple(map(repr, values))
    if kind is tuple or kind is list:  # side by side: there are hundreds, with one tensor each
        return "each", kind, tuple(map(len, values)), _described_each([part for value in values for part in value])
    if hasattr(kind, "__dataclass_fields__"):
        columns = ([getattr(value, name) for value in values] for name in kind.__dataclass_fields__)
        return "each", kind, len(values), *map(described, columns)
    return tuple(map(described, values))


def _device(value: Any) -> torch.device | None:
    """Return the device of the first tensor in an argument."""
    if isinstance(value, torch.Tensor):
        return value.device
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(_device, value)), None)
    fields = getattr(value, "__dataclass_fields__", ())
    return next(filter(None, (_device(getattr(value, name)) for name in fields)), None)
