"""What every rule is held against: autograd, one example after the other, which knows nothing of layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.model.functional import Values
from dpcore.torch.sources.traced import TracedGradient

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of the largest number in the example's gradients of all tensors: some gradients are zero but for rounding."""


class Readout(nn.Module):
    """A layer before and after: its input depends on parameters, and all numbers of its output on the loss."""

    def __init__(self, middle: nn.Module, before: nn.Module | None = None) -> None:
        super().__init__()
        self.before, self.middle = before or nn.Identity(), middle

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(self.before(inputs[0]), *inputs[1:]))


def randomized(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """No parameter has the value 0 or 1 that modules like to begin with."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.5)
    return model.to(dtype)


def loss(output: Any, *targets: torch.Tensor) -> torch.Tensor:
    """No two numbers of the output have the same gradient, and no sum that cancels multiplies them all."""
    tensors = output if isinstance(output, tuple) else (output,)
    total = sum((t.double() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).mean().exp() for t in tensors)
    assert isinstance(total, torch.Tensor)
    return total


def compare(
    model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, examples: int = 3
) -> list[Block]:
    """Return the blocks of a model on inputs of a shape, after they were found to be right."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    point = [parameter.detach() for parameter in parameters.values()]
    made: Callable[[int], Any] = lambda count: (torch.randn(count, *shape, dtype=dtype),)  # noqa: E731
    traced = TracedGradient(model, lambda output, targets: loss(output, *targets), Values(model, list(parameters)))
    traced.learn(made, point)
    batch = made(examples)
    state = torch.get_rng_state()
    blocks = traced(point, (batch[0].clone(),))
    torch.set_rng_state(state)
    rows = [block.rows() for block in blocks]
    assert not any(row.requires_grad for row in rows), "a block keeps the graph alive"
    for i in range(examples):
        one = torch.autograd.grad(loss(model(batch[0][i : i + 1])), list(parameters.values()), allow_unused=True)
        size = max(float(g.abs().max()) for g in one if g is not None)
        for (name, parameter), gradient, row in zip(parameters.items(), one, rows, strict=True):
            expected = torch.zeros_like(parameter.detach()) if gradient is None else gradient
            difference = float((row[i].reshape(parameter.shape) - expected).abs().max())
            assert difference <= TOLERANCE[dtype] * size, (name, i, difference, size)
    return blocks
