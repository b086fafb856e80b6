"""Backends of tensors, and memory in which an element that a kernel never wrote shows."""

from collections.abc import Iterator
from typing import Any

import pytest

from dpcore.spec.backends import load_backend


@pytest.fixture(scope="module", params=["triton", "torch"])
def backend(request: pytest.FixtureRequest) -> Any:
    """Both backends of tensors, one after the other."""
    return load_backend(request.param)


@pytest.fixture(scope="module")
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN (integers: their maximum)."""
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
