"""Traced gradients beside one-by-one autograd, for the tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpcore.torch.data import batches
from dpcore.torch.model.functional import Values
from dpcore.torch.sources.traced import TracedGradient


def cross_entropy(output: Any, targets: Any) -> torch.Tensor:
    return F.cross_entropy(output, targets[0])


def own_loss(output: Any, targets: Any) -> torch.Tensor:
    """The loss that a Hugging Face model computes."""
    return output.loss


class Layers(nn.Module):
    """Two linear layers, 5 to 6 to 3, and other parameters; its forward pass is a function."""

    def __init__(self, forward: Callable[..., Any], **parameters: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)
        for name, value in parameters.items():
            setattr(self, name, value)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def randomized(model: nn.Module) -> nn.Module:
    """Move all parameters off their starting values, which may be zeros that hide a wrong gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def traced(model: nn.Module, loss: Any, batch: Any) -> tuple[TracedGradient, list[torch.Tensor]]:
    """Return the gradient after it has learned the model, and the point."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    gradient = TracedGradient(model, loss, Values(model, names))
    point = [dict(model.named_parameters())[name].detach() for name in names]
    gradient.learn(lambda count: batches.synthetic(batch, count), point)
    if isinstance(batch, dict):  # its masks leave something out, those of the made-up batch may not
        gradient.learn(lambda count: batches.tree_map(lambda t: t[:count], batch), point, keep=True)
    return gradient, point


def rows(gradient: TracedGradient, point: Sequence[torch.Tensor], batch: Any) -> list[torch.Tensor]:
    blocks = gradient(point, batches.tree_map(torch.clone, batch))
    return [torch.as_tensor(block.rows()).detach().double() for block in blocks]


def alone(model: nn.Module, loss: Any, batch: Any) -> list[torch.Tensor]:
    """Return the examples' gradients by autograd, each from a call of the model with this example alone."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    for i in range(batches.size(batch)):
        inputs, targets = batches.normalize(batches.tree_map(lambda t: t[i : i + 1].clone(), batch))  # noqa: B023
        value = loss(batches.call(model, inputs), targets)
        if value.requires_grad:
            value.backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None
    return [torch.stack(column).flatten(1).double() for column in zip(*found, strict=True)]


def assert_same(
    model: nn.Module, loss: Any, batch: Any, sizes: Sequence[int] = (4, 1), tolerance: float = 1e-4
) -> None:
    """Compare the two for batches of the first few examples."""
    gradient, point = traced(model, loss, batch)
    for size in sizes:
        some = batches.tree_map(lambda t: t[:size], batch)  # noqa: B023
        wanted = alone(model, loss, some)
        largest = max(row.norm(dim=1).max().item() for row in wanted)
        assert largest > 0
        for name, found, right in zip(gradient.values.names, rows(gradient, point, some), wanted, strict=True):
            apart = (found - right).norm(dim=1)
            assert (apart <= tolerance * right.norm(dim=1) + 1e-6 * largest).all(), (name, size, apart)
