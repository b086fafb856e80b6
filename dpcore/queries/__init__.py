"""The query stage: which vector of each example is privatized."""

from dpcore.queries.base import Point, Query
from dpcore.queries.parameter_window import ParameterWindow
from dpcore.queries.plain import Plain
from dpcore.queries.preconditioned import Phase, Preconditioned
from dpcore.queries.recursive_difference import AcceleratedDifference, RecursiveDifference
from dpcore.queries.two_point import TwoPoint

__all__ = [
    "AcceleratedDifference",
    "ParameterWindow",
    "Phase",
    "Plain",
    "Point",
    "Preconditioned",
    "Query",
    "RecursiveDifference",
    "TwoPoint",
]
