"""Records some coordinates of each released gradient: as public as the releases are."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.spec.layout import Layout


class Recorder:
    """Released averages and filter outputs at evenly spaced coordinates, and the share of negative second moments.

    The coordinates are chosen only by the layout's sizes, without looking at data.
    """

    def __init__(self, layout: Layout, coordinates: int, dtype: str = "float32") -> None:
        self.coordinates = min(coordinates, layout.dimension)
        self.dtype = dtype
        chosen = np.arange(self.coordinates, dtype=np.int64) * layout.dimension // max(self.coordinates, 1)
        ends = np.cumsum([entry.size for entry in layout.entries])
        # The chosen coordinates of each tensor, counted from its own first one.
        self._places = [
            chosen[(chosen >= end - entry.size) & (chosen < end)] - (end - entry.size)
            for entry, end in zip(layout.entries, ends, strict=True)
        ]
        self._seen: tuple[NDArray[Any], NDArray[Any]] | None = None
        self.released: list[NDArray[Any]] = []
        self.filtered: list[NDArray[Any]] = []
        self.negative_share: list[float] = []

    @classmethod
    def of(cls, layout: Layout, state: Mapping[str, Any]) -> "Recorder":
        """Return the recorder whose `coordinates` and `arrays` were saved."""
        recorder = cls(layout, int(state["coordinates"]))
        recorder.released, recorder.filtered = (
            list(np.asarray(state[name]).copy()) for name in ("released", "filtered")
        )
        recorder.negative_share = np.asarray(state["negative_share"]).tolist()
        return recorder

    def see(self, released: Sequence[Any], filtered: Sequence[Any]) -> None:
        """Look at a step's release: flat arrays of the backend, one for each entry of the layout."""
        self._seen = self._pick(released), self._pick(filtered)

    def _pick(self, arrays: Sequence[Any]) -> NDArray[Any]:
        taken = [array[at] for array, at in zip(arrays, self._places, strict=True)]
        return np.concatenate([np.asarray(t.cpu() if hasattr(t, "cpu") else t) for t in taken]).astype(self.dtype)

    def keep(self, negative_share: float) -> None:
        """Add the step that was seen."""
        assert self._seen is not None
        self.released.append(self._seen[0])
        self.filtered.append(self._seen[1])
        self.negative_share.append(negative_share)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return `released` and `filtered`, (T, m), and `negative_share`, (T,) float64."""
        empty = np.empty((0, self.coordinates), dtype=self.dtype)
        return {
            "released": np.stack(self.released) if self.released else empty,
            "filtered": np.stack(self.filtered) if self.filtered else empty,
            "negative_share": np.array(self.negative_share, dtype=np.float64),
        }
