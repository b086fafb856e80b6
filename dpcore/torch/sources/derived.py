"""Tensors that are made of trained parameters alone: how the examples' gradients reach the parameters from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from dpcore.stages.clipping.blocks import Block, Embedding, Linear, Rows, joined
from dpcore.torch.sources.places import UnknownLayout

# From so many rows of an example on, its matrix is formed where it is no larger than so many times the rows of both
# sides: one product, where norms and sums by pairs take one each.
_MANY, _ROWS = 24, 1.75


@dataclass(eq=False)
class Derived:
    """A tensor without examples that depends on trained parameters.

    `of` is the place of the parameter whose numbers it holds, if it does: as they are, `transposed`, the rows at
    constant `indices`, or those from `start` on, of `size` rows. Otherwise the examples' gradients are carried back
    through its graph.
    """

    tensor: torch.Tensor
    roots: tuple[int, ...]
    of: int | None = None
    transposed: bool = False
    indices: torch.Tensor | None = None
    start: int = 0
    size: int = 0
    blocks: list[Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.value = self.tensor.detach()
        self._version = self.tensor._version

    @property
    def current(self) -> bool:
        """Whether the tensor was not changed in place since it was met."""
        return self.tensor._version == self._version

    def product(self, rows: torch.Tensor, columns: torch.Tensor) -> Block:
        """Return the block of a matrix whose gradient is ``sum_t rows_t columns_t^T``; (B, T, r) and (B, T, c).

        Its rows where they are small, its pairs where not.
        """
        times, r, c = rows.shape[1], rows.shape[2], columns.shape[2]
        small = times >= _MANY and r * c <= _ROWS * times * (r + c)
        if not small:
            return self.pairs(rows, columns)
        # Made as the parameter lies in memory.
        return self.whole((columns.mT @ rows).mT if self.transposed else rows.mT @ columns)

    def pairs(self, rows: torch.Tensor, columns: torch.Tensor) -> Block:
        """Return the same block by its pairs."""
        if self.indices is not None:
            return self.whole(rows.mT @ columns)
        first, second = (columns, rows) if self.transposed else (rows, columns)
        first = self._placed(first, -1)
        times, q, p = first.shape[1], first.shape[2], second.shape[2]
        return Linear((second,), (first,), (1.0,), gram=times * (p + q) < p * q)

    def whole(self, gradients: torch.Tensor) -> Block:
        """Return the block of explicit gradients (B, *shape)."""
        if self.indices is not None:
            examples, width = gradients.shape[0], gradients.shape[-1]
            indices = self.indices.reshape(1, -1).expand(examples, -1)
            return Embedding((indices,), (gradients.reshape(examples, -1, width),), (1.0,), self.size)
        whole = self._placed(gradients.mT if self.transposed else gradients, 1)
        return Rows(whole.reshape(whole.shape[0], -1))

    def _placed(self, gradients: torch.Tensor, dim: int) -> torch.Tensor:
        """Put the gradients of some rows of a parameter, which lie along `dim`, among zeros for the others."""
        if not self.size:
            return gradients
        dim %= gradients.dim()
        after = self.size - self.start - gradients.shape[dim]
        return F.pad(gradients, (0, 0) * (gradients.dim() - dim - 1) + (self.start, after))


_SAME = {
    torch.Tensor.to, torch.Tensor.float, torch.Tensor.double, torch.Tensor.bfloat16, torch.Tensor.half,
    torch.Tensor.contiguous, torch.Tensor.clone, torch.Tensor.type_as, torch.clone, torch.Tensor.type,
}  # fmt: skip
_PARTS = {
    torch.split, torch.Tensor.split, torch.chunk, torch.Tensor.chunk, torch.narrow, torch.Tensor.narrow,
    torch.Tensor.__getitem__, torch.tensor_split, torch.Tensor.tensor_split,
}  # fmt: skip
_TRANSPOSED = {
    torch.Tensor.t, torch.t, torch.Tensor.T.__get__, torch.Tensor.mT.__get__,  # type: ignore[attr-defined]
    torch.transpose, torch.Tensor.transpose,
}  # fmt: skip


def name_of(function: Any) -> str:
    """Return an operation's name, for a sentence."""
    return str(getattr(function, "__name__", function))


