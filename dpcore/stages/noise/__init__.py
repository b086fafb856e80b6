"""The noise stage: what is added to the sum."""

from dpcore.stages.noise.base import Noise
from dpcore.stages.noise.correlated import CorrelatedGaussian
from dpcore.stages.noise.independent import IndependentGaussian

__all__ = ["CorrelatedGaussian", "IndependentGaussian", "Noise"]
