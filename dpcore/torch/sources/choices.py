"""Operations that choose or order rows by their values: after them no shape tells which row belongs to which example.

A mixture of experts sorts the tokens of all examples by expert, or takes those that chose one. On made-up examples each
may come out where its shape says, and real ones elsewhere. So such an operation must not run over the examples.
"""

from __future__ import annotations

from typing import Any

import torch

from dpcore.torch.sources.places import Site, tensors

_ORDER = ("sort", "argsort", "topk", "msort")
_CHOOSE = (
    "nonzero", "argwhere", "where", "__getitem__", "masked_select", "masked_scatter", "masked_scatter_", "unique",
    "unique_consecutive", "repeat_interleave", "tolist", "numpy", "__array__", "__setitem__",
)  # fmt: skip
_OF_NAME = {getattr(owner, name, None): name for owner in (torch, torch.Tensor) for name in (*_ORDER, *_CHOOSE)}
CHOICES = frozenset(_OF_NAME) - {None}


def chooses(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether one of `CHOICES` gives rows by values here; most have forms that do not."""
    name, given = _OF_NAME[function], tensors((args[1:], kwargs))
    if name == "__setitem__" and not (isinstance(args[2], torch.Tensor) and args[2].dim()):
        return False
    if name in ("__getitem__", "__setitem__"):
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors([args[1]]))
    if name == "where":
        return len(args) + len(kwargs) == 1
    return name != "repeat_interleave" or bool(given) or len(args) + len(kwargs) == 1


def among_examples(function: Any, args: Any, kwargs: Any, site: Site | None) -> bool:
    """Whether the rows that it gives are chosen or ordered among those of several examples, or nobody knows."""
    if site is None:
        return True
    name, layout = _OF_NAME[function], site.took[0]
    if name not in _ORDER:
        return any(site.took)
    numbers = [value for value in args[1:] if type(value) is int][name == "topk" and "k" not in kwargs :]
    dim = 0 if name == "msort" else kwargs.get("dim", numbers[0] if numbers else -1)
    return layout is not None and dim % len(site.one[0]) == layout.dim
