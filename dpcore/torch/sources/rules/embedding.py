"""Lookups of rows: ``out_t = W[index_t]``, whose gradient adds e_t to row index_t."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dpcore.stages.clipping.blocks import Block, Embedding
from dpcore.torch.sources.derived import Derived
from dpcore.torch.sources.places import UnknownLayout
from dpcore.torch.sources.rules.general import general
from dpcore.torch.sources.tracer import Operation

_NAMES = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def embedding(operation: Operation) -> Any:
    """``F.embedding(input, weight, padding_idx)``."""
    values = dict(zip(_NAMES, operation.args, strict=False)) | operation.kwargs
    indices, weight, padding = values["input"], values["weight"], values.get("padding_idx")
    matrix, (given,) = operation.derived(weight), operation.gave
    layout = operation.layout(indices)
    if matrix is None or matrix.of is None or matrix.transposed or matrix.size:
        return general(operation)
    if layout is None or given is None:
        raise UnknownLayout("a lookup whose indices hold no examples")
    size = weight.shape[0]

    def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        e = operation.examples_first(gradient, given).reshape(operation.examples, -1, weight.shape[1])
        rows = operation.examples_first(saved[0], layout).reshape(operation.examples, -1)
        if padding is not None:
            rows = rows.masked_fill(rows == padding % size, -1)
        yield matrix, Embedding(indices=(rows.long(),), gradients=(e,), point_weights=(1.0,), size=size)

    return operation.tap(operation.run(), (indices,), collect)
