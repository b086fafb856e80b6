"""A model's passes over micro-batches of one form, repeated as a CUDA graph without the Python that led to them.

A graph has the values of the batch, of parameters, buffers and random numbers as they are at each call; what it
captures, and refuses, is in `dpcore_triton.passes`. Privacy asks that each example's gradient follows from that example
and from nothing else of the data. A replay makes the kernels of a run for which that was so, on other values; nothing
else is read. What the model's Python decides by itself stays as it was when the graph was captured. So replays 1, 2, 4,
8, ... are compared with the model, and where they differ no graph is used any more.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from dpcore.errors import SpeedWarning
from dpcore.stages.clipping.blocks import Block
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree

ROUNDING, ROUNDING_16 = 1e-4, 1e-2
"""The relative difference that rounding may make, in 32 and in 16 bits; far below what another mask makes."""

CAPTURES = 8
"""So many at first, and one more for each so many replays: a capture waits for the device."""

Function = Callable[[Sequence[torch.Tensor], Tree], list[Block]]


class RepeatedPasses:
    """Repeats passes of `modules` (a model, and a loss that is one) by a backend with graphs."""

    def __init__(self, modules: Sequence[Any], backend: Any) -> None:
        self._modules = [module for module in modules if isinstance(module, nn.Module)]
        self.passes = backend.passes()
        self.refused: str | None = None
        self._captured = self._replayed = 0

    def __call__(
        self,
        function: Function,
        key: Hashable,
        point: Sequence[torch.Tensor],
        batch: Tree,
        guarded: Callable[[Callable[[], Any]], Any],
    ) -> list[Block]:
        """Return ``function(point, batch)`` as it is inside of `guarded`, which sets the generators.

        The result lies where that of the next call of the same key and form will be.
        """

        def anew() -> list[Block]:
            # Whatever model or loss write to the batch, another point and the caller see it as it was.
            found: list[Block] = guarded(lambda: function(point, batches.tree_map(torch.clone, batch)))
            return found

        if self.refused is not None:
            return anew()
        read, modes = self._held()
        reason = self.passes.reason([*batches.leaves(batch), *read]) or _unknown(batch)
        if reason is not None:
            self._refuse(reason)
            return anew()
        lasting = set(map(torch.Tensor.data_ptr, read))
        # Copies that were made for this call lie elsewhere at the next one: their values are handed over.
        made = [place for place, value in enumerate(point) if value.data_ptr() not in lasting]
        inputs = [*batches.leaves(batch), *[point[place] for place in made]]
        read += [value for place, value in enumerate(point) if place not in made]

        def work(given: Sequence[torch.Tensor]) -> list[Block]:
            values = iter(given)
            own = batches.tree_map(lambda _: next(values), batch)
            own_point = list(point)
            for place in made:
                own_point[place] = next(values)
            return function(own_point, own)

        one = self.passes.of((key, modes, _structure(batch), _autocast(inputs[0])), inputs, read)
        if not one.seen:
            one.seen = True
            return anew()
        if not one.captured:
            self._captured += 1
            if self._captured > CAPTURES + self._replayed // CAPTURES:
                self._refuse("parameters or buffers lie elsewhere in nearly every step")
                return anew()
            guarded(lambda: one.capture(work, inputs, read))
        if one.refused is None:
            repeated: list[Block] = guarded(lambda: one.replay(inputs))
            self._replayed += 1
        if one.refused is not None:
            self._refuse(one.refused)
            return anew()
        if one.replays & (one.replays - 1):
            return repeated
        result = anew()
        # Where sums have no fixed order, a gradient that is 0 but for rounding is another one at each run.
        rounding = _rounding(inputs[0])
        if not alike(repeated, result, result, rounding) and not alike(repeated, result, anew(), rounding):
            self._refuse("a replay's gradients are not the model's, whose Python code decided something else")
        return result

    def _held(self) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
        """Return all parameters and buffers, and the modes of all modules."""
        tensors, modes, pending = list[torch.Tensor](), list[bool](), [*self._modules]
        while pending:
            module = pending.pop()
            modes.append(module.training)
            for held in (module._parameters, module._buffers):
                tensors += [tensor for tensor in held.values() if tensor is not None]
            pending += [part for part in module._modules.values() if part is not None]
        return tensors, tuple(modes)

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.passes.forget()
        warnings.warn(
            f"cuda_graphs='model': the model's passes are not repeated ({why}); they run as without",
            SpeedWarning,
            stacklevel=2,
        )


def _unknown(batch: Tree) -> str | None:
    """Return why a batch's structure cannot be a key, None where it can."""
    try:
        hash(_structure(batch))
    except TypeError:
        return "the batch is of a kind that may hold more than tensors: give tuples, lists and dicts"
    return None


def _structure(batch: Tree) -> Hashable:
    """Return all of a batch but its tensors; raise TypeError for a container that may hold something else."""
    kind = type(batch)
    if batch is None or isinstance(batch, torch.Tensor):
        return batch is None
    if kind is dict:
        return kind, tuple(batch), tuple(map(_structure, batch.values()))
    if kind is list or kind is tuple or (issubclass(kind, tuple) and hasattr(kind, "_fields")):
        return kind, tuple(map(_structure, batch))
    raise TypeError(kind)


def _autocast(tensor: torch.Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _rounding(tensor: torch.Tensor) -> float:
    """Return the relative difference that rounding may make where products are not rounded to 16 bits."""
    fast = torch.get_float32_matmul_precision() != "highest" or (tensor.is_cuda and torch.backends.cudnn.allow_tf32)
    return ROUNDING if _autocast(tensor) is None and not fast else ROUNDING_16


def alike(replayed: Sequence[Block], model: Sequence[Block], again: Sequence[Block], rounding: float) -> bool:
    """Whether a replay's blocks are the model's, but for rounding and for what two runs of the model differ."""
    if [type(block) for block in replayed] != [type(block) for block in model]:
        return False
    first, second, third = (_tensors(blocks) for blocks in (replayed, model, again))
    if not len(first) == len(second) == len(third):
        return False
    return all(_alike(a, b, c, rounding) for a, b, c in zip(first, second, third, strict=True))


def _tensors(blocks: Sequence[Block]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    for block in blocks:
        block.map(note)
    return found


def _alike(replayed: torch.Tensor, model: torch.Tensor, again: torch.Tensor, rounding: float) -> bool:
    if replayed.shape != model.shape or replayed.dtype != model.dtype:
        return False
    if not model.is_floating_point():
        return torch.equal(replayed, model)
    size, between, apart = (_norms(part) for part in (model, model - again, model - replayed))
    allowed = (rounding if model.dtype.itemsize > 2 else ROUNDING_16) * size + 10 * between
    return torch.equal(replayed.isfinite(), model.isfinite()) and bool((apart <= allowed).all())


def _norms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the norm of what is finite of each example: a large one must not hide the others."""
    finite = tensor.masked_fill(~tensor.isfinite(), 0.0).flatten(1)
    norms: torch.Tensor = torch.linalg.vector_norm(finite, dim=1, dtype=torch.float64)
    return norms
