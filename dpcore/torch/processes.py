"""The processes of a `torch.distributed` group that train one model together."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.peers import LOST, Peers
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import Backend
from dpcore.torch.data import batches

T = TypeVar("T")

CAVEAT = (
    "Several processes trained together: the run's keys, and sums without noise, crossed the network between them, "
    "which is trusted as the machines are."
)

OTHER_STATE = (
    "rank {} would take another step than rank 0: its step number, key, clip norm or noise differs, as after loading "
    "another state; no rank releases it: load the same state in all processes"
)
OTHER_SETTINGS = (
    "rank {} would take this step with other settings of parameter groups (learning rate, ...) than rank 0: no rank "
    "releases it; schedulers must do the same in all processes"
)

# Numbers of the sum that a process sends in one message, which limits the size of its copies.
_MESSAGE = 1 << 24


def caveats_of(peers: Peers) -> tuple[str, ...]:
    """Return the sentences that a statement needs if several processes train."""
    return (CAVEAT,) if peers.world_size > 1 else ()


class Processes(Peers):
    """See `dpcore.mechanism.peers.Peers`.

    Notes
    -----
    In a step each process sends two large messages. The first has the others' pieces of its clipped sums, integers in
    float64, so that the total is exact and the same for any number of processes. The second has the pieces that it
    updated. Each of W processes keeps 1/W of the state of noise, filter and update, and draws 1/W of the noise.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self._first = dist.get_global_rank(group, 0)
        self._sum = torch.empty(0, dtype=torch.float64)
        self._gone = False  # whether a process was lost: later messages no longer fit each other

    def totals(self, like: Sequence[Any], backend: Backend[Any]) -> list[Any]:
        """See `Peers.totals`: views of one vector, whose length is a multiple of the number of processes."""
        sizes = [vector.shape[0] for vector in like]
        length = -(-sum(sizes) // self.world_size) * self.world_size
        kept = backend.from_numpy(np.zeros(length))
        self._sum = as_tensor(kept)
        ends = np.cumsum(sizes).tolist()
        return [kept[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def reduced(self, totals: list[Any], pieces: Sequence[Piece]) -> list[Any]:
        """See `Peers.reduced`."""
        own = self._sum.new_empty(len(self._sum) // self.world_size)
        for_each, columns = self._sum.view(self.world_size, -1), max(_MESSAGE // self.world_size, 1)
        with self._lost():
            for start in range(0, len(own), columns):
                sent = for_each[:, start : start + columns].contiguous()
                received = torch.empty_like(sent)
                exchange(received, sent, self._group)
                torch.sum(received, 0, out=own[start : start + columns])
        parts = own if isinstance(totals[0], torch.Tensor) else own.numpy()
        return _cut(parts, [stop - start for _, start, stop in pieces])

    def whole(self, parts: Sequence[Any], pieces: Sequence[Piece], layout: Layout) -> list[Any]:
        """See `Peers.whole`."""
        tensors = [as_tensor(part) for part in parts]
        length = -(-layout.dimension // self.world_size)
        own = torch.zeros(length, dtype=tensors[0].dtype, device=tensors[0].device)
        gathered = own.new_empty(length * self.world_size)
        own[: sum(map(len, tensors))] = torch.cat(tensors)
        with self._lost():
            all_gather(gathered, own, self._group)
        flat = gathered if isinstance(parts[0], torch.Tensor) else gathered.numpy()
        return _cut(flat, [entry.size for entry in layout.entries])

    def added(self, values: Sequence[float]) -> list[float]:
        """See `Peers.added`."""
        sums = torch.tensor(values, dtype=torch.float64, device=self._sum.device)
        with self._lost():
            dist.all_reduce(sums, group=self._group)
        total: list[float] = sums.tolist()
        return total

    def same(self, value: T) -> T:
        """See `Peers.same`."""
        received = [value]
        with self._lost():
            dist.broadcast_object_list(received, src=self._first, group=self._group)
        return received[0]

    def agree(self, failed: bool, state: str = "", settings: str = "") -> None:
        """See `Peers.agree`."""
        flags = torch.zeros((3, self.world_size), dtype=torch.float64, device=self._sum.device)
        flags[0, self.rank] = float(failed)
        for row, text in enumerate((state, settings), 1):
            flags[row, self.rank] = int(_digest(text)[:12], 16)  # 48 bits: exact in float64
        with self._lost():
            dist.all_reduce(flags, group=self._group)
        if ranks := flags[0].nonzero()[:, 0].tolist():
            raise PrivacyError(
                f"rank {', '.join(map(str, ranks))} failed in this step: no rank releases it, and its sum is dropped; "
                "fix the cause and step the batch again, or end the run"
            )
        check_rows(flags[1:])

    def check_alike(self, settings: Mapping[str, Any]) -> None:
        """Refuse processes whose settings differ, and name every such setting."""
        digests = {name: _digest(value) for name, value in settings.items()}
        every: list[Any] = [None] * self.world_size
        with self._lost():
            dist.all_gather_object(every, digests, group=self._group)
        names = dict.fromkeys(name for own in every for name in own)
        different = [
            f"{name} (rank {', '.join(str(rank) for rank in others)})"
            for name in names
            if (others := [rank for rank, own in enumerate(every) if own.get(name) != every[0].get(name)])
        ]
        if different:
            raise ArgumentError(
                f"not the same as in rank 0: {'; '.join(different)}; must be equal in all {self.world_size} processes"
            )

    @contextmanager
    def _lost(self) -> Iterator[None]:
        if self._gone:
            raise PrivacyError(LOST)
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as cause:  # torch.distributed raises it when a process is gone
            self._gone = True
            raise PrivacyError(LOST) from cause


def check_rows(digests: torch.Tensor) -> None:
    """Raise PrivacyError if a rank's digests of state and settings, (2, W, ...), differ from rank 0's."""
    rows = digests.reshape(2, digests.shape[1], -1)
    for row, sentence in zip(rows, (OTHER_STATE, OTHER_SETTINGS), strict=True):
        if others := (row != row[0]).any(1).nonzero()[:, 0].tolist():
            raise PrivacyError(sentence.format(", ".join(map(str, others))))


def exchange(received: torch.Tensor, sent: torch.Tensor, group: Any) -> None:
    """Send each process its row of `sent`, and receive this process's row from each."""
    dist.all_to_all_single(received, sent, group=group)


def reduce_scatter(own: torch.Tensor, whole: torch.Tensor, group: Any) -> None:
    """Add the whole vectors of all processes. Each process gets its own part of the sum. It needs torch 2.13."""
    dist.reduce_scatter_single(own, whole, group=group)


def all_gather(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """Send every process's part to all."""
    send = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    send(whole, own, group=group)


def as_tensor(array: Any) -> torch.Tensor:
    """Return a backend's array as a tensor, sharing memory."""
    return array if isinstance(array, torch.Tensor) else torch.from_numpy(array)


def _cut(flat: Any, sizes: Sequence[int]) -> list[Any]:
    ends = np.cumsum(sizes).tolist()
    return [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _digest(value: Any) -> str:
    is_tensor = isinstance(value, torch.Tensor)
    given = batches.content(value) if is_tensor else json.dumps(value, sort_keys=True, default=str).encode()
    return hashlib.sha256(given).hexdigest()
