"""The query stage: which vector of each example is privatized."""

from dpcore.stages.queries.base import Plain, Point, Query
from dpcore.stages.queries.parameter_window import ParameterWindow
from dpcore.stages.queries.preconditioned import Phase, Preconditioned
from dpcore.stages.queries.recursive_difference import AcceleratedDifference, RecursiveDifference
from dpcore.stages.queries.two_point import TwoPoint

__all__ = [
    "AcceleratedDifference", "ParameterWindow", "Phase", "Plain", "Point", "Preconditioned", "Query",
    "RecursiveDifference", "TwoPoint",
]  # fmt: skip
