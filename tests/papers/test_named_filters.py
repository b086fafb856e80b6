"""The named filters are those that the papers print, coefficient by coefficient."""

from fractions import Fraction

import pytest

from dpcore.stages.filters import NAMED_FILTERS

# name | b_0, b_1, ... | a_1, a_2, ...: DOPPLER's two tables of filters, DP-PMLF's settings and its table 4.
PRINTED = """
none            | 1                   |
momentum        | .1                  | -.9
first-order v1  | 1/11, 1/11          | -9/11
first-order v2  | 3/11, -1/11         | -9/11
second-order    | 1/58, 2/58, 1/58    | -92/58, 38/58
f1              | .075, .025          | -.9
f2              | .025, .075          | -.9
f3              | .1, .1              | -.8
f4              | .2, .2              | -.6
f5              | .025, .05, .025     | -.9
f6              | .025, .025          | -1.8, .85
pmlf-mnist      | .1                  | -.9
pmlf-cifar      | .15, -.05           | -.9
p1              | .4                  | -.6
p2              | .2, .2              | -.6
p3              | .5, -.1             | -.6
p4              | .1                  | -.9
p5              | .05, .05            | -.9
p6              | .15, -.05           | -.9
p7              | .05, .05            | -.7, -.2
"""


def numbers(cell: str) -> list[float]:
    return [float(Fraction(entry.strip())) for entry in cell.split(",") if entry.strip()]


ROWS = [tuple(cell.strip() for cell in line.split("|")) for line in PRINTED.strip().splitlines()]


@pytest.mark.parametrize(("name", "b", "a"), ROWS, ids=[row[0] for row in ROWS])
def test_coefficients_are_the_printed_ones(name: str, b: str, a: str) -> None:
    assert NAMED_FILTERS[name] == (pytest.approx(numbers(b)), pytest.approx(numbers(a)))


def test_no_filter_is_missing_from_the_table() -> None:
    assert set(NAMED_FILTERS) == {row[0] for row in ROWS}
