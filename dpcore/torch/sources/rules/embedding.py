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
    if values.get("max_norm") is not None or values.get("scale_grad_by_freq"):
        raise UnknownLayout("a lookup that changes the table, or counts indices of other examples")
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


_BAG = (
    "input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
    "per_sample_weights", "include_last_offset", "padding_idx",
)  # fmt: skip


def embedding_bag(operation: Operation) -> Any:
    """``F.embedding_bag`` of one bag a row, which are added up or averaged: each index gets the bag's gradient."""
    values = dict(zip(_BAG, operation.args, strict=False)) | operation.kwargs
    indices, weight, factors = values["input"], values["weight"], values.get("per_sample_weights")
    matrix, layout, (given,) = operation.derived(weight), operation.layout(indices), operation.gave
    mean, padding = values.get("mode", "mean") == "mean", values.get("padding_idx")
    other = any(values.get(name) not in (None, False) for name in ("max_norm", "scale_grad_by_freq"))
    other = other or values.get("mode") == "max" or operation.derived(factors) is not None
    if indices.dim() != 2 or layout is None or layout.dim or given is None or matrix is None or other:
        raise UnknownLayout("bags of indices in one row, or with a maximum")
    size, width = weight.shape
    if matrix.of is None or matrix.transposed or matrix.size:
        raise UnknownLayout("a lookup in a table that is made of others")

    def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        rows = saved[0].long()
        if padding is not None:
            rows = rows.masked_fill(rows == padding % size, -1)
        e = gradient.unsqueeze(1).expand(-1, rows.shape[1], -1)
        if mean:
            e = e / (rows >= 0).sum(1).clamp(min=1)[:, None, None]
        if len(saved) > 1:
            e = e * saved[1].unsqueeze(2)
        rows, e = rows.reshape(operation.examples, -1), e.reshape(operation.examples, -1, width)
        yield matrix, Embedding(indices=(rows,), gradients=(e,), point_weights=(1.0,), size=size)

    return operation.tap(operation.run(), (indices,) if factors is None else (indices, factors), collect)
