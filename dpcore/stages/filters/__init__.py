"""The filter stage: a linear recurrence over time on the released averages (post-processing: it costs no privacy)."""

from dpcore.stages.filters.base import Chain, Filter, Identity
from dpcore.stages.filters.kalman import FullKalman, ScalarKalman
from dpcore.stages.filters.linear import (
    NAMED_FILTERS,
    Accumulation,
    Averaging,
    LowPass,
    butterworth,
    chebyshev,
    named_filter,
)
from dpcore.stages.filters.optimal_fir import OptimalFIR

__all__ = [
    "NAMED_FILTERS", "Accumulation", "Averaging", "Chain", "Filter", "FullKalman", "Identity", "LowPass", "OptimalFIR",
    "ScalarKalman", "butterworth", "chebyshev", "named_filter",
]  # fmt: skip
