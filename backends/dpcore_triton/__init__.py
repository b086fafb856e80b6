"""The GPU backend: Triton kernels on float32 torch tensors. What it must agree with is `dpcore_numpy`."""

from typing import TYPE_CHECKING, Final

from dpcore_triton.launch import require_device

require_device()

from dpcore_triton.arrays import beside, clear, from_numpy, to_numpy, zeros_like  # noqa: E402
from dpcore_triton.clip import clip_factors, combine, weighted_sum  # noqa: E402
from dpcore_triton.embedding import embedding_norms, embedding_sum  # noqa: E402
from dpcore_triton.filter import recurrence  # noqa: E402
from dpcore_triton.linear import linear_norms, linear_sum  # noqa: E402
from dpcore_triton.noise import normal  # noqa: E402
from dpcore_triton.ring import ring  # noqa: E402
from dpcore_triton.row_norms import group_norms, row_norms  # noqa: E402
from dpcore_triton.step import step  # noqa: E402
from dpcore_triton.stream import words  # noqa: E402
from dpcore_triton.tied import tied_norms  # noqa: E402
from dpcore_triton.update import update  # noqa: E402

name: Final = "triton"
arrays: Final = "torch"

__all__ = [
    "arrays",
    "beside",
    "clear",
    "clip_factors",
    "combine",
    "embedding_norms",
    "embedding_sum",
    "from_numpy",
    "group_norms",
    "linear_norms",
    "linear_sum",
    "name",
    "normal",
    "recurrence",
    "ring",
    "row_norms",
    "step",
    "tied_norms",
    "to_numpy",
    "update",
    "weighted_sum",
    "words",
    "zeros_like",
]

if TYPE_CHECKING:
    import torch

    import dpcore_triton
    from dpcore.spec.ops import Backend

    _conforms: Backend[torch.Tensor] = dpcore_triton
