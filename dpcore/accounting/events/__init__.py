"""Events: immutable descriptions of what was released."""

from __future__ import annotations

from dpcore.accounting.events.base import Adjacency, Event, check_event
from dpcore.accounting.events.composed import Composed, NonPrivate, SelfComposed
from dpcore.accounting.events.gaussian import Gaussian, MatrixGaussian
from dpcore.accounting.events.sampled import (
    CyclicPoissonSampledGaussian,
    FixedSizeSampledGaussian,
    PoissonSampledGaussian,
    RandomAllocationGaussian,
    TruncatedPoissonSampledGaussian,
)

__all__ = [
    "Adjacency",
    "Composed",
    "CyclicPoissonSampledGaussian",
    "Event",
    "FixedSizeSampledGaussian",
    "Gaussian",
    "MatrixGaussian",
    "NonPrivate",
    "PoissonSampledGaussian",
    "RandomAllocationGaussian",
    "SelfComposed",
    "TruncatedPoissonSampledGaussian",
    "check_event",
]
