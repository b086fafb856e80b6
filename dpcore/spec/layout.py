"""The layout of a run: which elements of the random stream belong to which tensor."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dpcore.errors import ArgumentError
from dpcore.spec.stream import MAX_ELEMENTS, TILE


@dataclass(frozen=True)
class Entry:
    """One tensor: its name, its global shape, and the stream element of its first coordinate."""

    name: str
    shape: tuple[int, ...]
    first: int

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return math.prod(self.shape)


class Piece(NamedTuple):
    """Coordinates start .. stop - 1 of a tensor, in row-major order, that one process owns."""

    tensor: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The table of a run's tensors, fixed when the run is built.

    Every tensor starts at a multiple of 4096, so that no tile is shared: small tensors waste words, they never share
    them. A coordinate's element is ``first`` plus its row-major index in the global tensor, whatever its shard,
    parameter group or memory format.
    """

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, Sequence[int]]]) -> "Layout":
        """Lay tensors out in the given order; two of one name, or too many for the stream, are an ArgumentError."""
        entries, first = list[Entry](), 0
        for name, shape in shapes:
            entry = Entry(name, tuple(int(side) for side in shape), first)
            entries.append(entry)
            first += -(-max(entry.size, 1) // TILE) * TILE
        names = [entry.name for entry in entries]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ArgumentError(f"name={twice!r}: appears twice in the layout, every tensor needs a name of its own")
        if first > MAX_ELEMENTS["chacha20"]:
            raise ArgumentError(f"layout of {first} elements: must be at most {MAX_ELEMENTS['chacha20']}")
        return cls(tuple(entries))

    @cached_property
    def sizes(self) -> list[int]:
        """Number of coordinates of each tensor."""
        return [entry.size for entry in self.entries]

    @property
    def dimension(self) -> int:
        """Number of coordinates of all tensors together (padding not counted)."""
        return sum(entry.size for entry in self.entries)

    def pieces(self, rank: int, world_size: int) -> tuple[Piece, ...]:
        """Return a process's piece of each tensor; with one process every tensor, even those without coordinates.

        All coordinates, one tensor after the other, are cut into `world_size` runs of one length; the last ones may be
        shorter, or empty: an empty piece then.
        """
        if world_size == 1:
            return tuple(Piece(i, 0, entry.size) for i, entry in enumerate(self.entries))
        length = -(-self.dimension // world_size)
        own, before = list[Piece](), 0
        for i, entry in enumerate(self.entries):
            start, stop = max(rank * length - before, 0), min((rank + 1) * length - before, entry.size)
            if start < stop:
                own.append(Piece(i, start, stop))
            before += entry.size
        return tuple(own) or (Piece(0, 0, 0),)

    def rows(self, rank: int, world_size: int) -> tuple[Piece, ...]:
        """Return a process's piece of each tensor if torch shards it along its first dimension, as DTensor does.

        Rows are cut into `world_size` chunks of one size; the last ones may be smaller, or empty.
        """
        pieces = list[Piece]()
        for i, entry in enumerate(self.entries):
            length = entry.shape[0] if entry.shape else 1
            chunk, width = -(-length // world_size), entry.size // max(length, 1)
            start, stop = (min(chunk * end, length) * width for end in (rank, rank + 1))
            pieces.append(Piece(i, start, stop))
        return tuple(pieces)

    def of_pieces(self, pieces: Sequence[Piece]) -> "Layout":
        """Return the table of pieces: vectors of the same names, at their own elements of the stream."""
        whole = tuple(Piece(i, 0, entry.size) for i, entry in enumerate(self.entries))
        if tuple(pieces) == whole:
            return self
        named = [(self.entries[tensor], start, stop) for tensor, start, stop in pieces]
        return Layout(tuple(Entry(entry.name, (stop - start,), entry.first + start) for entry, start, stop in named))

    def to_list(self) -> list[list[object]]:
        """Return the table as plain JSON values."""
        return [[entry.name, list(entry.shape), entry.first] for entry in self.entries]

    def digest(self) -> str:
        """Return the SHA-256 of the table, as the privacy statement carries it."""
        return hashlib.sha256(json.dumps(self.to_list()).encode()).hexdigest()
