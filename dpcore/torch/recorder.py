"""What a run keeps of its releases for someone to look at: some coordinates of each step, as public as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dpcore.spec.layout import Layout


class Recorder:
    """Released averages and filter outputs at evenly spaced coordinates, and the share of negative second moments.

    Parameters
    ----------
    layout : Layout
        The coordinates are chosen by its sizes alone, without a look at data.
    coordinates : int
        At most so many; no more than there are.
    """

    def __init__(self, layout: Layout, coordinates: int) -> None:
        self.coordinates = min(coordinates, layout.dimension)
        chosen = np.arange(self.coordinates, dtype=np.int64) * layout.dimension // self.coordinates
        ends = np.cumsum([entry.size for entry in layout.entries])
        # The chosen coordinates of each tensor, counted from its own first one.
        self._places = [
            chosen[(chosen >= end - entry.size) & (chosen < end)] - (end - entry.size)
            for entry, end in zip(layout.entries, ends, strict=True)
        ]
        self.released: list[np.ndarray[Any, Any]] = []
        self.filtered: list[np.ndarray[Any, Any]] = []
        self.negative_share: list[float] = []

    @classmethod
    def of(cls, layout: Layout, state: Mapping[str, Any]) -> Recorder:
        """Return the recorder that `state_dict` saved."""
        recorder = cls(layout, int(state["coordinates"]))
        recorder.released = list(state["released"].numpy().copy())
        recorder.filtered = list(state["filtered"].numpy().copy())
        recorder.negative_share = state["negative_share"].tolist()
        return recorder

    def pick(self, tensors: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
        """Return the chosen coordinates of one flat tensor for each entry of the layout, (m,) float32, a copy."""
        taken = [t[torch.from_numpy(at).to(t.device)] for t, at in zip(tensors, self._places, strict=True)]
        return torch.cat(taken).to(torch.float32).cpu().numpy()

    def keep(self, released: np.ndarray[Any, Any], filtered: np.ndarray[Any, Any], negative_share: float) -> None:
        """Add one step."""
        self.released.append(released)
        self.filtered.append(filtered)
        self.negative_share.append(negative_share)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return `released` and `filtered`, (T, m) float32, and `negative_share`, (T,) float64."""
        empty = np.empty((0, self.coordinates), dtype=np.float32)
        return {
            "released": np.stack(self.released) if self.released else empty,
            "filtered": np.stack(self.filtered) if self.filtered else empty,
            "negative_share": np.array(self.negative_share, dtype=np.float64),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the record as tensors."""
        return {"coordinates": self.coordinates, **{k: torch.from_numpy(v) for k, v in self.arrays().items()}}
