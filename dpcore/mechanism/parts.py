"""One process's part of a vector whose coordinates several processes own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Part:
    """Coordinates of a vector of `size` from `start` on; `here` is None if the process has none of them."""

    here: Any
    start: int
    size: int
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole vector."""
        return (self.size,)

    def map(self, function: Callable[[Any], Any]) -> "Part":
        """Return the same coordinates as another kind of array."""
        return self if self.here is None else replace(self, here=function(self.here))

    def take(self, whole: Any, from_numpy: Callable[[Any], Any]) -> None:
        """Take over this process's coordinates of a whole vector, in place; no others are read."""
        if self.here is not None:
            self.here[...] = from_numpy(np.asarray(whole[self.start : self.start + len(self.here)]))


class Joined:
    """A whole vector stored in parts. Only the requested parts are read."""

    def __init__(self, parts: Sequence[Part]) -> None:
        present = sorted((part for part in parts if part.here is not None), key=lambda part: part.start)
        self.parts = [part for part in present if len(part.here)] or present[:1]
        self.shape, self.dtype = parts[0].shape, parts[0].dtype
        ends = [part.start + len(part.here) for part in self.parts]
        starts = [part.start for part in self.parts]
        if starts != [0, *ends[:-1]] or ends[-1:] != [parts[0].size]:
            raise ValueError("the parts of a vector do not follow one another")
        if any(str(part.here.dtype).removeprefix("torch.") != self.dtype for part in self.parts):
            raise ValueError("the parts of a vector are not of its dtype")

    def __getitem__(self, at: slice) -> Any:
        """Return some neighboring coordinates as a NumPy array."""
        pieces = [
            np.asarray(part.here[max(at.start - part.start, 0) : max(at.stop - part.start, 0)]) for part in self.parts
        ]
        return np.concatenate(pieces)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return all of it as a NumPy array."""
        return self[0 : self.shape[0]].astype(dtype or self.dtype, copy=False)
