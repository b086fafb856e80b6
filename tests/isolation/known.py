"""What does not come out as it should: each entry is strict, so that it goes when its model is mended."""

from __future__ import annotations

REFUSED_WRONGLY: set[str] = set()
"""Models that treat each example alone and are refused."""

CRASHES: set[str] = set()
"""Models that end in another error than one of dpcore's."""

VIOLATIONS: dict[str, str] = {}
"""Models of which one example moves the sum by more than is claimed, and why."""

ROUNDED: dict[str, float] = {"training: large values": 3e-4}
"""How far the others stray, in clip norms, where passes over another number of examples round more than usual."""

UNCOUPLED = {"drawn: rrelu"}
"""Models that draw as many numbers as values of an example say, so that one seed gives the others of a batch other draws.

Their law is the same, which is what the guarantee needs (`dpcore.torch.randomness`), but no two sums can be compared.
"""
