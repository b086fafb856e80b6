"""The clip stage: how each example's vector is bounded, and the sensitivity that follows."""

from dpcore.stages.clipping.adaptive import AdaptiveClip
from dpcore.stages.clipping.clip import Clip, Grouping, Sensitivity

__all__ = ["AdaptiveClip", "Clip", "Grouping", "Sensitivity"]
