"""The processes of a model of fully_shard: each keeps its rows of every tensor, and of all that a run keeps beside it.

Notes
-----
Why sensitivity and noise are those of one process. Each example is in one process, which has its whole vector, scales
it by its own norm, and adds it to a float64 vector of the tensor, in whole steps of the release's grid; the
reduce-scatter adds those of all processes. So every coordinate of the sum is the sum of the clipped vectors of the
whole batch, each once, and integers have the same sum in any order (`dpcore.spec.contributions`). A process without
examples adds zeros, never what its made-up batch gave. The noise of a coordinate follows from its element of the
stream, and its one owner draws it once (`Layout.rows` cuts each tensor into disjoint pieces that cover it).

Nothing is released before all have agreed that the whole sum is there. Within a step, fully_shard sends messages as
well, so that a process that fails there is out of step with the others: it takes part in no message any more, and the
others end by the group's timeout. A step's messages are compared before it is released, since those of different
orders could join by chance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from dpcore.errors import PrivacyError
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.blocks import Block
from dpcore.stages.clipping.together import add_sums
from dpcore.torch import processes
from dpcore.torch.processes import Processes


class Sharded(Processes):
    """See `dpcore.mechanism.peers.Peers`; a process owns some rows of each tensor, and holds no others.

    Notes
    -----
    A step sends each tensor's sum once per micro-batch, by a reduce-scatter, and nothing of the moved parameters.
    """

    shards = True

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._added: list[tuple[Sequence[Block], Sequence[Any]]] = []
        self._begun = False  # a step whose sum is not whole yet
        self._order = hashlib.sha256()

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """See `Peers.pieces`."""
        return layout.rows(self.rank, self.world_size)

    def totals(self, like: Sequence[Any], backend: Backend[Any]) -> list[Any]:
        """See `Peers.totals`: of the own pieces."""
        found = [backend.zeros_like(vector, "float64") for vector in like]
        self._sum = processes.as_tensor(found[0])[:0]
        return found

    def rounds(self, count: int) -> int:
        """See `Peers.rounds`: as many as the process with most micro-batches has."""
        most = torch.tensor(count, device=self._sum.device)
        with self._lost():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        self._begun = True
        self._order = hashlib.sha256()
        return int(most)

    def note(self, message: str) -> None:
        """Note a message of a step; all processes must have sent the same ones, in one order."""
        self._order.update(f"{message}\n".encode())

    def add_sums(
        self,
        backend: Backend[Any],
        blocks: Sequence[Block],
        weights: Sequence[Any],
        totals: Sequence[Any],
        scales: Sequence[Any],
    ) -> None:
        """See `Peers.add_sums`: kept until `join`, so that all processes join equally often."""
        self._added.append((blocks, weights))

    def join(self, totals: Sequence[Any], layout: Layout, backend: Backend[Any]) -> None:
        """See `Peers.join`: tensor by tensor, so that no process ever has the sum of more than one."""
        firsts = layout.rows(0, self.world_size)
        for i, (entry, first, total) in enumerate(zip(layout.entries, firsts, totals, strict=True)):
            whole = torch.zeros(first.stop * self.world_size, dtype=torch.float64, device=self._sum.device)
            of_tensor = _like(whole, total)[: entry.size]
            for blocks, weights in self._added:
                add_sums(backend, [blocks[i]], [weights[i]], [of_tensor], [None])
            own = whole.new_empty(first.stop)
            if first.stop:
                self.note(f"sum {i}")
                with super()._lost():
                    processes.reduce_scatter(own, whole, self._group)
            total += _like(own, total)[: total.shape[0]]
        self._added = []

    def drop(self) -> None:
        """See `Peers.drop`."""
        self._added = []

    def reduced(self, totals: list[Any], pieces: Sequence[Piece]) -> list[Any]:
        """See `Peers.reduced`: they are, since `join`."""
        assert not self._added, "join first"
        return totals

    def whole(self, parts: Sequence[Any], pieces: Sequence[Piece], layout: Layout) -> list[Any]:
        """See `Peers.whole`: one tensor after the other."""
        found = []
        for part, entry, first in zip(parts, layout.entries, layout.rows(0, self.world_size), strict=True):
            tensor = processes.as_tensor(part)
            own = tensor.new_zeros(first.stop)
            own[: len(tensor)] = tensor
            every = own.new_empty(first.stop * self.world_size)
            with self._lost():
                if first.stop:
                    processes.all_gather(every, own, self._group)
            found.append(_like(every, part)[: entry.size])
        return found

    def agree(self, failed: bool, state: str = "", settings: str = "") -> None:
        """See `Peers.agree`; a process that failed tells nobody, since the others may wait for another message."""
        if failed:
            self._begun = True
            return
        told = [self._order.digest(), *(hashlib.sha256(text.encode()).digest() for text in (state, settings))]
        own = torch.frombuffer(bytearray(b"".join(told)), dtype=torch.int64).to(self._sum.device)
        found = own.new_empty(len(own) * self.world_size)
        with super()._lost():
            processes.all_gather(found, own, self._group)
        every = found.view(self.world_size, 3, -1)
        if any(not torch.equal(order, every[self.rank, 0]) for order in every[:, 0]):
            raise PrivacyError(
                "processes ran the layers of the sharded model in different orders: no rank releases the step; every "
                "batch must take the same way through a model of fully_shard"
            )
        self._begun = False
        processes.check_rows(every[:, 1:].transpose(0, 1))

    @contextmanager
    def _lost(self) -> Iterator[None]:
        if self._begun:
            raise PrivacyError(
                f"rank {self.rank} left a step of a sharded model midway, so that its messages no longer fit those of "
                "the others; nothing of the step is released: start all processes again from the last checkpoint"
            )
        with super()._lost():
            yield


def _like(tensor: torch.Tensor, array: Any) -> Any:
    return tensor if isinstance(array, torch.Tensor) else tensor.numpy()
