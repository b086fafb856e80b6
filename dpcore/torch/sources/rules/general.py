"""Any other operation: torch.func takes it alone, example by example, with its inputs and its output's gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.sources.derived import Derived, in_place
from dpcore.torch.sources.places import UnknownLayout
from dpcore.torch.sources.tracer import Operation


def general(operation: Operation) -> Any:
    """An operation with one tensor as its result."""
    leaves, form = tree_flatten((operation.args, operation.kwargs))
    mine = {k: derived for k, leaf in enumerate(leaves) if (derived := operation.derived(leaf)) is not None}
    held = {k: layout for k, leaf in enumerate(leaves) if (layout := operation.layout(leaf)) is not None}
    name = getattr(operation.function, "__name__", str(operation.function))
    output = operation.run()
    if not isinstance(output, torch.Tensor) or in_place(operation.function) or operation.kwargs.get("out") is not None:
        raise UnknownLayout(f"{name} with a parameter changes a tensor in place, or has several results")
    (given,) = operation.gave
    assert given is not None

    def collect(gradient: torch.Tensor, saved: Sequence[torch.Tensor]) -> Iterator[tuple[Derived, Block]]:
        def one(e: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            filled = list(leaves)
            for (place, layout), value in zip(held.items(), inputs, strict=True):
                filled[place] = value.movedim(0, layout.dim)

            def again(*values: torch.Tensor) -> torch.Tensor:
                for place, value in zip(mine, values, strict=True):
                    filled[place] = value
                args, kwargs = tree_unflatten(filled, form)
                result: torch.Tensor = operation.function(*args, **kwargs)
                return result

            back = vjp(again, *(derived.value for derived in mine.values()))[1]
            found: tuple[torch.Tensor, ...] = back(e.movedim(0, given.dim))
            return found

        inputs = [operation.examples_first(t, layout) for t, layout in zip(saved, held.values(), strict=True)]
        rows = vmap(one, randomness="error")(operation.examples_first(gradient, given), *inputs)
        yield from ((derived, derived.whole(row)) for derived, row in zip(mine.values(), rows, strict=True))

    # A copy: the operation may have kept its output for its own backward pass.
    return operation.tap(output.clone(), [leaves[place] for place in held], collect)
