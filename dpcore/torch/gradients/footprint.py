"""What a step's sum takes of memory by a proved graph, for any number of examples: from sizes, without running it.

The graph says of each value how large it is, and between which operations it lives; a size that counts examples grows with
their number. Of the blocks that are made of its results, norms and sums take what `_scratch` says, one tensor at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from dpcore.spec.contributions import FEW_ROWS
from dpcore.stages.clipping.blocks import Block, Embedding, Linear, Rows, Tied
from dpcore.torch.gradients.capture import uncollected
from dpcore.torch.model.memory import Peak

Moments = NDArray[np.float64]
"""(M, 2): bytes at M moments, in any case and for each example."""

# What backends use at once, at most: rows of several examples in a product, entries of tiles, and float64 pieces of rows
# (bytes).
_ROWS, _TILES, _PIECES = 1024, 1 << 21, 1 << 21


@dataclass(frozen=True, eq=False)
class Footprint:
    """What one call of a graph takes, with arrays that have shapes alone, of `count` examples."""

    moments: Moments  # while its operations run; the last one is of its results
    making: float  # for each example, while blocks are made of the results, beside these
    blocks: list[Block]
    count: int

    @staticmethod
    @uncollected()
    def of(graph: Graph, count: int, blocks_of: Callable[[Sequence[Any], int], list[Block]]) -> Footprint:
        """Return that of a graph, captured at `count` examples, of whose results `blocks_of` makes blocks."""
        (output,) = (node for node in graph.nodes if node.op == "output")
        results = _shapes([node.meta["val"] for node in output.args[0]])
        with torch.no_grad(), Peak() as peak:
            blocks = blocks_of(results, count)
        return Footprint(_lives(graph, count), peak.peak / count, blocks, count)

    def needed(
        self, examples: int, points: int, dtype: torch.dtype, parameters: int, *, several: bool, scaled: bool
    ) -> int:
        """Return the bytes that a sum over so many examples takes at one time, at most.

        `dtype` is that of the backend's arrays, and `parameters` are the bytes of all parameters in it. With `several`
        the sum of several rows is clipped; with `scaled` norms and sums are of scaled vectors.
        """
        one, times = np.array([1.0, examples]), examples / self.count
        pairs, rows = (times * size for size in self._held(dtype))
        largest = max((4 * examples * math.prod(b.shape) for b in self.blocks if isinstance(b, Rows)), default=0)
        # Pairs of all points are side by side, rows are added; displaced points are copies of the parameters, and a unit
        # that goes on in the next micro-batch is one row.
        held = (points - 1) * (pairs + parameters) + (rows if points > 1 else 0) + (parameters if several else 0)
        results = float(self.moments[-1] @ one)
        running = held + max(float((self.moments @ one).max(initial=0.0)), results + self.making * examples)
        if any(
            dtype != array.dtype for block in self.blocks for array in arrays_of(block) if array.is_floating_point()
        ):
            running = max(running, held + results + pairs + 2 * rows)
        every = points * pairs + rows
        joining = every + 2 * (rows + largest) if points > 1 else 0
        used = [_scratch(block, examples, points, scaled) for block in self.blocks]
        summing = every + max(used, default=0)
        if several:
            summing += max(every, 3 * parameters)
        return math.ceil(max(running, (points - 1) * parameters + max(joining, summing)))

    def _held(self, dtype: torch.dtype) -> tuple[int, int]:
        """Return the bytes of the blocks' pairs and of their rows, as arrays of a dtype."""
        found = []
        for kind in (True, False):
            sizes: dict[Any, int] = {}
            for block in self.blocks:
                for array in arrays_of(block) if isinstance(block, Rows) is not kind else ():
                    same = array.dtype == dtype or not array.is_floating_point()
                    storage = array.untyped_storage()
                    key = storage._cdata if same else (len(sizes),)  # several layers share their input, but no copies
                    sizes[key] = storage.nbytes() if same else array.numel() * dtype.itemsize
            found.append(sum(sizes.values()))
        return found[0], found[1]


def _shapes(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors without values or memory, views of one another where `values` are."""
    wholes: dict[int, torch.Tensor] = {}
    found = []
    for value in values:
        storage, size = value.untyped_storage(), value.dtype.itemsize
        known = wholes.setdefault(storage._cdata, torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta"))
        whole = known[: storage.nbytes() // size * size].view(value.dtype)
        found.append(whole.as_strided(value.shape, value.stride(), value.storage_offset()))
    return found


def arrays_of(block: Block) -> list[torch.Tensor]:
    """Return the arrays that a block is made of."""
    arrays: list[torch.Tensor] = []

    def note(array: torch.Tensor) -> torch.Tensor:
        arrays.append(array)
        return array

    block.map(note)
    return arrays


def _lives(graph: Graph, count: int) -> Moments:
    """Return the bytes of the graph's values that live while each operation runs; what it is given does not count.

    A value lives as long as a variable has it, or a view of it. What has no value noted, as the gathering of a sharded
    layer's parts, is taken for a view of what it takes.
    """
    nodes = list(graph.nodes)
    place = {node: k for k, node in enumerate(nodes)}
    storages: dict[Any, set[int]] = {}
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    given: set[int] = set()
    for node in nodes:
        own = dict(_storages(node.meta["val"])) if "val" in node.meta else {}
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
    for storage, size in sizes.items():
        grows = size % count == 0
        changes[first[storage], int(grows)] += size / count if grows else size
        changes[last[storage] + 1, int(grows)] -= size / count if grows else size
    return np.cumsum(changes, axis=0)[:-1]


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            yield storage._cdata, storage.nbytes()


def _scratch(block: Block, examples: int, points: int, scaled: bool) -> float:
    """Return the bytes that a block's norms and its sum take at one time, at most, beside its arrays."""
    coordinates = math.prod(block.shape)
    if isinstance(block, Tied):
        table, head = (_scratch(part, examples, points, scaled) for part in (block.embedding, block.linear))
        times, width = points * sum(int(part.shape[1]) for part in block.linear.inputs), block.shape[1]
        cross = 20 * times * points * sum(int(part.shape[1]) for part in block.embedding.indices) + 16 * times * width
        return max(table, head, float(cross)) + (3 * 4 * examples * coordinates if scaled else 0)
    if isinstance(block, Rows):
        size = examples * coordinates
        return min(8 * size, _PIECES * torch.get_num_threads()) + size / 4 + (4 * size if scaled else 0)
    assert isinstance(block, (Linear, Embedding))
    times = points * sum(int(part.shape[1]) for part in block.gradients)
    together = min(examples, max(1, _ROWS // max(1, times))) * times
    if isinstance(block, Embedding):
        return together * (24 * block.shape[1] + 64)
    q, p = block.shape
    if times < FEW_ROWS and not scaled:
        return 8 * together * (p + q) + (4 if points == len(block.inputs) == 1 else 8) * together * max(p, q)
    size = 8 if times < FEW_ROWS else 4
    entries = min(examples * coordinates, _TILES) * (2 if scaled or points > 1 else 1)
    inner = 7 * max(times**2, min(examples * times**2, _TILES // 4)) if block.gram else 0
    at_once = min(examples, max(32, _TILES // max(1, coordinates)))
    sides = at_once * times * (2 * (p + q) if points > 1 or scaled else min(p, q))
    return size * (max(entries, inner) + sides) + _PIECES
