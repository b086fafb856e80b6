"""The filter stage: a linear recurrence over time on the released averages (post-processing: it costs no privacy)."""

from dpcore.filters.accumulation import Accumulation
from dpcore.filters.averaging import Averaging
from dpcore.filters.base import Filter
from dpcore.filters.chain import Chain
from dpcore.filters.designs import butterworth, chebyshev
from dpcore.filters.full_kalman import FullKalman
from dpcore.filters.identity import Identity
from dpcore.filters.kalman import ScalarKalman
from dpcore.filters.low_pass import LowPass
from dpcore.filters.named import NAMED_FILTERS, named_filter
from dpcore.filters.optimal_fir import OptimalFIR

__all__ = [
    "NAMED_FILTERS",
    "Accumulation",
    "Averaging",
    "Chain",
    "Filter",
    "FullKalman",
    "Identity",
    "LowPass",
    "OptimalFIR",
    "ScalarKalman",
    "butterworth",
    "chebyshev",
    "named_filter",
]
