"""The forward and backward passes of a model, captured: the same kernels on the values of another micro-batch.

A graph repeats kernels and no Python. What makes a replay right is that nothing but tensors changes from one call to
the next, and that all of them are where the kernels read them:

- **Inputs are written to the graph's own memory before each replay**; parameters and buffers are read where they lie.
  The key holds the forms of the former and the addresses of the latter.
- **No operation reads anything else.** `Watched` sees every tensor that an operation takes, and refuses one that is
  neither given nor made on the way: one that lies in a closure may have been freed, and its memory hold other examples.
- **Python saw no value**: an operation for which the host waits is refused, and so is a tensor whose address or values
  are handed to code that torch does not see.
- **Random numbers are drawn anew**: a graph takes them from torch's generator as it is at the replay.

What Python itself decides (a step's number, an attribute that changes) stays as it was. So the caller compares replays
with runs of the model now and then (`dpcore.torch.model.repeated`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpcore.errors import DpcoreError
from dpcore_triton import launch
from dpcore_triton.described import places
from dpcore_triton.kept import Kept
from dpcore_triton.recording import UNREPEATABLE, Recording, captured, repeated

Tensor = torch.Tensor
T = TypeVar("T")
Work = Callable[[list[Tensor]], T]
"""A function of the values of its inputs, of those of the tensors that it reads, and of torch's random numbers."""

# What torch, and Python that is run to be captured, raise.
FAILURES = (
    RuntimeError, NotImplementedError, ValueError, TypeError, LookupError, AttributeError, AssertionError, DpcoreError,
)  # fmt: skip

# Draws are repeated: a graph takes the generator's state at the replay, and recorded calls draw from it again.
_REFUSED = dict(UNREPEATABLE)
del _REFUSED[torch.Tag.nondeterministic_seeded]
_METHODS = ("item", "tolist", "numpy", "__array__", "data_ptr", "__dlpack__", "__bool__", "__int__", "__float__")
_HANDED_OVER = frozenset(getattr(Tensor, name) for name in _METHODS)


class Watched(Recording):  # type: ignore[no-untyped-call]
    """A recording that refuses an operation on a tensor that is neither among those given nor made on the way."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__(_REFUSED)
        self._known: dict[int, StorageWeakRef] = {}
        self._know(given)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `Recording`."""
        taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not all(_is_strided(tensor) and tensor.untyped_storage()._cdata in self._known for tensor in taken):
            self.refused = f"{function} takes a tensor that is neither a parameter, a buffer nor the batch's"
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self._know([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        if not launch.INTERPRETED:  # all activations at once; a graph has memory of its own
            self.kept.clear()
            self.calls.clear()
        return result

    def _know(self, tensors: Sequence[Tensor]) -> None:
        for tensor in filter(_is_strided, tensors):
            storage = tensor.untyped_storage()
            # A weak reference: the memory may be freed, and what tells it from others is not given to others.
            self._known.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]


class HandedOver(TorchFunctionMode):
    """Notes whether a tensor's values or address went to Python, or to kernels that torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: str | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        if function in _HANDED_OVER:
            self.refused = f"Tensor.{function.__name__} hands a tensor to code that torch does not see"
        return function(*args, **(kwargs or {}))


class Pass:
    """One piece of work: run once as ever, then captured, then replayed."""

    def __init__(self) -> None:
        self.seen = False
        self.replays = 0
        self.refused: str | None = None  # why it is not captured
        self._repeat: Callable[[], None] | None = None

    @property
    def captured(self) -> bool:
        """Whether it can be replayed."""
        return self._repeat is not None

    def capture(self, work: Work[Any], inputs: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        """Capture the work for later calls; where it cannot be, `refused` says why."""
        own = [tensor.clone() for tensor in inputs]
        device = own[0].device
        handed, record = HandedOver(), Watched([*own, *read])

        def watched() -> Any:
            with handed, record:
                return work(own)

        try:
            # What is captured is what is watched: memory that an earlier run has made may be freed by now.
            if launch.INTERPRETED:
                result = watched()
                repeat = repeated(record.calls, device)
            else:
                repeat, result = captured(watched, device)
            self.refused = record.refused or handed.refused
        except FAILURES as cause:
            self.refused = first_line(cause)
        if self.refused is None:
            self._repeat, self._result, self._inputs, self._kept = repeat, result, own, record.kept

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Return the work's result for these inputs, in the same tensors at every replay."""
        assert self._repeat is not None
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, list(inputs))
        self._repeat()
        self.replays += 1
        return self._result


class Passes:
    """The passes of one run that were asked for last."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self.forget()

    def forget(self) -> None:
        """Give back the memory that captured passes keep."""
        self.kept = Kept[Pass](self._most)

    def of(self, key: Hashable, inputs: Sequence[Tensor], read: Sequence[Tensor]) -> Pass:
        """Return the pass of a work that `key` tells from others, on inputs of this form and these tensors."""
        forms = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs])
        where = places(read)
        if where is None:  # one of another kind than torch's own, of which no address is known
            return Pass()
        whole = key, forms, where, launch.current_stream(inputs[0].device)
        return self.kept.get(whole) or self.kept.put(whole, Pass())


def _is_strided(tensor: Tensor) -> bool:
    """Whether a tensor lies in one piece of memory, as a sparse one does not."""
    return tensor.layout is torch.strided


def first_line(cause: BaseException) -> str:
    """Return the first line of an exception's text."""
    return (str(cause) or type(cause).__name__).splitlines()[0]
