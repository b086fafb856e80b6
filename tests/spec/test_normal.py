"""Normals on a grid: the sampler's law, enumerated and in draws, against the normal law in exact arithmetic."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import NamedTuple

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from dpcore.spec import rounded_normal as law
from dpcore.spec.stream import Stream
from dpcore_numpy import normal
from dpcore_numpy.noise import signed, size_of
from tests.depth import chosen
from tests.spec.scalar_normal import REST, drawn, region_of, words_of

KEY = bytes(range(100, 132))
BITS = 9
"""Of a place in the enumerated law: as many as a staircase has steps."""
LEAST = 1e-4
"""A p-value below it is refused. Keys are fixed, so a sound sampler passes always."""


# ------------------------------------------------------------------------------------------------ the law, enumerated


@pytest.fixture(scope="module")
def masses() -> list[int]:
    """Of every region, in units of 2^-24, as the columns of the alias table give it."""
    found = [0] * 1024
    for own, column in enumerate(law.tables().columns.tolist()):
        threshold, other = divmod(column, 1024)
        assert threshold <= 2**14
        found[own] += threshold
        found[other] += 2**14 - threshold
    return found


def accepted(strip: int) -> list[int]:
    """Return for each place of a strip how many of the (u, v) that choose a trial accept it, of 2^63 2^53."""
    hat = law.tables().numbers[1, strip]
    r = law.rest(np.full(2**BITS, strip), np.arange(2**BITS), BITS)
    assert (r >= 0).all()
    assert (r <= hat).all()
    # The comparison is monotone in v: its first value that is not below r, exactly.
    v = np.floor(r / hat * 2.0**53) - 4
    v += sum((((v + k) * 2.0**-53 * hat < r) & (v + k < 2**53)).astype(float) for k in range(9))
    ends = [0, *law.tables().ends.tolist()]
    width = ends[strip + 1] - ends[strip]
    return [width * int(count) for count in v]


class Enumerated(NamedTuple):
    """The probability of each place m = floor(2^15 |Z|), by strips: integers over `whole`."""

    counts: list[list[int]]
    whole: int
    accepted: int


@pytest.fixture(scope="module")
def enumerated(masses: list[int]) -> Enumerated:
    """The law of the very tables, and nothing that rounds."""
    trials = [accepted(strip) for strip in range(law.STRIPS)]
    total, found = sum(map(sum, trials)), []
    for strip, counts in enumerate(trials):
        box, stairs = masses[2 * strip : 2 * strip + 2] if 2 * strip + 1 < REST else (0, 0)
        steps = [box * 2 ** (18 - BITS) + stairs * (2 * (511 - c) + 1) for c in range(2**BITS)]
        found.append([step * total + masses[REST] * 2**18 * count for step, count in zip(steps, counts, strict=True)])
    return Enumerated(found, 2**42 * total, total)


def test_regions_have_the_masses_of_boxes_and_staircases(masses: list[int]) -> None:
    strips = law.strips()
    for region in range(REST):
        assert masses[region] == strips[region // 2][1 + region % 2], region
    assert sum(masses) == 2**24
    assert masses[REST] == 763


def test_the_law_is_the_normal_law(enumerated: Enumerated) -> None:
    """Every cell: within 2^-49, what the rest's own normalization moves it by, and the second order of the midpoint.

    A cell of width h at x has ``1 + h^2 (x^2 - 1) / 24`` times the density at its middle, up to ``h^4 x^4 / 1920`` and
    smaller terms: 2^-57 here.
    """
    assert sum(map(sum, enumerated.counts)) == enumerated.whole
    strips = chosen([*range(0, law.STRIPS, 40), 63, 64, 510, 511, 512, 639], list(range(law.STRIPS)))
    with mpmath.workdps(45):
        for strip in strips:
            edges = [(strip + mpmath.mpf(m) / 2**BITS) / 64 for m in range(2**BITS + 1)]
            beyond = [mpmath.erfc(edge / mpmath.sqrt(2)) for edge in edges]
            for place, count in enumerate(enumerated.counts[strip]):
                x = float(edges[place] + edges[place + 1]) / 2
                error = float(mpmath.mpf(count) / enumerated.whole / (beyond[place] - beyond[place + 1]) - 1)
                error += 2.0 ** (-2 * (BITS + 6)) * (x * x - 1) / 24
                assert abs(error) <= 2.0**-49 + 2.0**-44 * share_of_rest(strip, place), (strip, place, error)


def share_of_rest(strip: int, place: int) -> float:
    """Return r over f."""
    left, _, box, step = law.tables().numbers[:, strip]
    f = left * math.exp(-((delta := (place + 0.5) / 2 ** (BITS + 6)) * (strip / 64 + delta / 2)))
    return 1 - (box + step * (511.5 - place)) / f


def test_what_the_normalization_of_the_rest_costs(enumerated: Enumerated) -> None:
    """Its error is below 2^-44, and moves draws by that share of r / f: 2^-53 in the root of the mean square."""
    ends = law.tables().ends
    accepts = Fraction(enumerated.accepted, 2 ** (BITS + 53) * int(ends[-1]))
    with localcontext() as context:
        context.prec = 50
        hats = sum((strip.hat for strip in law.strips()), Decimal(0))
        boxes = Decimal(sum(strip.box + strip.staircase for strip in law.strips())) / 2**24
        expected = Fraction((1 - boxes) / hats)
    assert abs(float(accepts / expected - 1)) < 2.0**-44
    mean_square = sum(
        count / enumerated.whole * share_of_rest(strip, place) ** 2
        for strip, row in enumerate(enumerated.counts)
        for place, count in enumerate(row)
    )
    assert 2.0**-44 * math.sqrt(mean_square) < 2.0**-53


def test_distance() -> None:
    assert law.distance(1e12) == pytest.approx(1e12 * 2.0**-75 + 1e6 * 2.0**-49)
    assert law.distance(1e12) < 1.9e-9
    assert 2 * stats.norm.sf(law.LARGEST) < 2.0**-75


def test_the_rest_is_right_within_its_bound() -> None:
    """At random places of full resolution, against 50 digits: ``12 2^-53 f``, and between 0 and its hat."""
    draw, count = np.random.default_rng(1), chosen(20_000, 100_000)
    strip, place = draw.integers(0, law.STRIPS, count), draw.integers(0, 2**law.FINE_BITS, count)
    place[:2000] >>= draw.integers(0, 30, 2000)  # near a strip's left end, and below near its right
    place[1000:2000] = 2**law.FINE_BITS - 1 - place[1000:2000]
    r, hats = law.rest(strip, place), law.tables().numbers[1, strip]
    assert (r >= 0).all()
    assert (r <= hats).all()
    worst = 0.0
    with localcontext() as context:
        context.prec = 50
        strips = law.strips()
        scale = (2**63 - law.STRIPS) / sum((each.hat for each in strips), Decimal(0))
        for j, m, found in zip(strip.tolist(), place.tolist(), r.tolist(), strict=True):
            x, left = Decimal(2 * m + 1) / 2**37, strips[j].left
            f = left * (-x * (Decimal(j) / 64 + x / 2)).exp()
            below = Decimal(strips[j].box) + Decimal(strips[j].staircase) * (1023 - 2 * (m >> 21)) / 512
            worst = max(worst, abs(float((Decimal(found) / scale - (f - below / 2**24)) / f)))
    assert worst <= 12 * 2.0**-53
    assert worst >= 2.0**-53, "else the comparison would compare nothing"


# ------------------------------------------------------------------------------------- the words' part, enumerated too


def test_all_first_words_choose_the_regions_as_often_as_the_columns_say(masses: list[int]) -> None:
    counts = np.zeros(1024, dtype=np.int64)
    for first in range(0, 2**24, 2**20):
        w0 = np.arange(first, first + 2**20, dtype=np.uint32)
        counts += np.bincount(size_of(w0, w0)[1], minlength=1024)
    assert counts.tolist() == masses


@pytest.mark.parametrize("strip", [0, 37, 200])
def test_a_staircase_goes_down_from_the_left(strip: int) -> None:
    """Of all t and steps: step c comes out ``2 (511 - c) + 1`` times, and the place within a step as often as any."""
    word = next(w for w in range(2**24) if region_of(w) == 2 * strip + 1)
    t, c = (part.reshape(-1).astype(np.uint32) for part in np.meshgrid(np.arange(512), np.arange(512)))
    for fine in (0, 12345, 2**21 - 1):
        k, _ = size_of(np.uint32(word) | (t >> 2) << np.uint32(24), (c << np.uint32(21) | np.uint32(fine)) << 2 | t & 3)
        assert (k >> 30 == strip).all()
        step = np.bincount(k >> 21 & 511, minlength=512)
        assert step.tolist() == [2 * (511 - c) + 1 for c in range(512)]
        assert set(np.unique(k % 2**21)) == {fine, 2**21 - 1 - fine}


def test_the_sign_is_a_bit_that_chooses_nothing_else() -> None:
    w0, w1 = np.random.default_rng(2).integers(0, 2**31, (2, 1000), dtype=np.uint32)
    k, region = size_of(w0, w1)
    other = w0 | np.uint32(2**31)
    assert np.array_equal(size_of(other, w1)[1], region)
    above, below = (signed(size_of(words, w1)[0], words, 36) * 2.0**36 for words in (w0, other))
    assert np.array_equal(above, k)
    assert np.array_equal(below, -1 - k)


def test_normals_are_their_definition() -> None:
    """By a scalar loop on Python's integers, for elements on both sides of every edge, and for those of the rest."""
    elements = [*range(40), *range(250, 262), *range(4090, 4100), 8191, 12345, 2**34 - 1]
    for row, more in ((3, []), (4, rest_elements(4, 2**18))):
        for element in [*elements, *more]:
            for bits in (36, 30, 12, 0):
                expected = drawn(words_of(KEY, row, element), element, bits)
                (got,) = normal(KEY, row, Stream.GRADIENT, element, 1, bits=bits, rng="philox")
                assert got == expected * 2.0**-bits
        assert len(more) == 0 or len(more) > 5