def in_place(function: Any) -> bool:
    """Whether an operation writes to a tensor that it takes."""
    name = name_of(function)
    return name.startswith(("__i", "__set")) if name.endswith("__") else name.endswith("_")


def out_of_place(name: str) -> str:
    """Return the name of the method that gives what ``add_`` or ``__iadd__`` writes."""
    return name[:-1] if not name.endswith("__") else f"__{name[3:]}"


LOOKUP = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""Arguments of ``F.embedding``."""


def made(function: Any, args: Any, kwargs: Any, found: Sequence[Derived], tensor: torch.Tensor) -> Derived:
    """Return the description of what an operation made of derived tensors."""
    roots = tuple(sorted({root for derived in found for root in derived.roots}))
    first = found[0]
    if len(found) == 1 and first.of is not None and first.indices is None:
        if function in _SAME and tensor.shape == first.tensor.shape:
            return Derived(tensor, roots, first.of, first.transposed, None, first.start, first.size)
        if function in _PARTS and not first.transposed and not first.size and _neighbors(tensor, first.tensor):
            start = (tensor.storage_offset() - first.tensor.storage_offset()) // max(1, first.tensor.stride(0))
            return Derived(tensor, roots, first.of, start=start, size=first.tensor.shape[0])
        # A square matrix transposed along one and the same dimension is none.
        turned = function in _TRANSPOSED and not kwargs and len({a % 2 for a in args[1:] if isinstance(a, int)}) != 1
        if turned and tensor.dim() == 2 and tensor.shape == first.tensor.shape[::-1]:
            return Derived(tensor, roots, first.of, not first.transposed, None, first.start, first.size)
        if function is F.embedding and not first.transposed and not first.size:
            values = dict(zip(LOOKUP, args, strict=False)) | kwargs
            indices, size, padding = values["input"], first.tensor.shape[0], values.get("padding_idx")
            if values.get("max_norm") is None and not values.get("scale_grad_by_freq"):
                kept = indices.clone() if padding is None else indices.masked_fill(indices == padding % size, -1)
                return Derived(tensor, roots, first.of, indices=kept, size=size)
    return Derived(tensor, roots)


def carry_back(derived: Derived, every: Sequence[Derived], examples: int) -> None:
    """Carry the examples' gradients of a derived tensor back to the leaves, among `every`, that it is made of."""
    rows = joined(derived.blocks).rows()
    leaves = [every[root] for root in derived.roots]
    if any(leaf.tensor.numel() and not _storage(leaf.tensor).nbytes() for leaf in leaves):
        # fully_shard has freed the values that the way back may need.
        raise UnknownLayout(
            "a tensor is made of sharded parameters, as by weight normalization, whose values are freed by now"
        )
    gradients = torch.autograd.grad(
        derived.tensor,
        [leaf.tensor for leaf in leaves],
        rows.reshape(examples, *derived.tensor.shape).to(derived.tensor.dtype),
        retain_graph=True,
        is_grads_batched=True,
        allow_unused=True,
    )
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            leaf.blocks.append(leaf.whole(gradient))


def _neighbors(tensor: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a part of a tensor holds some of its rows, one after the other."""
    same_storage = _storage(tensor).data_ptr() == _storage(whole).data_ptr()
    same_form = tensor.shape[1:] == whole.shape[1:] and tensor.stride() == whole.stride()
    return same_storage and same_form and tensor.dim() > 0 and tensor.dtype == whole.dtype


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    """Return a tensor's storage, unseen by modes that watch what a model does."""
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()
