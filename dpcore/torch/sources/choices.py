"""Operations that choose or order rows by their values: after them no shape tells which row belongs to which example.

A mixture of experts sorts the tokens of all examples by expert, counts them, or takes those that chose one. On made-up
examples each may come out where its shape says, and real ones elsewhere. So such an operation must not run over the
examples, or must choose all there is, in order.
"""

from __future__ import annotations

from typing import Any

import torch

from dpcore.torch.sources.places import Site, tensors

_ORDER = (
    "sort", "argsort", "topk", "msort", "cumsum", "cumsum_", "cumprod", "cumprod_", "cummax", "cummin", "logcumsumexp",
)  # fmt: skip
_PLACES = ("nonzero", "argwhere", "where")
_MASKED = ("__getitem__", "__setitem__", "masked_select", "masked_scatter", "masked_scatter_")
_READ = ("unique", "unique_consecutive", "repeat_interleave", "tolist", "numpy", "__array__")
_NAMES = {
    getattr(owner, name, None): name
    for owner in (torch, torch.Tensor)
    for name in (*_ORDER, *_PLACES, *_MASKED, *_READ)
}
CHOICES = frozenset(_NAMES) - {None}


def chooses(function: Any, args: Any, kwargs: Any) -> bool:
    """Whether one of `CHOICES` gives rows by values here; some have forms that do not."""
    name, count = _NAMES[function], len(args) + len(kwargs)
    if name == "__setitem__" and not (isinstance(args[2], torch.Tensor) and args[2].dim()):
        return False
    if name in ("__getitem__", "__setitem__"):
        return bool(_masks(name, args, kwargs))
    if name == "where":
        return count == 1
    return name != "repeat_interleave" or count == 1 or len(tensors((args, kwargs))) > 1


def among_examples(function: Any, args: Any, kwargs: Any, site: Site | None) -> bool:
    """Whether the rows that it gives are some of several examples', or in an order of their values, or nobody knows."""
    if site is None:
        return True
    name, layout = _NAMES[function], site.took[0]
    if name in _ORDER:
        numbers = [value for value in args[1:] if type(value) is int][name == "topk" and "k" not in kwargs :]
        dim = 0 if name == "msort" else kwargs.get("dim", numbers[0] if numbers else -1)
        return layout is not None and dim % len(site.one[0]) == layout.dim
    return any(site.took) and (name in _READ or not all(bool(mask.all()) for mask in _masks(name, args, kwargs)))


def _masks(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return what says by its values which rows are chosen."""
    if name in _PLACES:
        return tensors((args, kwargs))[:1]
    given = tensors([args[1]] if name in ("__getitem__", "__setitem__") else (args[1:], kwargs))
    return [tensor for tensor in given if tensor.dtype in (torch.bool, torch.uint8)]
