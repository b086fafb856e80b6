"""The query stage: which vector of each example is privatized."""

from dpcore.queries.base import Point, Query
from dpcore.queries.plain import Plain
from dpcore.queries.two_point import TwoPoint

__all__ = ["Plain", "Point", "Query", "TwoPoint"]
