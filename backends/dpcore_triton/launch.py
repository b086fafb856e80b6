"""Kernel launches: device or interpreter, tables of addresses, programs.

Every kernel takes its tensors through a *table* in device memory, a row of integers (addresses, sizes) for each tensor,
so one launch covers a whole list of tensors, whatever their number. A second table has the row of each program.
Integers that change from call to call are never specialized, so nothing is compiled again for another step, learning
rate, key or size.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import local
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, ArgumentTypeError, BackendError

# triton.jit reads this when it decorates a function: a process runs either the interpreter or the device, never both.
INTERPRETED: bool = triton.knobs.runtime.interpret

_KIND = "cpu" if INTERPRETED else "cuda"

WARPS = 4
# Cipher blocks (16 elements each) of a program. On the device one a thread: half a tile for four warps, chosen from the
# compiled code (docs/kernels.md). The interpreter's time depends on the number of operations, hardly on their width, so
# a program takes sixteen tiles there.
BLOCKS = 4096 if INTERPRETED else 128
# Elements of a program, in operations on one tensor alone.
ELEMENTS = 65536 if INTERPRETED else 512
# Examples and coordinates of a program in the clip stage.
ROWS = 32 if INTERPRETED else 4
COLUMNS = 1024 if INTERPRETED else 512


def jit(function: Callable[..., Any]) -> Any:
    """Compile a helper of kernels: `triton.jit`, typed.

    The interpreter gets helpers undecorated: entering it again at each call would cost a third of its time.
    """
    return function if INTERPRETED else triton.jit(function)


def kernel(*integers: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a kernel, once for all values of the arguments named."""

    def compile_once(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(integers))

    return compile_once


def require_device() -> None:
    """Refuse a machine on which no kernel can run.

    Raises
    ------
    BackendError
        If there is neither a CUDA device nor the interpreter.
    """
    if INTERPRETED and not type(triton.language.zeros).__name__.startswith("Interpreted"):
        raise BackendError(
            "backend='triton': TRITON_INTERPRET=1 was set after triton had been imported; set it before Python starts"
        )
    if not INTERPRETED and not torch.cuda.is_available():
        raise BackendError(
            "backend='triton': torch finds no CUDA device (torch.cuda.is_available() is False); use a machine with an "
            "NVIDIA GPU and a CUDA build of torch, set TRITON_INTERPRET=1 before Python starts to run the kernels "
            "slowly on the CPU, or use set_backend('numpy')"
        )


def default_device() -> torch.device:
    """Return where new arrays go: the current CUDA device, or the CPU under the interpreter."""
    return torch.device("cpu") if INTERPRETED else torch.device("cuda", torch.cuda.current_device())


def common_device(**lists: Sequence[torch.Tensor]) -> torch.device:
    """Return the device of all the tensors given.

    Raises
    ------
    ArgumentError
        If a tensor lies where kernels cannot reach it: kernels get addresses, and a wrong one is not caught later.
    """
    devices = {tensor.device for tensors in lists.values() for tensor in tensors}
    expected = default_device() if not devices else devices.pop() if len(devices) == 1 else None
    if expected is not None and expected.type == _KIND:
        return expected
    expected = None
    for name, tensors in lists.items():
        for index, tensor in enumerate(tensors):
            device = tensor.device
            if device.type != _KIND:
                here = "on the CPU, where TRITON_INTERPRET=1 runs the kernels" if INTERPRETED else "on a CUDA device"
                raise ArgumentError(f"{name}[{index}].device={device}: must be {here}; use from_numpy or .to()")
            expected = device if expected is None else expected
            if device != expected:
                raise ArgumentError(f"{name}[{index}].device={device}: must be {expected}, as the other arrays")
    return default_device()


KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The dtypes that examples' arrays may have, as tables number them; all are read as float32."""


def read_as_float32(**lists: Sequence[Any]) -> None:
    """Refuse arrays that are neither float32 nor of 16 bits."""
    float32_only(KINDS, **lists)


