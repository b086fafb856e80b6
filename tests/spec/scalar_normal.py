"""The integer of a normal from its words, one element at a time, with Python's own integers; the golden file's oracle.

Written from the docstrings of `dpcore.spec.rounded_normal` and `dpcore.spec.stream`, not from a backend.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from dpcore.spec.rounded_normal import SERIES, tables

REST = 1023


def parts_of(element: int) -> tuple[int, int]:
    """Return an element's block and its word within it."""
    tile, r = divmod(element, 4096)
    return tile * 256 + r % 256, r // 256


def region_of(w0: int) -> int:
    """Return the box (even), the staircase (odd) or the rest that the lowest 24 bits of the first word choose."""
    column = int(tables().columns[w0 % 1024])
    threshold, other = divmod(column, 1024)
    return w0 % 1024 if w0 // 2**10 % 2**14 < threshold else other


def integer_of(w0: int, w1: int, attempts: Iterable[Sequence[int]], bits: int = 36) -> int:
    """Return floor(2^bits Z). Of `attempts`, blocks of 16 words, only what is needed is read."""
    region = region_of(w0)
    if region == REST:
        size = first_accepted(attempts)
    else:
        place, t = w1 // 4, w0 // 2**24 % 2**7 * 4 + w1 % 4
        if region % 2 == 1 and t >= 511 - place // 2**21:
            place = 2**30 - 1 - place
        size = region // 2 * 2**30 + place
    return (-1 - size if w0 >= 2**31 else size) // 2 ** (36 - bits)


def first_accepted(attempts: Iterable[Sequence[int]]) -> int:
    """Return k of the first trial that is accepted: a strip by its hat, a place in it, and v below r over the hat."""
    ends, numbers = tables().ends.tolist(), tables().numbers.T.tolist()
    for words in attempts:
        for a, b, c, d, e in (words[0:5], words[5:10], words[10:15]):
            strip, place = bisect_right(ends, (a * 2**32 + b) // 2), c // 4
            if strip < len(ends) and (d * 2**32 + e) // 2**11 * 2.0**-53 * numbers[strip][1] < rest(
                numbers[strip], strip, place
            ):
                return strip * 2**30 + place
    raise AssertionError("no trial was accepted")


def rest(numbers: Sequence[float], strip: int, place: int) -> float:
    """Return r in float64; every operation rounds once, in this order."""
    left, _, box, step = numbers
    delta = (place + 0.5) / 2**36
    e = delta * (strip / 64 + 0.5 * delta)
    series = 0.0
    for coefficient in reversed(SERIES):
        series = series * e + coefficient
    return left * series - (box + step * (511.5 - place // 2**21))


def drawn(words: Any, element: int, bits: int = 36) -> int:
    """Return the integer of an element, with ``words(part, element)`` and ``words(part, None)`` for a whole block."""
    word = parts_of(element)[1]
    attempts = (words(2 + 16 * attempt + word, None) for attempt in range(100))
    return integer_of(words(0, element), words(1, element), attempts, bits)
