"""Where a gradient passes by in the backward pass."""

from __future__ import annotations

from typing import Any

import torch


class Tap(torch.autograd.Function):
    """The identity; its backward pass calls ``record(gradient, saved)``.

    Saved tensors go through autograd, so that gradient checkpoints drop them and make them again.
    """

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, _dummy: torch.Tensor, record: Any, *saved: torch.Tensor
    ) -> torch.Tensor:
        """Return the output."""
        ctx.record = record
        ctx.save_for_backward(*saved)
        # The same memory, and no view of it in autograd's eyes: what follows may change it in place, as ReLU does.
        result: torch.Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the output's gradient."""
        saved = ctx.saved_tensors  # once: a gradient checkpoint makes them anew
        record, ctx.record = ctx.record, None
        # The blocks are views of them. Were they no others, block, graph and tracer would keep each other for ever:
        # Python does not see that a tensor holds its graph.
        record(gradient.detach(), [tensor.detach() for tensor in saved])
        return (gradient, *[None] * (2 + len(saved)))
