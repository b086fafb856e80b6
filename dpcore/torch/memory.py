"""The machine's free memory for gradients, the number of examples that fit at once, and the refusal if none fits.

The memory of a step's sum follows from sizes, for any number of examples (`Footprint`). A proved graph has each value's
size and lifetime; a size that counts examples grows with their number. For the blocks made of its results, norms and
sums take the memory of `_scratch`, one tensor at a time. One by one, a row of every tensor is kept for each example;
the model's own memory for a single example is not counted.

Notes
-----
The largest that fits is taken, up to the examples that a step usually has at most: small products cost more than the
page faults of large arrays, and one micro-batch a step is one set of dropout masks, whatever the machine.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Graph
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.spec.contributions import FEW_ROWS
from dpcore.spec.free_memory import host_memory, words
from dpcore.spec.pair_ops import LinearPairs
from dpcore.stages.clipping.blocks import Block, Chunked, Embedding, Linear, Rows, Tied, uses
from dpcore.torch.gradients.capture import uncollected

SHARE = 0.5
"""Share of the free memory when the run is built; the rest is for other programs and the model itself."""
_REGISTER = 16
"""Float32 numbers in the longest register of a processor: some kernels round the rest of an array otherwise."""
UNKNOWN = 2**30
"""The limit if the free memory is unknown."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Limit(NamedTuple):
    """The bytes that a micro-batch may take, and the source of this limit."""

    bytes: int
    source: str


def limit_of(max_memory: int | str | None, device: torch.device) -> Limit:
    """Return the limit that was given, or half of the free memory on the model's device."""
    if max_memory is not None:
        return Limit(parse_memory(max_memory), f"max_memory={max_memory!r}")
    free, where = free_memory(device)
    if free is None:
        return Limit(UNKNOWN, "this machine does not report its free memory")
    return Limit(max(int(SHARE * free), 1), f"half of the {words(free)} that {where} had free at the build")


