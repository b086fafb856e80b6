"""What was learned of a model's operations on its parameters: where the examples lie in what they take and give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from dpcore.torch.sources.places import Call, Shapes, Site

Key = tuple[Any, ...]
"""A function, and the parameters that each of the derived tensors among its arguments is made of."""


class Sites:
    """Finds the site of an operation by function, parameters and shapes.

    Notes
    -----
    Shapes must be those learned, each size along a dimension of examples times the number of examples. So a tensor
    whose other sizes changed, or whose size was chosen by the data (a boolean mask), is never taken for another one.
    Where the number of examples is by chance another size, and two sites fit that differ, none is found.
    """

    def __init__(self) -> None:
        self._learned: dict[Key, list[Site | None]] = {}
        self._known: dict[tuple[Key, Shapes, int], Site | None] = {}

    def add(self, key: Key, site: Site | None) -> None:
        """Note what an operation was; None if the examples were not found in it."""
        learned = self._learned.setdefault(key, [])
        if site not in learned:
            learned.append(site)
            self._known.clear()

    def learned(self) -> Iterator[tuple[Key, Site]]:
        """Yield what was learned of operations in which the examples were found."""
        for key, known in self._learned.items():
            yield from ((key, site) for site in known if site is not None)

    def find(self, key: Key, took: Shapes, examples: int) -> Site | None:
        """Return the site of an operation that takes tensors of these shapes; None if it was not learned."""
        place = (key, took, examples)
        if place not in self._known:
            learned = self._learned.get(key, [])
            fitting = [s for s in learned if s is not None and s.shapes(examples) == took]
            same = len({(s.took, s.gave) for s in fitting}) == 1
            self._known[place] = fitting[0] if same and None not in learned else None
        return self._known[place]


class Learning(NamedTuple):
    """What every operation of a pass is, in order, and from which state of torch's generator each of them draws."""

    calls: Sequence[tuple[Call, Site | None]]
    state: torch.Tensor
