"""Memory in which an element that a kernel never wrote shows."""

from collections.abc import Iterator

import pytest


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
