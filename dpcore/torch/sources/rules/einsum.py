"""``torch.einsum`` of examples and one parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.sources.derived import Derived
from dpcore.torch.sources.rules.general import general
from dpcore.torch.sources.tracer import Operation


def einsum(operation: Operation) -> Any:
    """``torch.einsum("btd,dh->bth", input, weight)``, in any order and with any letters.

    The gradient is the einsum of output gradient and input that keeps the examples' letter and the weight's. It is a
    pair where it is a product of matrices: each of the weight's letters is in one of the two alone, and the weight's
    letters that are in the input come all before the others, or all after.
    """
    equation, *operands = operation.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    left, arrow, out = equation.replace(" ", "").partition("->")
    named = list(zip(left.split(","), operands, strict=False))
    found = [pair for pair in named if operation.derived(pair[1]) is not None]
    others = [pair for pair in named if operation.layout(pair[1]) is not None]
    if not arrow or "." in equation or len(named) != 2 or len(found) != 1 or len(others) != 1:
        return general(operation)
    ((w, weight),), ((a, inputs),) = found, others
    derived, layout, (given,) = operation.derived(weight), operation.layout(inputs), operation.gave
    assert derived is not None
    assert layout is not None
    assert given is not None
    b = a[layout.dim]
    once = len(set(w)) == len(w) and len(set(a)) == len(a) and set(w) <= set(a) | set(out)
    if not once or layout.rows != 1 or out.find(b) != given.dim or b in w:
        return general(operation)
    rest = [letter for letter in a if letter in out and letter != b and letter not in w]
    into, outof = ["".join(letter for letter in w if letter in letters) for letters in (a, out)]
    matrix = len(into) + len(outof) == len(w) and w in (into + outof, outof + into)
    matrix = matrix and set(a) == {b, *rest, *into} and weight.dim() == 2

    def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        x = saved[0].to(gradient.dtype)
        if not matrix:
            yield derived, derived.whole(torch.einsum(f"{out},{a}->{b}{w}", gradient, x))
            return
        time = "".join(rest)
        first, second = (
            torch.einsum(f"{mine}->{b}{time}{kept}", t).reshape(operation.examples, -1, weight.shape[w.index(kept)])
            for mine, t, kept in ((out, gradient, outof), (a, x, into))
        )
        yield derived, derived.product(first, second) if w == outof + into else derived.product(second, first)

    return operation.tap(operation.run(), (inputs,), collect)
