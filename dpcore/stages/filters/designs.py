"""A filter by a text: a name of the papers' tables, or a design and its numbers, such as ``butterworth 2 0.1``."""

from collections.abc import Callable
from typing import Any, Final

from dpcore.errors import ArgumentError, DpcoreError
from dpcore.stages.filters.base import Filter
from dpcore.stages.filters.linear import butterworth, chebyshev, named_filter
from dpcore.stages.filters.optimal_fir import OptimalFIR

# name -> what makes the filter, and the numbers behind the name.
DESIGNS: Final[dict[str, tuple[Callable[..., Filter], str]]] = {
    "butterworth": (butterworth, "ORDER CUTOFF"),
    "chebyshev": (chebyshev, "ORDER CUTOFF RIPPLE"),
    "optimal-fir": (OptimalFIR, "LENGTH (or LENGTH paper)"),
}


def filter_of(text: str) -> Filter:
    """Return the filter of a name or of a design with its numbers.

    Raises
    ------
    ArgumentError
        If there is none of that name, or if the numbers are not those of the design.
    """
    name, *given = text.split() or [""]
    if name not in DESIGNS:
        return named_filter(text)
    make, wanted = DESIGNS[name]
    try:
        return make(*map(_number, given))
    except DpcoreError:
        raise
    except (TypeError, ValueError) as cause:  # too many numbers, too few, or none
        raise ArgumentError(f"filter={text!r}: must be '{name} {wanted}', in numbers") from cause


def _number(word: str) -> Any:
    if word == "paper":  # a weighting of the optimal FIR
        return word
    return int(word) if word.isdecimal() else float(word)
