"""Where the examples lie in every tensor that an operation of the model takes or gives.

Nothing is assumed of a module: the model runs once on two made-up examples and once on three, and the sizes that grow
with the number of examples are the ones that hold them. A size that grows to three times something holds several rows
of each example, one example after the other; whether this is so, and whether examples mix, is then checked on values
(`dpcore.torch.sources.check`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

FEW, MORE = 2, 3
"""Examples of the two runs."""

Shapes = tuple[torch.Size, ...]


class Layout(NamedTuple):
    """The examples lie along `dim`, with `rows` neighboring entries for each."""

    dim: int
    rows: int = 1

    def examples_first(self, tensor: torch.Tensor, examples: int) -> torch.Tensor:
        """Return a view (examples, rows, ...), or (examples, ...) where each has one row, with the examples first."""
        moved = tensor.movedim(self.dim, 0)
        return moved if self.rows == 1 else moved.unflatten(0, (examples, self.rows))  # type: ignore[no-untyped-call]


class Call(NamedTuple):
    """One operation of a run: what was called, and the shapes of the tensors it took and gave."""

    function: Callable[..., Any]
    took: Shapes
    gave: Shapes


class Site(NamedTuple):
    """Where the examples lie in the tensors that an operation takes and gives; None where it holds no examples."""

    took: tuple[Layout | None, ...]
    gave: tuple[Layout | None, ...]
    one: Shapes
    """Shapes of what it takes, with `Layout.rows` in the place of the size that holds the examples."""

    def shapes(self, examples: int) -> Shapes:
        """Return the shapes of what it takes of so many examples."""
        return shapes_for(self.took, self.one, examples)


def shapes_for(layouts: Sequence[Layout | None], one: Shapes, examples: int) -> Shapes:
    """Return the shapes of tensors of so many examples, given those of one example."""
    return tuple(
        shape if layout is None else torch.Size((*shape[: (d := layout.dim)], examples * shape[d], *shape[d + 1 :]))
        for layout, shape in zip(layouts, one, strict=True)
    )


def shapes_of_one(layouts: Sequence[Layout | None], more: Shapes) -> Shapes:
    """Return the shapes of one example, given those of `MORE`."""
    return tuple(
        shape if layout is None else torch.Size((*shape[: (d := layout.dim)], layout.rows, *shape[d + 1 :]))
        for layout, shape in zip(layouts, more, strict=True)
    )


class UnknownLayout(Exception):
    """The examples cannot be found in a tensor: the caller takes the explicit path."""


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation."""
    found: list[torch.Tensor] = []
    _gather(tree, found)
    return found


def _gather(tree: Any, found: list[torch.Tensor]) -> None:
    if isinstance(tree, (tuple, list)):
        for value in tree:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (tuple, list, dict)):
                _gather(value, found)
    elif isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, dict):
        for value in tree.values():
            _gather(value, found)


def sites(few: Sequence[Call], more: Sequence[Call]) -> list[tuple[Call, Site | None]]:
    """Compare two runs call by call: the second run's calls, each with its site, None if the examples are not found."""
    if [call.function for call in few] != [call.function for call in more]:
        raise UnknownLayout("the model does other operations for another number of examples")
    found: list[tuple[Call, Site | None]] = []
    for a, b in zip(few, more, strict=True):
        try:
            took = layouts(a.took, b.took)
            found.append((b, Site(took, layouts(a.gave, b.gave), shapes_of_one(took, b.took))))
        except UnknownLayout:
            found.append((b, None))
    return found


def layouts(few: Shapes, more: Shapes) -> tuple[Layout | None, ...]:
    """Return where the examples lie in each of some tensors, given their shapes in both runs."""
    if len(few) != len(more):
        raise UnknownLayout("another number of tensors")
    return tuple(_layout(a, b) for a, b in zip(few, more, strict=True))


def _layout(few: torch.Size, more: torch.Size) -> Layout | None:
    if few == more:
        return None
    dims = [d for d, (a, b) in enumerate(zip(few, more, strict=False)) if a != b]
    if len(few) != len(more) or len(dims) != 1:
        raise UnknownLayout(f"shapes {tuple(few)} and {tuple(more)}")
    (dim,) = dims
    rows, rest = divmod(more[dim], MORE)
    if rest or few[dim] != FEW * rows:
        raise UnknownLayout(f"shapes {tuple(few)} and {tuple(more)}")
    return Layout(dim, rows)
