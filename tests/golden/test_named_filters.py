"""The papers' filter tables, once more and independently typed in: a swapped pair must not pass unseen."""

from __future__ import annotations

from fractions import Fraction

import pytest

from dpcore.filters import NAMED_FILTERS

# name: (b, a) as printed (algorithms.md, section 3), in exact fractions.
TABLE = {
    "none": ("1", ""),
    "momentum": ("1/10", "-9/10"),
    "first-order v1": ("1/11 1/11", "-9/11"),
    "first-order v2": ("3/11 -1/11", "-9/11"),
    "second-order": ("1/58 2/58 1/58", "-92/58 38/58"),
    "f1": ("75/1000 25/1000", "-9/10"),
    "f2": ("25/1000 75/1000", "-9/10"),
    "f3": ("1/10 1/10", "-8/10"),
    "f4": ("2/10 2/10", "-6/10"),
    "f5": ("25/1000 5/100 25/1000", "-9/10"),
    "f6": ("25/1000 25/1000", "-18/10 85/100"),
    "pmlf-mnist": ("1/10", "-9/10"),
    "pmlf-cifar": ("15/100 -5/100", "-9/10"),
    "p1": ("4/10", "-6/10"),
    "p2": ("2/10 2/10", "-6/10"),
    "p3": ("5/10 -1/10", "-6/10"),
    "p4": ("1/10", "-9/10"),
    "p5": ("5/100 5/100", "-9/10"),
    "p6": ("15/100 -5/100", "-9/10"),
    "p7": ("5/100 5/100", "-7/10 -2/10"),
}


def test_the_tables_have_the_same_names() -> None:
    assert NAMED_FILTERS.keys() == TABLE.keys()


@pytest.mark.parametrize("name", TABLE)
def test_the_coefficients_are_the_printed_ones(name: str) -> None:
    for printed, stored in zip(TABLE[name], NAMED_FILTERS[name], strict=True):
        exact = [Fraction(number) for number in printed.split()]
        assert [float(number) for number in exact] == pytest.approx(list(stored), abs=1e-15)
    b, a = ([Fraction(number) for number in part.split()] for part in TABLE[name])
    assert sum(b) - sum(a) == 1
