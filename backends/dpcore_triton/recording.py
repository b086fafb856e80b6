"""Work on the device, recorded call by call while it runs, and repeated without the Python code around it.

A recording has every launch and every operation of torch that computes, with the arguments themselves, and keeps their
results alive. Repeating it makes the same calls again, on the same addresses: values that change must be in memory. In
the interpreter the calls are made one by one; on the device they are captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpcore_triton import launch

Tensor = torch.Tensor
T = TypeVar("T")

# torch's tags of operations whose next call may do something else, and the reason.
UNREPEATABLE: dict[Any, str] = {
    torch.Tag.data_dependent_output: "the host waits for its result",
    torch.Tag.dynamic_output_shape: "its shapes depend on values",
    torch.Tag.nondeterministic_seeded: "it draws random numbers",
}
if hasattr(torch.Tag, "cudagraph_unsafe"):  # in later versions
    UNREPEATABLE[torch.Tag.cudagraph_unsafe] = "torch says that no CUDA graph can hold it"
_ALLOCATIONS = (
    torch.ops.aten.empty, torch.ops.aten.empty_strided, torch.ops.aten.empty_like, torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)  # fmt: skip


_capturing = Lock()
_failed: list[bool] = []


class Operation(NamedTuple):
    """An operation of torch, and the tensors that its first call returned."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]  # the new ones: neither arguments nor views of them

    def start(self) -> None:
        """Compute it again, into the same tensors."""
        found = _made(self.function, self.function(*self.args, **self.kwargs))
        for output, again in zip(self.outputs, found, strict=True):
            output.copy_(again)


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The work started on the device, in order; `unrepeatable` operations cannot be repeated."""

    def __init__(self, unrepeatable: Mapping[Any, str] = UNREPEATABLE) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unrepeatable = unrepeatable
        self.calls: list[launch.Launch | Operation] = []
        self.kept: list[Tensor] = []  # so that no address is given to another tensor
        self.refused: str | None = None  # why this cannot be repeated

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if launch.unseen():
            return result
        if function.is_view:  # of an argument: a caller's tensor must not be kept, or the next one would lie elsewhere
            return result
        made = _made(function, result)
        self.kept += made
        if function.overloadpacket in _ALLOCATIONS:
            return result
        reasons = [self._unrepeatable[tag] for tag in function.tags if tag in self._unrepeatable]
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)}
        if len(places) > 1:
            reasons.append("it copies between host and device")
        if reasons:
            self.refused = f"{function}: {reasons[0]}"
        self.calls.append(Operation(function, args, kwargs, made))
        return result


def _made(function: Any, result: Any) -> list[Tensor]:
    """Return the tensors among an operation's results that are not its arguments."""
    results = result if isinstance(result, (tuple, list)) else [result]
    schema = function._schema.returns
    if len(schema) != len(results):  # one list of tensors, or nothing
        new = bool(schema) and schema[0].alias_info is None
        return [leaf for leaf in results if isinstance(leaf, Tensor)] if new else []
    return [
        leaf
        for leaf, declared in zip(results, schema, strict=True)
        if isinstance(leaf, Tensor) and declared.alias_info is None
    ]


@contextmanager
def recording() -> Iterator[Recording]:
    """Record this thread's launches and operations in the block."""
    record = Recording()
    with launch.told(record.calls), record:
        yield record


def repeated(calls: Sequence[launch.Launch | Operation], device: torch.device) -> Callable[[], None]:
    """Return a function that repeats the calls: on the device a CUDA graph, captured here without computing."""

    @torch.no_grad()
    def start() -> None:
        for call in calls:
            call.start()

    return start if launch.INTERPRETED or not calls else captured(start, device)[0]


def captured(work: Callable[[], T], device: torch.device) -> tuple[Callable[[], None], T]:
    """Capture the work's calls on the device; return a function that repeats them, and the result without values.

    Raises
    ------
    RuntimeError
        If it cannot be captured, or if an earlier capture of this process failed.
    """
    if _failed:
        raise RuntimeError("an earlier capture of this process failed")
    graph = torch.cuda.CUDAGraph()
    # A process captures one graph at a time. Errors are this thread's only: another may read data into pinned memory. A
    # capture that fails leaves its own stream the current one; the outer context goes back to ours.
    try:
        with (
            _capturing,
            torch.cuda.device(device),
            torch.cuda.stream(torch.cuda.current_stream(device)),
            torch.cuda.graph(graph, stream=_side(device), capture_error_mode="thread_local"),
        ):
            result = work()
    except BaseException:
        # torch's allocator may still use the memory of a capture that never ended: no other capture may follow.
        _failed.append(True)
        raise

    def replay() -> None:
        with torch.cuda.device(device):
            graph.replay()

    return replay, result


def beside(work: Callable[[], T], device: torch.device) -> T:
    """Do some work on the stream of captures, so that libraries allocate the memory that they need there."""
    current, side = torch.cuda.current_stream(device), _side(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        result = work()
    current.wait_stream(side)
    return result


@lru_cache
def _side(device: torch.device) -> torch.cuda.Stream:
    # One stream for all captures: a library keeps memory for each stream, inside of the graph that first used it.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
