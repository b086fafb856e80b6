"""Clipping groups: the tensors that are clipped together, and their bounds."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpcore.errors import ArgumentError


@dataclass(frozen=True)
class Grouping:
    """A partition of a run's tensors, in a fixed order.

    Attributes
    ----------
    names : tuple of str
        Name of each group.
    members : tuple of tuples of int
        Indices of the tensors of each group.
    bounds : tuple of float
        Clip norm C_l of each group.
    """

    names: tuple[str, ...]
    members: tuple[tuple[int, ...], ...]
    bounds: tuple[float, ...]

    @classmethod
    def of(cls, groups: str | Mapping[str, float], max_grad_norm: float, tensors: Sequence[str]) -> Grouping:
        """Partition `tensors` (their names, such as "conv1.weight").

        "flat" is one group; "per_layer" one group for each module that directly owns parameters; "per_tensor" one for
        each tensor; these share ``C_l = max_grad_norm / sqrt(L)``. A mapping gives each name pattern its own norm.
        Refused where a tensor matches no pattern, or a pattern no tensor.
        """
        if isinstance(groups, Mapping):
            labels = [_matching_pattern(tensor, groups) for tensor in tensors]
            unused = [pattern for pattern in groups if pattern not in labels]
            if unused:
                raise ArgumentError(f"clipping_groups={unused[0]!r}: matches no tensor of {', '.join(tensors)}")
        elif groups == "flat":
            labels = ["all"] * len(tensors)
        elif groups == "per_layer":
            labels = [tensor.rpartition(".")[0] for tensor in tensors]
        else:
            labels = list(tensors)
        names = tuple(dict.fromkeys(labels))
        members = tuple(tuple(i for i, label in enumerate(labels) if label == name) for name in names)
        if isinstance(groups, Mapping):
            return cls(names, members, tuple(float(groups[name]) for name in names))
        return cls(names, members, (max_grad_norm / math.sqrt(max(len(names), 1)),) * len(names))


def _matching_pattern(tensor: str, groups: Mapping[str, float]) -> str:
    for pattern in groups:
        if fnmatch.fnmatchcase(tensor, pattern):
            return pattern
    raise ArgumentError(
        f"clipping_groups={list(groups)}: no pattern matches the tensor {tensor!r}; add one, or '*' for all the rest"
    )