def rest_elements(row: int, size: int) -> list[int]:
    from dpcore_numpy import words

    w0 = words(KEY, row, Stream.GRADIENT, 0, size, rng="philox")
    return np.flatnonzero(size_of(w0, w0)[1] == REST).tolist()


def test_fewer_bits_round_down() -> None:
    fine = normal(KEY, 8, Stream.GRADIENT, 77, 10_000, rng="philox")
    for bits in (36, 35, 30, 12, 1, 0):
        coarse = normal(KEY, 8, Stream.GRADIENT, 77, 10_000, bits=bits, rng="philox")
        assert coarse.dtype == np.float64
        assert np.array_equal(coarse, np.floor(fine * 2.0**bits) * 2.0**-bits)


# ------------------------------------------------------------------------------------------------------ the law, drawn


@pytest.fixture(scope="module")
def integers() -> Tallies:
    """Counts over 4e6 draws, or 1e9 in the nightly profile."""
    found, each = Tallies(), 2**22
    for row in range(chosen(1, 240)):
        found.add(np.rint(normal(KEY, row, Stream.GRADIENT, 100, each, rng="philox") * 2.0**36).astype(np.int64))
    return found


class Tallies:
    """How often draws fell where."""

    def __init__(self) -> None:
        self.draws = 0
        self.strips = np.zeros(2 * law.STRIPS, dtype=np.int64)
        self.places = np.zeros((8, 512), dtype=np.int64)
        self.low = np.zeros(2**20, dtype=np.int64)

    def add(self, k: np.ndarray) -> None:
        """Count (n,) integers 2^36 Z, rounded down."""
        self.draws += k.size
        self.strips += np.bincount((k >> 30) + law.STRIPS, minlength=2 * law.STRIPS)
        size = np.where(k < 0, -1 - k, k)
        eighth = np.minimum(size >> 35, 7)  # strips 32 i .. 32 i + 31
        self.places += np.bincount(eighth << 9 | size >> 21 & 511, minlength=4096).reshape(8, 512)
        self.low += np.bincount(k & (2**20 - 1), minlength=2**20)


