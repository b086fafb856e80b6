"""What does not come out as it should: each entry is strict, so that it goes when its model is mended."""

from __future__ import annotations

REFUSED_WRONGLY = {
    "view: view after draws",
    "drawn: uniform_ of empty",  # prims::uniform uses the number of examples
    "drawn: normal_ of zeros",  # prims::normal uses the number of examples
    "attention: linear attention",  # view size is not compatible, of a transposed product
    "picture: max_unpool",  # arange uses the number of examples
    "picture: own filter",  # convolution uses the number of examples: groups of all of them
}
"""Models that treat each example alone and are refused."""

CRASHES = {
    "statistics: covariance",
    "statistics: correlation",  # atol must be >= 0, but got nan: NaN of made-up examples
    "statistics: whitening",  # prims::copy_to, an operator whose output has alias annotations
    "state: plain tensor in place",  # mutating a non-functional tensor with a functional tensor
}
"""Models that end in another error than one of dpcore's."""

VIOLATIONS: dict[str, str] = {}
"""Models of which one example moves the sum by more than is claimed, and why."""

ROUNDED: dict[str, float] = {}
"""How far the others stray, in clip norms, where passes over another number of examples round more than usual."""

UNCOUPLED = {"drawn: rrelu"}
"""Models that draw as many numbers as values of an example say, so that one seed gives the others of a batch other draws.

Their law is the same, which is what the guarantee needs (`dpcore.torch.randomness`), but no two sums can be compared.
"""
