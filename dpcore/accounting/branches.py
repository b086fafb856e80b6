"""The branches of a run: which rows were drawn with which noise key, and which of them were abandoned.

Every load of a checkpoint begins a branch. Rows before the checkpoint are those of its parent branches; rows from there
on are its own. Rows that other branches drew after they were left were released, too, and are charged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpcore.errors import ArgumentError

Rows = tuple[int, int]
"""(first, stop): rows first .. stop - 1 of one branch."""


class Branch(NamedTuple):
    """Rows drawn with one noise key: first .. mark - 1 are its own, and may have left the process."""

    parent: str = ""  # whose rows come before `first`; none of the one that a run began with
    first: int = 0
    mark: int = 0


@dataclass(frozen=True)
class Branches:
    """All branches that are known, by name, and the present one, which is gone on with."""

    present: str
    known: Mapping[str, Branch] = field(default_factory=dict)

    @property
    def abandoned(self) -> tuple[Rows, ...]:
        """Rows that do not lead to the present one, a range for each branch that has some."""
        ends, name, end = {}, self.present, -1
        while name in self.known:  # back through the parents: where each branch was left for the next one
            ends[name] = end
            name, end = self.known[name].parent, self.known[name].first
        ranges = []
        for name, branch in self.known.items():
            first = max(branch.first, ends.get(name, branch.first))
            if name != self.present and first < branch.mark:
                ranges.append((first, branch.mark))
        return tuple(sorted(ranges))

    def up_to(self, row: int) -> Branches:
        """Return them with the present branch's rows counted up to `row`."""
        present = self.known.get(self.present, Branch())
        return Branches(self.present, {**self.known, self.present: present._replace(mark=max(present.mark, row))})

    def joined(self, others: Mapping[str, Branch]) -> Branches:
        """Return them merged with branches known elsewhere: for each branch, the one with more rows is right."""
        known = dict(self.known)
        for name, other in others.items():
            mine = known.get(name, other)
            known[name] = mine._replace(mark=max(mine.mark, other.mark))
        return Branches(self.present, known)

    def forked(self, parent: str, name: str, row: int) -> Branches:
        """Return them with a new branch that leaves `parent` before `row`, and is the present one."""
        return Branches(name, {**self.known, name: Branch(parent, row, row)})


def check_rows(item: Any, steps: int, name: str) -> Rows:
    """Return a range of abandoned rows if it is one, within a plan of that many steps."""
    whole = isinstance(item, (list, tuple)) and len(item) == 2 and all(type(row) is int for row in item)
    if not whole or not 0 <= item[0] < item[1] <= steps:
        raise ArgumentError(f"{name}: {item!r} must be (first, stop), 0 <= first < stop <= {steps}")
    return item[0], item[1]


def count(ranges: Iterable[Rows]) -> int:
    """Return the number of rows in all ranges."""
    return sum(stop - first for first, stop in ranges)
