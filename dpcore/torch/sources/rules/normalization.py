"""Normalizations: ``x^ weight + bias`` with x^ the input, normalized; the gradients sum e x^ and e.

x^ is computed again in the backward pass, by the function itself without weight and bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.sources.derived import Derived
from dpcore.torch.sources.places import UnknownLayout
from dpcore.torch.sources.rules.elementwise import reduced
from dpcore.torch.sources.tracer import Operation, Rule

_STATISTICS = {"running_mean": None, "running_var": None}


def normalization(names: str, channels: bool) -> Rule:
    """Return the rule of a function with these arguments.

    Its weight belongs to the channels of (N, C, ...), or to the last dimensions.
    """

    def rule(operation: Operation) -> Any:
        values = dict(zip(names.split(), operation.args, strict=False)) | operation.kwargs
        inputs, weight, bias = (values.get(name) for name in ("input", "weight", "bias"))
        scale, shift, (given,) = operation.derived(weight), operation.derived(bias), operation.gave
        layout, own = operation.layout(inputs), values.get("use_input_stats", False)
        if layout is None or given is None or values.get("training") or (channels and given.dim):
            raise UnknownLayout("a normalization that mixes examples")
        others = {"weight": None, "bias": None} if "bias" in names else {"weight": None}
        plain = values | others | (_STATISTICS if own else {})

        def total(derived: Derived, product: torch.Tensor) -> Block:
            first = operation.examples_first(product, given)
            if channels:
                return derived.whole(first.sum((1, *range(3, first.dim()))))
            return reduced(derived, first, given.dim)

        def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
            if scale is not None:
                yield scale, total(scale, gradient * operation.function(**(plain | {"input": saved[0]})))
            if shift is not None:
                yield shift, total(shift, gradient)

        return operation.tap(operation.run(), () if scale is None else (inputs,), collect)

    return rule