def float32_only(known: Container[torch.dtype] = (torch.float32,), /, **lists: Sequence[Any]) -> None:
    """Refuse float64 arrays: the kernels use float64 only where float32 would lose digits."""
    for name, tensors in lists.items():
        if all(getattr(tensor, "dtype", None) in known for tensor in tensors):
            continue
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__name__
                raise ArgumentTypeError(f"{name}[{index}] of type {kind}: must be a torch tensor; use from_numpy")
            if tensor.dtype not in known:
                kind = str(tensor.dtype).removeprefix("torch.")
                raise ArgumentTypeError(f"{name}[{index}].dtype={kind}: must be float32, or use set_backend('numpy')")


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy a small array to `device` without waiting for it.

    From pinned memory, which torch keeps until the copy is through. A GPU that reads pageable memory by itself, as a
    GH200 does, would read an array that is free already: a step's numbers have the scale of its noise.
    """
    with _unseen():
        given = torch.from_numpy(values)
        return (given.pin_memory() if device.type == "cuda" else given).to(device, non_blocking=True)


# Tables and numbers that are kept: a step of a model with per-layer clipping takes several for each layer.
KEPT = 4096

Table = tuple[torch.Tensor, torch.Tensor, int]


Rows = Sequence[tuple[int, ...]] | NDArray[np.int64]


def table(rows: Rows, programs: Sequence[int], device: torch.device) -> Table:
    """Put rows of integers on `device`: (rows, each led by its first program; row of each program; programs).

    A table is kept under its content: the same tensors in the next step cost no transfer.
    """
    counts = tuple(programs)
    return rows_of(rows, counts, device), _row_of(counts, device, current_stream(device)), sum(counts)


def rows_of(rows: Rows, programs: Sequence[int], device: torch.device) -> torch.Tensor:
    """Put rows of integers on `device`, each led by the sum of the programs before it."""
    # Bytes are hashed and compared many times faster than hundreds of tuples.
    content = np.asarray(rows, dtype=np.int64).tobytes()
    return _table(content, tuple(programs), device, current_stream(device))


def current_stream(device: torch.device) -> int:
    """Return the number of the CUDA stream on which kernels start now; 0 for a device that has none."""
    return int(torch.cuda.current_stream(device).cuda_stream) if device.type == "cuda" else 0


@lru_cache(maxsize=KEPT)
def _table(content: bytes, programs: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    # `stream` is in the key because a copy is ordered with the kernels of its own stream only.
    del stream
    rows = np.frombuffer(content, dtype=np.int64).reshape(len(programs), -1)
    first = np.cumsum(programs, dtype=np.int64) - programs
    return upload(np.column_stack([first, rows]), device)


@lru_cache(maxsize=64)
def _row_of(programs: tuple[int, ...], device: torch.device, stream: int) -> torch.Tensor:
    # Four bytes a program: few are kept, and they do not depend on the tensors' addresses.
    del stream
    return upload(np.repeat(np.arange(len(programs), dtype=np.int32), programs), device)


@lru_cache(maxsize=KEPT)
def numbers(values: tuple[float, ...], device: torch.device, stream: int, dtype: str = "float32") -> torch.Tensor:
    """Put numbers on `device`, kept for the next call as tables are."""
    del stream
    return upload(np.array(values, dtype=dtype), device)


class Launch(NamedTuple):
    """A kernel with all of its arguments."""

    function: Any
    grid: tuple[int, ...]
    device: torch.device
    args: tuple[Any, ...]
    meta: dict[str, Any]

    def start(self) -> None:
        """Start it on the current stream of its device."""
        if INTERPRETED:
            with np.errstate(all="ignore"):  # infinities and NaN are ordinary values here
                self.function[self.grid](*self.args, **self.meta)
        else:
            with torch.cuda.device(self.device):
                self.function[self.grid](*self.args, **self.meta)


def launch(
    function: Any, grid: tuple[int, ...], device: torch.device, *args: Any, warps: int = WARPS, **meta: Any
) -> None:
    """Start a kernel on the current stream of `device`; with an empty grid do nothing."""
    if 0 in grid:
        return
    # Without fusion the device rounds each operation as the interpreter does. (Its default differs between versions.)
    call = Launch(function, grid, device, args, {**meta, "num_warps": warps, "enable_fp_fusion": False})
    with _unseen():
        call.start()
    if _told.calls is not None:
        _told.calls.append(call)


class _Told(local):
    """The lists that get this thread's launches, and whether recordings ignore torch's operations at present."""

    calls: list[Any] | None = None
    unseen = False


_told = _Told()


@contextmanager
def _unseen() -> Iterator[None]:
    """Let recordings ignore operations: those inside of a launch, and uploads of constants."""
    before, _told.unseen = _told.unseen, True
    try:
        yield
    finally:
        _told.unseen = before


@contextmanager
def told(calls: list[Any]) -> Iterator[None]:
    """Put every `Launch` of this thread into the list, for the length of the block."""
    before, _told.calls = _told.calls, calls
    try:
        yield
    finally:
        _told.calls = before


def unseen() -> bool:
    """Return whether recordings of this thread ignore torch's operations at present."""
    return _told.unseen
