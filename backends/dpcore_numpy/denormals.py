"""Numbers below 2^-126 are read by all threads alike, or an example's norm may miss what its sum adds."""

from __future__ import annotations

import numpy as np

from dpcore.errors import BackendError

# Written as bits: a thread that reads such numbers as zero may not be able to make one.
_DENORMAL = np.array([1 << 9], np.uint32).view(np.float32)


def denormals_are_zero() -> bool:
    """Return whether this thread reads denormal numbers as zero."""
    return float(_DENORMAL.astype(np.float64)[0]) == 0.0


def check_denormals() -> None:
    """Refuse to measure vectors in a thread that reads denormal numbers as zero: a product's threads may read them."""
    if denormals_are_zero():
        raise BackendError(
            "this thread reads denormal numbers as zero (torch.set_flush_denormal(True), or a library built with "
            "-ffast-math): must read them as they are; call torch.set_flush_denormal(False) first"
        )