def parse_memory(max_memory: int | str) -> int:
    """Return a memory size in bytes, from a number of bytes or a text such as ``"1 GiB"`` or ``"512 MB"``."""
    if isinstance(max_memory, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", max_memory)
        if match is None or match[2].upper() not in _UNITS:
            raise ArgumentError(f"max_memory={max_memory!r}: must be bytes or a text such as '1 GiB' or '512 MB'")
        return validate.integer(minimum=1, max_memory=round(float(match[1]) * _UNITS[match[2].upper()]))
    if isinstance(max_memory, float):
        raise ArgumentTypeError(f"max_memory={max_memory!r}: must be whole bytes or a text such as '1 GiB'")
    return validate.integer(minimum=1, max_memory=max_memory)


def free_memory(device: torch.device) -> tuple[int | None, str]:
    """Return the free bytes of a device, None if they cannot be known, and the words for it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # Memory that torch caches and does not use is free for this process.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached), str(device)
    return host_memory()


_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of glibc's malloc.h
_OWN = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let the C library keep freed tensors' memory for the next step's tensors; return whether it does.

    By default glibc gives every large block back to the system at once, so that each step touches all its pages for the
    first time again: of a transformer's step on a CPU that was 13 % of the processor time and 255,000 page faults
    (`docs/performance.md`). A user who chose an allocator or its settings, by one of these variables, has chosen.
    """
    if any(os.environ.get(name) for name in _OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 2**30) and mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def is_out_of_memory(cause: BaseException) -> bool:
    """Whether an exception says that there was no memory: torch says it on a CPU by a RuntimeError."""
    if isinstance(cause, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(cause, RuntimeError) and "DefaultCPUAllocator: " in str(cause)


def microbatch_size(limit: int, needed: Callable[[int], int], most: int) -> int:
    """Return the number of examples to differentiate at once, at least 1.

    `needed` gives the bytes of a step's sum for a number of examples, more for more of them; `most` are the examples
    that a step usually has at most, which are cut into micro-batches of one size, of whole registers if few are added.
    """
    fits = max(bisect_right(range(1, most + 1), limit, key=needed), 1)
    size = -(-most // -(-most // fits))
    whole = whole_registers(size)
    return whole if whole <= fits else size


def whole_registers(size: int) -> int:
    """Return the next multiple of a register's numbers, if that is at most an eighth more."""
    whole = -(-size // _REGISTER) * _REGISTER
    return whole if 8 * (whole - size) <= size else size


class Peak(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors' storages, from the operation that makes them to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # Arguments are the caller's or counted already, and a result may be a view of one.
        known = self._alive | {storage._cdata for storage in storages_of((args, kwargs))}
        for storage in storages_of(result):
            if storage._cdata not in known:
                self._alive.add(storage._cdata)
                self._now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return result

    def _freed(self, number: int, size: int) -> None:
        self._alive.discard(number)
        self._now -= size


def storages_of(tree: Any) -> list[torch.UntypedStorage]:
    """Return the memory of a tree's tensors."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]


Moments = NDArray[np.float64]
"""(M, 2): bytes at M moments, in any case and for each example."""

# The most that backends use at once: rows of several examples in a product, entries of tiles, bytes of float64 rows.
_ROWS, _TILES, _PIECES = 1024, 1 << 21, 1 << 21


@dataclass(frozen=True, eq=False)
class Footprint:
    """The memory of finding gradients of `count` examples, from arrays that have only shapes."""

    moments: Moments  # while its operations run; the last one is of its results
    making: float  # for each example, while blocks are made of the results, in addition to all of these
    blocks: list[Block]
    count: int

    @staticmethod
    @uncollected()
    def of(graph: Graph, count: int, blocks_of: Callable[[list[Any], int], list[Block]]) -> Footprint:
        """Return that of a graph, captured at `count` examples, of whose results `blocks_of` makes blocks."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        values = [node.meta["val"] for node in output.args[0]]
        inputs = {
            s._cdata for node in graph.nodes if node.op != "call_function" for s in storages_of(node.meta.get("val"))
        }
        with torch.no_grad(), Peak() as peak:
            results = _shapes(values)
            before = peak.peak
            # What the graph was given lives on, whatever becomes of the list.
            held = [one for one, value in zip(results, values, strict=True) if value.untyped_storage()._cdata in inputs]
            blocks = blocks_of(results, count)
        del held
        return Footprint(_lives(graph, count), (peak.peak - before) / count, blocks, count)

    @staticmethod
    def of_rows(parameters: Sequence[torch.Tensor]) -> Footprint:
        """Return that of gradients which are found one by one: those of one example, and a row for each."""
        rows = [torch.empty(1, value.numel(), dtype=value.dtype, device="meta") for value in parameters]
        size = sum(row.nbytes for row in rows)
        return Footprint(np.array([[size, size]], dtype=np.float64), 0.0, [Rows(row) for row in rows], 1)

    def needed(
        self,
        examples: int,
        points: int,
        kept: Callable[[torch.dtype], torch.dtype],
        parameters: int,
        *,
        several: bool,
        scaled: bool,
        copied: Callable[[LinearPairs[Any] | None], bool],
    ) -> int:
        """Return the most bytes that a sum over `examples` examples takes at one time.

        `kept` gives the dtype that arrays of a dtype have as the backend's, and `parameters` are the bytes of all
        parameters there. With `several` the sum of several rows is clipped; with `scaled` norms and sums are of scaled
        vectors. `copied` is the backend's `copies_halves`.
        """
        one, times = np.array([1.0, examples]), examples / self.count
        pairs, rows = (times * size for size in self._kept_bytes(kept))
        if points > 1 or several:  # rows are added up, in no 16 bits
            rows = times * self._kept_bytes(lambda _: kept(torch.float32))[1]
        formed = (b for block in self.blocks for b in uses(block) if isinstance(b, Rows))
        largest = max((4 * examples * math.prod(b.shape) for b in formed), default=0)
        # Pairs of all points are side by side, rows are added; displaced points are copies of the parameters, and a
        # unit that continues in the next micro-batch is one row.
        stored = (points - 1) * (pairs + parameters) + (rows if points > 1 else 0) + (parameters if several else 0)
        results = float(self.moments[-1] @ one)
        running = stored + max(float((self.moments @ one).max(initial=0.0)), results + self.making * examples)
        if any(kept(array.dtype) != array.dtype for block in self.blocks for array in arrays_of(block)):
            running = max(running, stored + results + pairs + 2 * rows)
        every = points * pairs + rows
        joining = every + 2 * (rows + largest) if points > 1 else 0
        used = [_scratch(block, examples, points, scaled) for block in self.blocks]
        if several:  # all may be of one unit, whose inner products are of all their positions
            used += [_scratch(block, 1, points, scaled, examples) for block in self.blocks]
        summing = every + points * times * self._copied_bytes(points, kept, copied) + max(used, default=0)
        if several:
            summing += max(every, 3 * parameters)
        return math.ceil(max(running, (points - 1) * parameters + max(joining, summing)))

    def _copied_bytes(
        self, points: int, kept: Callable[[torch.dtype], torch.dtype], copied: Callable[[LinearPairs[Any] | None], bool]
    ) -> int:
        """Return the bytes of a point's copies in float32 that the backend makes at once: of all layers, or of a table.

        Points may be subtracted, and are then multiplied as precisely as the backend can.
        """
        layers, tables = 0, [0]
        for block in self.blocks:
            layer = block.layer._replace(exact=points > 1) if isinstance(block, Linear) else None
            size = sum(
                4 * array.numel()
                for use in uses(block)
                if isinstance(use, (Linear, Embedding)) and copied(layer)
                for array in (use.gradients if isinstance(use, Embedding) else (*use.inputs, *use.gradients))
                if kept(array.dtype).itemsize == 2
            )
            if isinstance(block, Linear):
                layers += size
            else:
                tables.append(size)
        return max(layers, *tables)

    def _kept_bytes(self, kept: Callable[[torch.dtype], torch.dtype]) -> tuple[int, int]:
        """Return the bytes of the blocks' pairs and of their rows, as arrays of the dtypes that they are kept in."""
        sums = []
        for kind in (True, False):
            sizes: dict[Any, int] = {}
            for use in (use for block in self.blocks for use in uses(block)):
                for array in arrays_of(use) if isinstance(use, Rows) is not kind else ():
                    same = array.dtype == kept(array.dtype)
                    storage = array.untyped_storage()
                    key = storage._cdata if same else (len(sizes),)  # several layers share their input, but no copies
                    sizes[key] = storage.nbytes() if same else array.numel() * kept(array.dtype).itemsize
            sums.append(sum(sizes.values()))
        return sums[0], sums[1]


def _shapes(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without values or memory, views of one another if `values` are."""
    wholes: dict[int, torch.Tensor] = {}
    shapes = []
    for value in values:
        storage, size = value.untyped_storage(), value.dtype.itemsize
        known = wholes.setdefault(storage._cdata, torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta"))
        whole = known[: storage.nbytes() // size * size].view(value.dtype)
        shapes.append(whole.as_strided(value.shape, value.stride(), value.storage_offset()))
    return shapes


def arrays_of(block: Block) -> list[torch.Tensor]:
    """Return the arrays that a block is made of."""
    arrays: list[torch.Tensor] = []

    def note(array: torch.Tensor) -> torch.Tensor:
        arrays.append(array)
        return array

    block.map(note)
    return arrays


def _lives(graph: Graph, count: int) -> Moments:
    """Return the bytes of the graph's values that live while each operation runs, without the graph's inputs.

    A value lives as long as a variable has it, or a view of it. An operation without a noted value, as the gathering of
    a sharded layer's parts, counts as a view of its inputs.
    """
    nodes = list(graph.nodes)
    place = {node: k for k, node in enumerate(nodes)}
    storages: dict[Any, set[int]] = {}
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    given: set[int] = set()
    for node in nodes:
        own = {s._cdata: s.nbytes() for s in storages_of(node.meta["val"])} if "val" in node.meta else {}
        known = own.keys() if "val" in node.meta else set[int]().union(*(storages[i] for i in node.all_input_nodes))
        storages[node] = set(known)
        if node.op == "placeholder":
            given |= storages[node]
        end = max((place[user] for user in node.users), default=place[node])
        for storage in storages[node] - given:
            sizes.setdefault(storage, own.get(storage, 0))
            first.setdefault(storage, place[node])
            last[storage] = max(last.get(storage, 0), end)
    changes = np.zeros((len(nodes) + 1, 2))
    for node in nodes:  # memory of our operations other than their results
        changes[place[node], 1] += node.meta.get("scratch", 0) / count
        changes[place[node] + 1, 1] -= node.meta.get("scratch", 0) / count
    for storage, size in sizes.items():
        grows = size % count == 0
        changes[first[storage], int(grows)] += size / count if grows else size
        changes[last[storage] + 1, int(grows)] -= size / count if grows else size
    return np.cumsum(changes, axis=0)[:-1]


def _scratch(block: Block, examples: int, points: int, scaled: bool, size: int = 1) -> float:
    """Return the most bytes that a block's norms and its sum take at one time, in addition to its arrays.

    `examples` may be units, each of `size` examples.
    """
    coordinates = math.prod(block.shape)
    if isinstance(block, Chunked):
        with torch.no_grad(), Peak() as making:
            piece, _, _ = next(block.pieces())
        made: float = making.peak / block.examples * (examples * size * points + 1)  # one for an example's logits
        return made + _scratch(piece, examples, points, scaled, size)
    if isinstance(block, Tied):
        table, head = (_scratch(part, examples, points, scaled, size) for part in (block.embedding, block.linear))
        points *= size
        tokens = points * sum(int(part.shape[1]) for part in block.embedding.indices)
        cross = 16 * tokens * block.shape[1]
        if isinstance(block.linear, Linear):
            times = points * sum(int(part.shape[1]) for part in block.linear.inputs)
            cross = 20 * times * tokens + 16 * times * block.shape[1]
        return max(table, head, float(cross)) + (3 * 4 * examples * coordinates if scaled else 0)
    if isinstance(block, Rows):
        entries = examples * coordinates
        return min(8 * entries, _PIECES * torch.get_num_threads()) + entries / 4 + (4 * entries if scaled else 0)
    assert isinstance(block, (Linear, Embedding))
    times = points * size * sum(int(part.shape[1]) for part in block.gradients)
    together = min(examples, max(1, _ROWS // max(1, times))) * times
    if isinstance(block, Embedding):
        return together * (24 * block.shape[1] + 64)
    q, p = block.shape
    if times < FEW_ROWS and not scaled:
        item = max(array.itemsize for array in (*block.inputs, *block.gradients))
        return 8 * together * (p + q) + (item if points == len(block.inputs) == 1 else 8) * together * max(p, q)
    wide = 8 if times < FEW_ROWS else 4
    entries = min(examples * coordinates, _TILES) * (2 if scaled or points > 1 else 1)
    inner = 7 * max(times**2, min(examples * times**2, _TILES // 4)) if block.gram else 0
    at_once = min(examples, max(32, _TILES // max(1, coordinates)))
    # Copied to begin with a cache line, or into float32.
    widths = (q, block.gradients[0].itemsize), (p, block.inputs[0].itemsize)
    lined = sum(width for width, item in widths if times * width % 16 or (item == 2 and points == 1))
    sides = at_once * times * ((2 * (p + q) if points > 1 or scaled else min(p, q)) + lined)
    return wide * (max(entries, inner) + sides) + min(8 * examples * coordinates, _PIECES)