def between(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """P(left < Z < right), each to a relative 1e-13 or so, for numbers of one sign."""
    negative = right <= 0
    low, high = np.where(negative, -right, left), np.where(negative, -left, right)
    return special.ndtr(-low) - special.ndtr(-high)


def fits(counts: np.ndarray, expected: np.ndarray) -> float:
    """The p-value of Pearson's statistic; neighboring cells that expect less than 20 draws are put together."""
    group = np.minimum(np.cumsum(expected) // 20, max(expected.sum() // 20 - 1, 0)).astype(int)
    counts, expected = (np.bincount(group, weights=part) for part in (counts, expected))
    kept = expected > 0
    statistic = float((((counts - expected) ** 2)[kept] / expected[kept]).sum())
    return float(stats.chi2.sf(statistic, kept.sum() - 1))


def test_strips_of_both_signs_are_as_frequent_as_they_should(integers: Tallies) -> None:
    edges = np.arange(-law.STRIPS, law.STRIPS + 1) / 64
    assert fits(integers.strips, integers.draws * between(edges[:-1], edges[1:])) > LEAST
    halves = integers.strips.reshape(2, -1).sum(axis=1)
    assert stats.binomtest(int(halves[0]), integers.draws).pvalue > LEAST


def test_places_within_strips_are_as_frequent_as_they_should(integers: Tallies) -> None:
    for eighth, counts in enumerate(integers.places):
        expected = np.zeros(512)
        for strip in range(32 * eighth, 32 * (eighth + 1) if eighth < 7 else law.STRIPS):
            edges = (strip + np.arange(513) / 512) / 64
            expected += 2 * between(edges[:-1], edges[1:])
        assert fits(counts, integers.draws * expected) > LEAST


def test_the_lowest_twenty_bits_are_uniform(integers: Tallies) -> None:
    assert fits(integers.low, np.full(2**20, integers.draws / 2**20)) > LEAST
    for bit in range(20):
        ones = integers.low.reshape(-1, 2, 2**bit).sum(axis=(0, 2))[1]
        assert stats.binomtest(int(ones), integers.draws).pvalue > LEAST


def test_tails_are_as_frequent_as_they_should(integers: Tallies) -> None:
    for bound in (3.0, 4.0, 4.5, 5.0, 5.5, 6.0):
        first = law.STRIPS + round(64 * bound)
        expected = integers.draws * float(stats.norm.sf(bound))
        for count in (integers.strips[first:].sum(), integers.strips[: 2 * law.STRIPS - first].sum()):
            assert 2 * min(stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)) > LEAST


@pytest.mark.parametrize("scale", [1.0, 0.9, 1.02])
def test_kolmogorov_smirnov_accepts_the_normal_and_rejects_other_scales(scale: float) -> None:
    z = scale * np.concatenate([normal(KEY, row, Stream.GRADIENT, 100, 100_000) for row in range(2)])
    p = stats.kstest(z, "norm").pvalue
    assert (p > 1e-3) == (scale == 1.0)


def test_moments_and_independence() -> None:
    size = 1_000_000
    here, next_row = (normal(KEY, row, Stream.GRADIENT, 0, size) for row in (1, 2))
    other_stream = normal(KEY, 1, Stream.SECOND_MOMENT, 0, size)
    bound = 5 / math.sqrt(size)
    assert abs(here.mean()) < bound
    assert abs(here.var() - 1) < bound * math.sqrt(2)
    assert abs((here**4).mean() - 3) < bound * math.sqrt(96)
    for shifted in (np.roll(here, 1), np.roll(here, 256), np.roll(here, 4096), next_row, other_stream):
        assert abs((here * shifted).mean()) < bound
        assert abs(np.corrcoef(here**2, shifted**2)[0, 1]) < bound
