"""The filter stage: a linear recurrence over time on the released averages (post-processing: it costs no privacy)."""

from dpcore.filters.averaging import Averaging
from dpcore.filters.base import Filter
from dpcore.filters.identity import Identity
from dpcore.filters.low_pass import LowPass
from dpcore.filters.named import NAMED_FILTERS, named_filter

__all__ = ["NAMED_FILTERS", "Averaging", "Filter", "Identity", "LowPass", "named_filter"]
