"""The forward and backward passes of a model, captured: the same kernels on the values of another micro-batch.

A graph repeats kernels and no Python. What makes a replay right is that nothing but tensors changes from one call to
the next, and that all of them are where the kernels read them:

- **Inputs are written to the graph's own memory before each replay**; parameters and buffers are read where they lie.
  The key holds the forms of the former and the addresses of the latter.
- **No operation reads anything else.** `Watched` sees every tensor that an operation takes, and refuses one that is
  neither given nor made on the way: one that lies in a closure may have been freed, and its memory hold other examples.
  It refuses operations that are not torch's own, since what those read does not show.
- **Python saw no value**: an operation for which the host waits is refused, and so is a tensor whose address or values
  are handed to code that torch does not see.
- **What is captured is what was watched**, in the same run.
- **Random numbers are drawn anew**: a graph takes them from torch's generator as it is at the replay.

What Python itself decides (a step's number, an attribute that changes) stays as it was. So the caller compares replays
with runs of the model now and then (`dpcore.torch.model.repeated`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from types import NoneType
from typing import Any, TypeVar

import torch
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Buffer, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dpcore_triton import launch
from dpcore_triton.described import places
from dpcore_triton.kept import Kept
from dpcore_triton.recording import UNREPEATABLE, Recording, beside, captured, repeated

Tensor = torch.Tensor
T = TypeVar("T")
Work = Callable[[list[Tensor]], T]
"""A function of the values of its inputs, of those of the tensors that it reads, and of torch's random numbers."""

# Draws are repeated: a graph takes the generator's state at the replay, and recorded calls draw from it again. Whether
# an index gives a shape that depends on values is seen of its dtype.
_REFUSED = dict(UNREPEATABLE)
del _REFUSED[torch.Tag.nondeterministic_seeded]
_INDEXING = (torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_)
_PLAIN = (
    NoneType, bool, int, float, complex, str, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
_ASKED = (NoneType, bool, int, str, torch.Size, torch.dtype, torch.device, torch.layout, Node, Tensor)
_METHODS = ("item", "tolist", "data_ptr", "__bool__", "__int__", "__index__", "__contains__")
_HANDED_OVER = frozenset(getattr(Tensor, name) for name in _METHODS)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is torch's own, of one piece of memory: of others no address is known."""
    return type(tensor) in (Tensor, Parameter, Buffer) and tensor.layout is torch.strided


class Watched(Recording):  # type: ignore[no-untyped-call]
    """A recording that refuses what is none of torch's own operations on tensors given or made on the way."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__(_REFUSED)
        self._known: dict[int, StorageWeakRef] = {}
        self._know(given)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `Recording`."""
        before = self.refused
        result = super().__torch_dispatch__(function, types, args, kwargs)
        attention = "attention" in function.name()  # its seed is on the host, but in a capture on the device
        if function.overloadpacket in _INDEXING or attention:  # an index's tag is of masks alone
            self.refused = before
        reason = self._reason(function, tree_leaves((args, kwargs or {})))
        if reason is not None:
            self.refused = f"{function}: {reason}"
        self._know([leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)])
        if not launch.INTERPRETED:  # all activations at once; a graph has memory of its own
            self.kept.clear()
            self.calls.clear()
        return result

    def _reason(self, function: Any, taken: list[Any]) -> str | None:
        """Return why an operation is refused, None where it is not."""
        tensors = [leaf for leaf in taken if isinstance(leaf, Tensor)]
        if function.namespace not in ("aten", "prims") or not all(
            isinstance(leaf, (*_PLAIN, Tensor)) for leaf in taken
        ):
            return "what it reads is not seen"
        if function.overloadpacket is torch.ops.aten.lift_fresh:
            return "a tensor is made of Python's numbers; keep it as a buffer"
        if not all(is_plain(tensor) and _storage(tensor)._cdata in self._known for tensor in tensors):
            return "it takes a tensor that is neither a parameter, a buffer nor the batch's"
        if function.overloadpacket in _INDEXING and any(t.dtype in (torch.bool, torch.uint8) for t in tensors[1:]):
            return "the host waits for a mask's values"
        if len({tensor.device for tensor in tensors}) > 1 and "attention" not in function.name():
            return "it copies between devices"
        if function.overloadpacket is torch.ops.aten._linalg_check_errors:
            return "the host waits for its result"
        return None

    def _know(self, tensors: Sequence[Tensor]) -> None:
        for tensor in filter(is_plain, tensors):
            storage = _storage(tensor)
            # A weak reference: the memory may be freed, and what tells it from others is not given to others.
            self._known.setdefault(storage._cdata, StorageWeakRef(storage))  # type: ignore[no-untyped-call]


class HandedOver(TorchFunctionMode):
    """Notes whether a tensor's values or address went to Python, or to kernels that torch does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: str | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `torch.overrides.TorchFunctionMode`."""
        result = function(*args, **(kwargs or {}))
        if function in _HANDED_OVER or not all(isinstance(leaf, _ASKED) for leaf in tree_leaves(result)):
            name = getattr(function, "__qualname__", str(function))
            self.refused = f"{name} hands a tensor to code that torch does not see"
        return result


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

        def watched() -> tuple[Any, Watched]:
            handed, record = HandedOver(), Watched([*own, *read])
            with handed, record:
                result = work(own)
            self.refused = handed.refused or record.refused
            return result, record

        try:
            if launch.INTERPRETED:
                made = watched()
                repeat = repeated(made[1].calls, device)
            else:
                beside(watched, device)  # so that nothing is captured in vain: torch does not recover from it
                if self.refused is not None:
                    return
                # Watched again: memory that the first run has made, and that Python keeps, may be freed at a replay.
                repeat, made = captured(watched, device)
        except Exception as cause:  # noqa: BLE001 - the model runs as without, and raises again what is its own
            self.refused = first_line(cause)
        if self.refused is None:
            (self._result, record), self._repeat, self._inputs = made, repeat, own
            self._kept = record.kept

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Return the work's result for these inputs, in the same tensors at every replay."""
        assert self._repeat is not None
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, list(inputs))
        try:
            self._repeat()
        except Exception as cause:  # noqa: BLE001 - the model runs as without, and raises again what is its own
            self.refused = first_line(cause)
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

    @staticmethod
    def reason(tensors: Sequence[Tensor]) -> str | None:
        """Return why passes that read these tensors cannot be captured, None where they may be."""
        return None if all(map(is_plain, tensors)) else "a tensor is sparse, or of a class of its own"

    def of(self, key: Hashable, inputs: Sequence[Tensor], read: Sequence[Tensor]) -> Pass:
        """Return the pass of a work that `key` tells from others, on inputs of this form and these tensors."""
        forms = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs])
        whole = key, forms, places(read), launch.current_stream(inputs[0].device)
        return self.kept.get(whole) or self.kept.put(whole, Pass())


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    with torch._C.DisableTorchFunction():  # what is done here is not the model's
        return tensor.untyped_storage()


def first_line(cause: BaseException) -> str:
    """Return the first line of an exception's text."""
    return (str(cause) or type(cause).__name__).splitlines()[0]
