"""The integer of a normal from its words, one element at a time, with Python's own integers; the golden file's oracle.

Written from the docstrings of `dpcore.spec.rounded_normal` and `dpcore.spec.stream`, not from a backend.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dpcore.spec import rounded_normal as law
from dpcore_numpy.stream import blocks_of

REST = 1023
Words = Callable[[int, bool], Any]


def parts_of(element: int) -> tuple[int, int]:
    """Return an element's block and its word within it."""
    tile, r = divmod(element, 4096)
    return tile * 256 + r % 256, r // 256


def region_of(w0: int) -> int:
    """Return the box (even), the staircase (odd) or the rest that the lowest 24 bits of the first word choose."""
    column = int(law.tables().columns[w0 % 1024])
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
    ends, numbers = law.tables().ends.tolist(), law.tables().numbers.T.tolist()
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
    for coefficient in reversed(law.SERIES):
        series = series * e + coefficient
    return left * series - (box + step * (511.5 - place // 2**21))


def words_of(key: bytes, row: int, element: int, stream: int = 0, rng: str = "philox") -> Words:
    """Return what gives the word of an element in a part, or all words of its block."""
    block, word = parts_of(element)

    def words(part: int, whole: bool) -> Any:
        (found,) = blocks_of(key, block, 1, (row, stream, part), rng).tolist()
        return found if whole else found[word]

    return words


def drawn(words: Words, element: int, bits: int = 36) -> int:
    """Return the integer of an element from its `words_of`."""
    word = parts_of(element)[1]
    attempts = (words(2 + 16 * attempt + word, True) for attempt in range(100))
    return integer_of(words(0, False), words(1, False), attempts, bits)
