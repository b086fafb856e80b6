"""The noise stage: what is added to the sum."""

from dpcore.noise.base import Noise
from dpcore.noise.independent import IndependentGaussian

__all__ = ["IndependentGaussian", "Noise"]
