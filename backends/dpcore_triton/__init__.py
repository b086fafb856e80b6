"""The GPU backend: Triton kernels on float32 torch tensors. It must agree with `dpcore_numpy`."""

import sys
from typing import TYPE_CHECKING, Final, cast

from dpcore_triton.launch import require_device

require_device()

from dpcore.spec.repeating import repeat  # noqa: E402
from dpcore_triton.arrays import beside, clear, from_numpy, to_numpy, zeros_like  # noqa: E402
from dpcore_triton.clip import clip_factors, combine, weighted_sum  # noqa: E402
from dpcore_triton.correlate import correlate  # noqa: E402
from dpcore_triton.embedding import embedding_norms, embedding_sum  # noqa: E402
from dpcore_triton.filter import recurrence  # noqa: E402
from dpcore_triton.graphs import Graphs  # noqa: E402
from dpcore_triton.joined import joined_norms  # noqa: E402
from dpcore_triton.linear import copies_halves, linear_norms, linear_sums, linear_way, prefers_pairs, sliced_rounding  # noqa: E402
from dpcore_triton.noise import normal  # noqa: E402
from dpcore_triton.row_norms import group_norms, row_norms  # noqa: E402
from dpcore_triton.step import step  # noqa: E402
from dpcore_triton.stream import words  # noqa: E402
from dpcore_triton.tied import tied_norms, tied_row_norms  # noqa: E402
from dpcore_triton.update import update  # noqa: E402


def with_graphs() -> "Backend[torch.Tensor]":
    """Return this backend for one run, whose launches are repeated as CUDA graphs."""
    return cast("Backend[torch.Tensor]", Graphs(sys.modules[__name__]))


name: Final = "triton"
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
    "with_graphs",
    "words",
    "zeros_like",
]

if TYPE_CHECKING:
    import torch

    import dpcore_triton
    from dpcore.spec.ops import Backend

    _conforms: Backend[torch.Tensor] = dpcore_triton
