"""A backend of torch tensors that takes and gives NumPy arrays, so that one test runs on both kinds."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dpcore.spec.backends import load_backend
from dpcore.spec.pair_ops import LinearPairs


class OnTensors:
    """The operations of a backend; what they change in place is the caller's memory."""

    def __init__(self, name: str) -> None:
        self.backend = load_backend(name)

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        """Return the operation for NumPy arrays."""

        def run(*args: Any, **kwargs: Any) -> Any:
            sent = {name: _sent(value) for name, value in kwargs.items()}
            found = getattr(self.backend, operation)(*map(_sent, args), **sent)
            return tuple(map(_back, found)) if isinstance(found, tuple) else _back(found)

        return run


def _sent(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy() if min(value.strides, default=0) < 0 else value)
    if isinstance(value, LinearPairs):
        return LinearPairs(*map(_sent, value))
    return [_sent(each) for each in value] if type(value) in (list, tuple) else value


def _back(found: Any) -> Any:
    return found.numpy() if isinstance(found, torch.Tensor) else found
