"""The reference backend: every operation in plain NumPy, in float32 or float64. Its results define the semantics."""

from typing import TYPE_CHECKING, Any, Final

from dpcore.spec.repeating import repeat
from dpcore_numpy.arrays import beside, clear, from_numpy, to_numpy, zeros_like
from dpcore_numpy.clip import clip_factors, combine, group_norms, row_norms, weighted_sum
from dpcore_numpy.correlate import correlate
from dpcore_numpy.embedding import embedding_norms, embedding_sum
from dpcore_numpy.filter import recurrence
from dpcore_numpy.joined import joined_norms
from dpcore_numpy.linear import copies_halves, linear_norms, linear_sums, linear_way, prefers_pairs, sliced_rounding
from dpcore_numpy.noise import normal
from dpcore_numpy.step import step
from dpcore_numpy.stream import words
from dpcore_numpy.tied import tied_norms, tied_row_norms
from dpcore_numpy.update import update

name: Final = "numpy"
arrays: Final = "numpy"

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
    "words",
    "zeros_like",
]

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import dpcore_numpy
    from dpcore.spec.ops import Backend

    _conforms: Backend[NDArray[Any]] = dpcore_numpy
