"""Operations of the reference on the memory of torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch

import dpcore_numpy as reference
from dpcore_torch.arithmetic import bounded
from dpcore_torch.arrays import view


def on_tensors(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation of the reference that takes and returns tensors."""

    @wraps(operation)
    def run(*args: Any, **kwargs: Any) -> Any:
        found = operation(*map(view, args), **{name: view(value) for name, value in kwargs.items()})
        return tuple(map(torch.from_numpy, found)) if isinstance(found, tuple) else _tensor(found)

    return run


def _tensor(found: Any) -> Any:
    return torch.from_numpy(found) if isinstance(found, np.ndarray) else found


clip_factors = on_tensors(reference.clip_factors)
embedding_norms = bounded()(on_tensors(reference.embedding_norms))
embedding_sum = bounded()(on_tensors(reference.embedding_sum))
joined_norms = on_tensors(reference.joined_norms)
tied_row_norms = bounded()(on_tensors(reference.tied_row_norms))
words = on_tensors(reference.words)
