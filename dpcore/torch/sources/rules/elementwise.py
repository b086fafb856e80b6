"""Sums, products and copies along new dimensions: each example's gradient is a sum over what was broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.sources.derived import Derived
from dpcore.torch.sources.places import UnknownLayout
from dpcore.torch.sources.rules.general import general
from dpcore.torch.sources.tracer import Operation, Rule


def expanded(operation: Operation) -> Any:
    """``parameter.expand(B, ...)``."""
    derived, (given,) = operation.derived(operation.args[0]), operation.gave
    if derived is None or given is None:
        return general(operation)

    def collect(gradient: torch.Tensor, _: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        yield derived, reduced(derived, operation.examples_first(gradient, given), given.dim)

    return operation.tap(operation.run(), (), collect)


def repeated(operation: Operation) -> Any:
    """``parameter.repeat(..., B, ...)``."""
    derived, (given,) = operation.derived(operation.args[0]), operation.gave
    if derived is None or given is None:
        return general(operation)

    def collect(gradient: torch.Tensor, _: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        each = operation.examples_first(gradient, given).movedim(1, given.dim + 1)
        shape = (1,) * (each.dim() - 1 - derived.tensor.dim()) + derived.tensor.shape
        split = [n for long, size in zip(each.shape[1:], shape, strict=True) for n in (long // size, size)]
        copies = each.reshape(operation.examples, *split)
        yield derived, derived.whole(copies.sum(tuple(range(1, copies.dim(), 2))))

    return operation.tap(operation.run(), (), collect)


Factor = Callable[[torch.Tensor, torch.Tensor, bool], Any]
"""The derivative of ``f(x, parameter)`` by the parameter, given both; the flag says that it is ``f(parameter, x)``."""


def combined(factor: Factor, needs: bool) -> Rule:
    """Return the rule of ``f(x, parameter)``, either way round; `needs`: the factor depends on x."""

    def rule(operation: Operation) -> Any:
        pair = _pair(operation)
        if pair is None:
            return general(operation)
        derived, other, given = pair
        first = operation.args[0] is derived.value

        def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
            product = gradient * factor(saved[0] if needs else gradient, derived.value, first)
            yield derived, reduced(derived, operation.examples_first(product, given), given.dim)

        return operation.tap(operation.run(), (other,) if needs else (), collect)

    return rule


added = combined(lambda _x, _p, _first: 1, needs=False)
subtracted = combined(lambda _x, _p, first: 1 if first else -1, needs=False)
multiplied = combined(lambda x, _p, _first: x, needs=True)
divided = combined(lambda x, p, first: 1 / x if first else -x / p**2, needs=True)


def added_in_place(operation: Operation) -> Any:
    """``x += parameter``: what is added is tapped, not the sum, which has other names already."""
    pair = _pair(operation)
    if pair is None or pair[1] is not operation.args[0]:
        raise UnknownLayout("a parameter changed in place")
    derived, x, given = pair

    def collect(gradient: torch.Tensor, _: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        yield derived, reduced(derived, operation.examples_first(gradient, given), given.dim)

    return operation.function(x, operation.tap(derived.value.expand(x.shape), (), collect))


def _pair(operation: Operation) -> tuple[Derived, torch.Tensor, Any] | None:
    """Return the derived operand, the other one, which holds the examples, and where the result does."""
    if len(operation.args) != 2 or operation.kwargs or operation.gave[0] is None:
        return None
    for mine, other in (operation.args, operation.args[::-1]):
        derived = operation.derived(mine)
        if derived is not None and isinstance(other, torch.Tensor) and operation.layout(other) is not None:
            return derived, other, operation.gave[0]
    return None


def reduced(derived: Derived, gradients: torch.Tensor, dim: int) -> Block:
    """Sum the examples' gradients (B, T, ...) of an output over all that `derived` was broadcast along.

    The examples lay along dimension `dim` of the output, which has T rows of each.
    """
    each = gradients.movedim(1, dim + 1)  # (B, *shape of one example's output)
    shape = derived.tensor.shape
    lead = each.dim() - 1 - len(shape)
    if lead:
        each = each.sum(tuple(range(1, lead + 1)))
    wide = tuple(d + 1 for d, size in enumerate(shape) if size == 1 and each.shape[d + 1] != 1)
    return derived.whole(each.sum(wide, keepdim=True) if wide else each)
