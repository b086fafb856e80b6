"""What may change from one step to the next and shape a sum, beside what the mechanism does itself.

A row of noise may be drawn twice only for one sum. The settings of a run are compared when a checkpoint is loaded;
between two steps a training loop may still change the parameters (clamp them, load others), the mode of a layer, or the
batch. None of that is forbidden, but a step before which it happened cannot be made a second time for certain.
"""

from __future__ import annotations

import hashlib
import random  # noqa: TID251 - looked at, not drawn from
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpcore.torch.checksum import checksum, row_hashes
from dpcore.torch.data.batches import Tree, leaves


class Watch:
    """Says what a step's sum rests on, as far as it can change from step to step.

    Parameters
    ----------
    model : torch.nn.Module
    arithmetic : callable
        Returns torch's switches as JSON values.
    describe : callable
        Returns the digest of the model, besides its values, and of the loss as they are now; empty where unknown.
    data : sequence of torch.Tensor
        Whose fingerprint was taken just now.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arithmetic: Any,
        describe: Callable[[], str],
        data: Sequence[torch.Tensor] = (),
    ) -> None:
        self._model, self._arithmetic, self._describe = model, arithmetic, describe
        # Whoever holds the data as NumPy arrays changes them without a word to torch.
        self._data = [(tensor, tensor._version, row_hashes(tensor)) for tensor in data]
        self._noted: Any = None
        self._drawn: list[tuple[torch.Tensor, int]] = []
        self._content: list[int] = []
        self._as_drawn = self._as_fingerprinted = True
        self._generators: Any = None

    def note(self) -> None:
        """Take the parameters as they are for those that the mechanism left, or that were saved."""
        self._noted, self._generators = self._state(), None

    def note_trained(self) -> None:
        """Take the trained parameters as they are, which were exchanged and put back; the others stay as noted."""
        if self._noted is not None:
            others = {id(p) for p in [*self._model.parameters(), *self._model.buffers()] if not p.requires_grad}
            now = self._state()
            self._noted = [known if known[0] in others else new for known, new in zip(self._noted, now, strict=True)]

    def forget(self) -> None:
        """Begin anew: a state was loaded."""
        self._noted, self._drawn, self._as_drawn, self._generators = None, [], True, None

    @property
    def untouched(self) -> bool:
        """Whether nobody changed parameters or buffers since `note`."""
        return self._noted is None or bool(self._noted == self._state())

    def drew(self, batch: Tree, indices: NDArray[np.int64]) -> None:
        """Keep in mind which batch was drawn, and note whether its examples are those of the fingerprint."""
        self._drawn = [(tensor, tensor._version) for tensor in leaves(batch)]
        self._content = [int(checksum(tensor)) for tensor, _ in self._drawn]
        self._as_drawn, self._generators = True, None
        self._as_fingerprinted = all(
            np.array_equal(row_hashes(tensor), known[indices])
            for (tensor, _), (_, _, known) in zip(self._drawn, self._data, strict=False)
        )

    def took(self, batch: Tree) -> None:
        """Note whether the batch to be stepped is the one drawn, with its values as they were."""
        given = list(leaves(batch))
        self._as_drawn = len(given) == len(self._drawn) and all(
            _same(mine, drawn, version) for mine, (drawn, version) in zip(given, self._drawn, strict=True)
        )
        # As well: NumPy's view of a batch writes to it without a new version.
        self._as_drawn = self._as_drawn and [int(checksum(tensor)) for tensor in given] == self._content
        self._generators = generators()

    def digest(self) -> str:
        """Return the digest of modes and switches; empty for a step that cannot be made again for certain."""
        edited = any(tensor._version != version for tensor, version, _ in self._data)
        if edited or not self._as_drawn or not self._as_fingerprinted or not self.untouched:
            return ""
        # Python's and NumPy's generators are the caller's: what they gave to a sum is not known another time.
        described = "" if self._generators not in (None, generators()) else self._describe()
        if not described:
            return ""
        modes = [module.training for module in self._model.modules()]
        return hashlib.sha256(repr((modes, self._arithmetic(), described)).encode()).hexdigest()[:16]

    def _state(self) -> Any:
        # A write through `.data` changes no version.
        tensors = [*self._model.parameters(), *self._model.buffers()]
        sums = torch.stack([checksum(tensor).to(tensors[0].device) for tensor in tensors]).tolist()
        return [
            (id(tensor), tensor.data_ptr(), tensor._version, total) for tensor, total in zip(tensors, sums, strict=True)
        ]


def _same(given: torch.Tensor, drawn: torch.Tensor, version: int) -> bool:
    if given is not drawn:
        shared = given.data_ptr() == drawn.data_ptr() and given.numel() == drawn.numel()
        if not (shared and given.dtype == drawn.dtype and given.is_contiguous() and drawn.is_contiguous()):
            return False
    return bool(given._version == version)


def generators() -> Any:
    """Return the states of Python's and NumPy's global generators."""
    legacy = np.random.get_state(legacy=False)  # noqa: TID251, NPY002
    inner = {
        name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in legacy["state"].items()
    }
    return random.getstate(), {**legacy, "state": inner}
