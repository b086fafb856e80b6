"""The CPU backend for PyTorch models: the reference, with torch's products and threads where the time goes.

Arrays are torch tensors. torch computes norms, sums, products, noise and update, since two libraries with waiting
threads would take the processor from each other; the rest is `dpcore_numpy` on the same memory.
"""

import sys
from typing import TYPE_CHECKING, Any, Final

from dpcore.spec.repeating import repeat
from dpcore_numpy.correlate import correlate
from dpcore_numpy.filter import recurrence
from dpcore_numpy.linear import copies_halves, linear_way, prefers_pairs, sliced_rounding
from dpcore_torch.arrays import beside, clear, from_numpy, to_numpy, zeros_like
from dpcore_torch.clip import combine, group_norms, row_norms, weighted_sum
from dpcore_torch.linear import linear_norms, linear_sums, tied_norms
from dpcore_torch.noise import normal
from dpcore_torch.reference import clip_factors, embedding_norms, embedding_sum, joined_norms, tied_row_norms, words
from dpcore_torch.step import step
from dpcore_torch.update import update

name: Final = "torch"
arrays: Final = "torch"

__all__ = [
    "arrays",
    "beside",
    "clear",
    "clip_factors",
    "combine",
    "copies_halves",
    "correlate",
    "embedding_norms",
    "embedding_sum",
    "from_numpy",
    "group_norms",
    "joined_norms",
    "linear_norms",
    "linear_sums",
    "linear_way",
    "name",
    "normal",
    "prefers_pairs",
    "recurrence",
    "repeat",
    "row_norms",
    "sliced_rounding",
    "step",
    "tied_norms",
    "tied_row_norms",
    "to_numpy",
    "update",
    "weighted_sum",
    "with_compiled",
    "words",
    "zeros_like",
]


def with_compiled() -> Any:
    """Return this backend with kernels of torch.compile, for one run (`dpcore_torch.compiled`)."""
    from dpcore_torch.compiled import Compiled  # loads the compiler

    return Compiled(sys.modules[__name__])


if TYPE_CHECKING:
    import torch

    import dpcore_torch
    from dpcore.spec.ops import Backend

    _conforms: Backend[torch.Tensor] = dpcore_torch
