"""The clip stage: how each example's vector is bounded, and what that bound is worth."""

from dpcore.clipping.adaptive import AdaptiveClip
from dpcore.clipping.clip import Clip
from dpcore.clipping.groups import Grouping
from dpcore.clipping.sensitivity import Sensitivity

__all__ = ["AdaptiveClip", "Clip", "Grouping", "Sensitivity"]
