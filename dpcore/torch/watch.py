"""What may change from one step to the next and shape a sum, beside what the mechanism does itself.

A row of noise may be drawn twice only for one sum. The settings of a run are compared when a checkpoint is loaded;
between two steps a training loop may still change the parameters (clamp them, load others), the mode of a layer, or the
batch. None of that is forbidden, but a step before which it happened cannot be made a second time for certain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from dpcore.torch.batches import Tree, leaves

# Integers of the same width, to add up bits.
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class Watch:
    """Says what a step's sum rests on, as far as it can change from step to step.

    Parameters
    ----------
    model : torch.nn.Module
    arithmetic : callable
        Returns torch's switches as JSON values.
    data : sequence of torch.Tensor
        Whose fingerprint was taken just now.
    """

    def __init__(self, model: torch.nn.Module, arithmetic: Any, data: Sequence[torch.Tensor] = ()) -> None:
        self._model, self._arithmetic = model, arithmetic
        self._data = [(tensor, tensor._version) for tensor in data]
        self._noted: Any = None
        self._drawn: list[tuple[torch.Tensor, int]] = []
        self._as_drawn = True

    def note(self) -> None:
        """Take the parameters as they are for those that the mechanism left, or that were saved."""
        self._noted = self._state()

    def note_trained(self) -> None:
        """Take the trained parameters as they are, which were exchanged and put back; the others stay as noted."""
        if self._noted is not None:
            others = {id(p) for p in [*self._model.parameters(), *self._model.buffers()] if not p.requires_grad}
            now = self._state()
            kept = [known if known[0] in others else new for known, new in zip(self._noted[0], now[0], strict=True)]
            self._noted = kept, now[1]

    def forget(self) -> None:
        """Begin anew: a state was loaded."""
        self._noted, self._drawn, self._as_drawn = None, [], True

    @property
    def untouched(self) -> bool:
        """Whether nobody changed parameters or buffers since `note`."""
        return self._noted is None or bool(self._noted == self._state())

    def drew(self, batch: Tree) -> None:
        """Keep in mind which batch was drawn."""
        self._drawn = [(tensor, tensor._version) for tensor in leaves(batch)]
        self._as_drawn = True

    def took(self, batch: Tree) -> None:
        """Note whether the batch to be stepped is the one drawn, with its values as they were."""
        given = list(leaves(batch))
        self._as_drawn = len(given) == len(self._drawn) and all(
            _same(mine, drawn, version) for mine, (drawn, version) in zip(given, self._drawn, strict=True)
        )

    def digest(self) -> str:
        """Return the digest of modes and switches; empty for a step that cannot be made again for certain."""
        edited = any(tensor._version != version for tensor, version in self._data)
        if edited or not self._as_drawn or not self.untouched:
            return ""
        modes = [module.training for module in self._model.modules()]
        return hashlib.sha256(repr((modes, self._arithmetic())).encode()).hexdigest()[:16]

    def _state(self) -> Any:
        # A write through `.data` changes no version. Of what is trained, the bits are added up as well.
        tensors = [*self._model.parameters(), *self._model.buffers()]
        bits = [_sum_of_bits(p) for p in self._model.parameters() if p.requires_grad]
        total = torch.stack(bits).tolist() if bits else []
        return [(id(tensor), tensor.data_ptr(), tensor._version) for tensor in tensors], total


def _same(given: torch.Tensor, drawn: torch.Tensor, version: int) -> bool:
    if given is not drawn:
        shared = given.data_ptr() == drawn.data_ptr() and given.numel() == drawn.numel()
        if not (shared and given.dtype == drawn.dtype and given.is_contiguous() and drawn.is_contiguous()):
            return False
    return bool(given._version == version)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits as integers, modulo 2^64."""
    size, bits = tensor.element_size(), tensor.detach()
    if bits.is_contiguous() and bits.numel() * size % 8 == 0 and bits.storage_offset() * size % 8 == 0:
        return bits.reshape(-1).view(torch.int64).sum()  # as wide as the sum: several times as fast
    return bits.view(_BITS[size]).sum(dtype=torch.int64)
