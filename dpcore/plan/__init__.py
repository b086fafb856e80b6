"""The plan of a run: method, sampler and steps that fit together, and the event that follows."""

from dpcore.plan.plan import Plan

__all__ = ["Plan"]
