"""What was made once and is kept for the next calls: the entries that were asked for last, whatever the thread."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """The `most` entries that were asked for last.

    A key may describe hundreds of tensors, so that it is looked up once a call.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._entries: dict[Hashable, tuple[list[int], V]] = {}
        self._clock, self._lock = count(), Lock()

    def get(self, key: Hashable) -> V | None:
        """Return an entry, which is the last now to be dropped; None where there is none."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[0][0] = next(self._clock)
        return entry[1]

    def put(self, key: Hashable, value: V) -> V:
        """Keep a value, and drop the entry that nobody has asked for the longest where there are too many."""
        with self._lock:
            self._entries[key] = [next(self._clock)], value
            if len(self._entries) > self._most:
                # A key's hash takes longer than a look at every clock.
                oldest, _ = min(self._entries.items(), key=lambda entry: entry[1][0][0])
                del self._entries[oldest]
        return value

    def values(self) -> list[V]:
        """Return all entries."""
        with self._lock:
            return [value for _, value in self._entries.values()]
