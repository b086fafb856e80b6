"""Products with a weight: ``out_t = a_t W^T + b``, whose gradient is ``sum_t e_t a_t^T``, e the output's gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dpcore.stages.clipping.blocks import Block, Rows
from dpcore.torch.sources.derived import Derived
from dpcore.torch.sources.places import Layout, UnknownLayout
from dpcore.torch.sources.rules.general import general
from dpcore.torch.sources.tracer import Operation


def linear(operation: Operation) -> Any:
    """``F.linear(input, weight, bias)``."""
    values = dict(zip(("input", "weight", "bias"), operation.args, strict=False)) | operation.kwargs
    return product(operation, values["input"], values["weight"], values.get("bias"), transposed=False)


def addmm(operation: Operation) -> Any:
    """``torch.addmm(bias, input, weight)``, with a weight stored (in, out)."""
    if len(operation.args) != 3 or operation.kwargs:
        return general(operation)
    bias, inputs, weight = operation.args
    return product(operation, inputs, weight, bias, transposed=True)


def matmul(operation: Operation) -> Any:
    """``input @ weight``."""
    inputs, weight = operation.args
    if weight.dim() != 2 or operation.derived(weight) is None or operation.kwargs:
        return general(operation)
    return product(operation, inputs, weight, None, transposed=True)


def product(operation: Operation, inputs: torch.Tensor, weight: Any, bias: Any, transposed: bool) -> Any:
    """Do a product whose weight is (out, in), or (in, out) if `transposed`, and tap it."""
    layout, (given,) = operation.layout(inputs), operation.gave
    matrix, vector = operation.derived(weight), operation.derived(bias)
    if layout is None or given is None or layout.dim == inputs.dim() - 1:
        raise UnknownLayout("a product with a weight whose input holds no examples")
    output = operation.run()

    def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        e = _rows(operation, gradient, given)
        if matrix is not None:
            a = _rows(operation, saved[0].to(output_dtype), layout)
            yield matrix, matrix.product(a, e) if transposed else matrix.product(e, a)
        if vector is not None:
            yield vector, summed(vector, e)

    # Under autocast the product took its input in the output's dtype.
    output_dtype = output.dtype
    return operation.tap(output, () if matrix is None else (inputs,), collect)


def summed(bias: Derived, gradients: torch.Tensor) -> Block:
    """Return the block of a bias (q,) that was added to T rows of each example: (B, T, q)."""
    each = gradients[:, 0] if gradients.shape[1] == 1 else gradients.sum(1)
    return bias.whole(each) if bias.tensor.shape == gradients.shape[2:] else _refuse()


def _refuse() -> Rows:
    raise UnknownLayout("a bias of another shape than the output's last dimension")


def _rows(operation: Operation, tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a tensor (..., p) as (B, T, p)."""
    first = operation.examples_first(tensor, layout)
    return first.reshape(operation.examples, -1, tensor.shape[-1])
