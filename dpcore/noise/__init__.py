"""The noise stage: what is added to the sum."""

from dpcore.noise.base import Noise
from dpcore.noise.correlated import CorrelatedGaussian
from dpcore.noise.independent import IndependentGaussian

__all__ = ["CorrelatedGaussian", "IndependentGaussian", "Noise"]
