"""Bags of embeddings, each example's own, as operations that the proof follows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from dpcore.torch.gradients.errors import NotCaptured


def embedding_bag(
    input: torch.Tensor,  # noqa: A002 - torch's own name
    weight: torch.Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return what ``torch.nn.functional.embedding_bag`` does for bags (N, T): the sum of found rows, or their mean."""
    if input.dim() != 2 or mode == "max" or max_norm is not None or scale_grad_by_freq:
        raise NotCaptured("embedding_bag has a rule for bags of one length alone, summed or averaged, of a fixed table")
    found = F.embedding(input, weight)
    kept = torch.ones_like(input) if padding_idx is None else input != padding_idx % len(weight)
    factors = kept.to(found.dtype) if per_sample_weights is None else kept * per_sample_weights
    total = (found * factors.unsqueeze(2)).sum(1)
    # Of a bag of padding alone the mean is 0.
    return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)
