"""A cache of the entries that were used last, by any thread."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """The `most` entries that were used last.

    A key may describe hundreds of tensors, so it is looked up once a call.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[Hashable, tuple[list[int], V]] = {}
        self._clock, self._lock = count(), Lock()

    def get(self, key: Hashable) -> V | None:
        """Return an entry, now the last to be dropped; None if there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[0][0] = next(self._clock)
        return entry[1]

    def put(self, key: Hashable, value: V) -> V:
        """Keep a value; if there are too many, drop the entry that was not used for the longest time."""
        with self._lock:
            self._entries[key] = [next(self._clock)], value
            if len(self._entries) > self._most:
                # Hashing a key takes longer than comparing all clocks.
                oldest, _ = min(self._entries.items(), key=lambda entry: entry[1][0][0])
                del self._entries[oldest]
        return value

    def values(self) -> list[V]:
        """Return all entries."""
        with self._lock:
            return [value for _, value in self._entries.values()]
