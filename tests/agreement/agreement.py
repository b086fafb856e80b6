"""The agreement that each operation demands of two backends, and the reason.

The tests read this table; a tolerance is changed here, with its reason, or not at all.
"""

from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True)
class Agreement:
    """A tolerance. "ulps": of the result. "terms": ulps of the sum of the absolute values of the terms added."""

    kind: Literal["bitwise", "ulps", "terms"]
    ulps: float
    reason: str
    digits: int = 23  #: binary digits of what an ulp is of: 23 of float32, 52 of float64


AGREEMENT: Final = {
    "words": Agreement("bitwise", 0, "integer arithmetic has one right answer"),
    "normal": Agreement(
        "bitwise", 0, "integers; the few comparisons of float64 numbers are made of the same roundings"
    ),
    "row_norms": Agreement("ulps", 64, "true norms, or raised by 2^-17 at most where squares are added in float32"),
    "clip_factors": Agreement("bitwise", 0, "the same float64 operations in the same order, each correctly rounded"),
    "weighted_sum": Agreement("bitwise", 0, "integers, each of one float64 product, or two with a scale"),
    "linear_norms": Agreement("ulps", 1, "certified bounds, each about as tight as float64 arithmetic allows"),
    "linear_norms, one position": Agreement("ulps", 64, "as row_norms, whose squares are added in float32"),
    "linear_sums": Agreement(
        "terms", 1024, "integers of products whose T additions round in any order, below 1024 in the tests", 52
    ),
    "embedding_norms": Agreement("ulps", 1, "as linear_norms"),
    "embedding_sum": Agreement("terms", 1024, "as linear_sums", 52),
    "tied_norms": Agreement("ulps", 1, "as linear_norms"),
    "tied_row_norms": Agreement("ulps", 64, "as row_norms"),
    "joined_norms": Agreement("bitwise", 0, "the same float64 operations in the same order, each correctly rounded"),
    "recurrence": Agreement("terms", 8, "three products and three sums a state vector"),
    "correlate": Agreement("bitwise", 0, "the same float64 operations in the same order, each correctly rounded"),
    "update": Agreement("terms", 16, "a square root, two quotients and six products, each correctly rounded"),
    "step": Agreement(
        "terms", 32, "noise and release are the same bits; what is left are filters and update, in float32"
    ),
}
