"""Proved graphs beside autograd of one example after the other, which knows nothing of graphs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.data import batches
from dpcore.torch.gradients.capture import capture
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.gradients.proved import Program, ProvedGradient
from tests.unit.torch.models import Called

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Of the largest number in the example's gradients of all tensors: some gradients are zero but for rounding."""


def layers(forward: Callable[..., Any], **parts: Any) -> Called:
    """Two linear layers, 5 to 6 to 3, and other parts; its forward pass is a function."""
    return Called(forward, **{"a": nn.Linear(5, 6), "b": nn.Linear(6, 3), **parts})


def readout(middle: nn.Module, before: nn.Module) -> Called:
    """A layer whose input depends on parameters, and the loss on all numbers of its output."""
    return Called(lambda m, x: torch.tanh(m.middle(m.before(x))), before=before, middle=middle)


def randomized(model: nn.Module, dtype: torch.dtype = torch.float64, size: float = 0.5) -> nn.Module:
    """Move all parameters off their starting values 0 and 1, which hide a wrong gradient."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * size)
    return model.to(dtype)


def loss_of_all(output: Any) -> torch.Tensor:
    """No two numbers of the output have the same gradient, and no sum that cancels multiplies them all."""
    tensors = output if isinstance(output, tuple) else (output,)
    total = sum(
        (t.double() * torch.linspace(0.5, 1.5, t.numel(), dtype=torch.float64).view(t.shape)).mean().exp()
        for t in tensors
    )
    assert isinstance(total, torch.Tensor)
    return total


def program(model: nn.Module, loss: Any, batch: Any) -> Program:
    """Return the graph alone: a model that has none is refused without a walk over all that there is in memory."""
    names = [name for name, _ in model.named_parameters()]
    captured, check_numbers = capture(model, names, lambda output, targets: loss(output, *targets), batch)
    found = Program(captured)
    check_numbers()
    return found


def proved(model: nn.Module, loss: Any, batch: Any) -> ProvedGradient:
    """Return the model's gradient by its graph for batches of this form.

    Raises
    ------
    NotProved
        If there is no proof.
    """
    gradient = PerExampleGradient(model, loss).proved
    gradient.prove(batch)
    return gradient


def blocks(gradient: ProvedGradient, batch: Any, point: Sequence[torch.Tensor] | None = None) -> list[Block]:
    program, inputs = gradient.current(point or gradient.values.parameters(), batch, real=False)
    found = program(*inputs)
    assert not any(block.rows().requires_grad for block in found), "a block keeps the graph alive"
    return found


def rows(gradient: ProvedGradient, batch: Any, point: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    return [block.rows().double() for block in blocks(gradient, batch, point)]


def alone(model: nn.Module, loss: Any, batch: Any, point: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Return the examples' gradients by autograd, each from a call of the model with this example alone.

    With the model's own parameters, or with others in their place.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, point or own, strict=True):
        parameter.data = value
    found = []
    for i in range(batches.size(batch)):
        inputs, targets = batches.normalize(batches.tree_map(lambda t: t[i : i + 1].clone(), batch))  # noqa: B023
        value = loss(batches.call(model, inputs), *targets)
        if value.requires_grad:
            value.backward()
        found.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        for parameter in parameters:
            parameter.grad = None
    for parameter, value in zip(parameters, own, strict=True):
        parameter.data = value
    return [torch.stack(column).reshape(len(column), -1).double() for column in zip(*found, strict=True)]


def compare(
    model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, examples: int = 3
) -> list[Block]:
    """Return the blocks of a model on inputs of a shape, after they were found to be right."""
    batch = (torch.randn(examples, *shape, dtype=dtype),)
    gradient = proved(model, loss_of_all, batch)
    state = torch.get_rng_state()
    found = blocks(gradient, batch)
    torch.set_rng_state(state)
    wanted = alone(model, loss_of_all, batch)
    size = torch.stack([row.abs().amax(1) for row in wanted]).amax(0)
    for name, block, right in zip(gradient.values.names, found, wanted, strict=True):
        apart = (block.rows().double() - right).abs().amax(1)
        assert (apart <= TOLERANCE[dtype] * size).all(), (name, apart, size)
    return found


def assert_same(
    model: nn.Module, loss: Any, batch: Any, sizes: Sequence[int] = (4, 1), tolerance: float = 1e-4
) -> None:
    """Compare the two for batches of the first few examples."""
    gradient = proved(model, loss, batch)
    for size in sizes:
        some = batches.tree_map(lambda t: t[:size], batch)  # noqa: B023
        wanted = alone(model, loss, some)
        largest = max(row.norm(dim=1).max().item() for row in wanted)
        assert largest > 0
        for name, found, right in zip(gradient.values.names, rows(gradient, some), wanted, strict=True):
            apart = (found - right).norm(dim=1)
            assert (apart <= tolerance * right.norm(dim=1) + 1e-6 * largest).all(), (name, size, apart)
