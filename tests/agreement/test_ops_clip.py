"""Norms, clip factors and weighted sums: Triton's kernels against the NumPy reference."""

from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import assert_agree, few, floats, seeds, small_sizes

import dpcore_numpy as reference
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.contributions import rounding_of_rows
from dpcore.spec.ops import CLIP_RULES, LEADING_BITS
from tests.refused import refused

pytest.importorskip("triton")
RAISED = {"triton": 2.0**-19, "torch": 2.0**-17}

pytestmark = pytest.mark.usefixtures("poisoned_memory")

examples = st.sampled_from([0, 1, 2, 31, 33, 64])
widths = st.lists(small_sizes, min_size=1, max_size=3)


def assert_norms_agree(backend: Any, got: np.ndarray, expected: np.ndarray, size: int) -> None:
    assert got.dtype == np.float64
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    finite = np.isfinite(expected)
    # Each lies within (d + 8) 2^-53 of the true norm, or is raised.
    error = 2 * (size + 8) * 2.0**-53
    assert (got[finite] >= expected[finite] * (1 - error)).all()
    assert (got[finite] <= expected[finite] * (1 + error + RAISED[backend.name])).all()


@few
@given(seeds, examples, widths, st.booleans(), st.booleans())
def test_norms_agree(backend: Any, seed: int, count: int, sizes: list[int], scaled: bool, special: bool) -> None:
    rng = np.random.default_rng(seed)
    rows = [floats(rng, count, size, special=special) for size in sizes]
    scale = [floats(rng, size) if rng.random() < 0.7 else None for size in sizes] if scaled else None
    on_device = [backend.from_numpy(block) for block in rows]
    sent_scale = None if scale is None else [None if v is None else backend.from_numpy(v) for v in scale]
    groups = rng.permutation(len(sizes)) % rng.integers(1, len(sizes) + 1)
    groups = [int(group) for group in groups]
    got = [backend.row_norms(on_device, sent_scale), *backend.group_norms(on_device, groups, sent_scale)]
    with np.errstate(all="ignore"):
        expected = [reference.row_norms(rows, scale), *reference.group_norms(rows, groups, scale)]
        for group, found in enumerate(expected[1:]):
            own = [i for i, each in enumerate(groups) if each == group]
            alone = reference.row_norms([rows[i] for i in own], None if scale is None else [scale[i] for i in own])
            np.testing.assert_array_equal(found, alone)
    for ours, theirs in zip(map(backend.to_numpy, got), expected, strict=True):
        assert_norms_agree(backend, ours, theirs, sum(sizes))
    for block, sent in zip(rows, on_device, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(sent), block)


@pytest.mark.parametrize("others", [[], [3]])
def test_norms_of_large_blocks_are_upper_bounds(backend: Any, others: list[int]) -> None:
    """The reference is exact to 1e-12; rows of every size, where float32 squares are lost or beyond it."""
    rng = np.random.default_rng(3)
    sizes = 10.0 ** np.concatenate([rng.uniform(-3, 3, 40), [-44, -30, -20, -13, -12, -11, 15, 19, 25, 34]])
    rows = [(sizes[:, None] * rng.standard_normal((50, n))).astype(np.float32) for n in (8191, *others)]
    rows[0][:3] = 0
    rows[0][3, 5], rows[0][4, 8190] = np.nan, np.inf
    got = backend.to_numpy(backend.row_norms([backend.from_numpy(block) for block in rows]))
    with np.errstate(all="ignore"):
        expected = reference.row_norms(rows)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    finite = np.isfinite(expected)
    assert finite.sum() == 48
    assert (got[finite] >= expected[finite] * (1 - 1e-12)).all()
    assert (got[finite] <= expected[finite] * (1 + 1e-12 + RAISED[backend.name])).all()


def test_norms_of_extreme_numbers_are_exact(backend: Any) -> None:
    rows = np.array([[3e38, 3e38], [1e-45, 0], [-0.0, 0], [3, 4]], dtype=np.float32)
    got = backend.to_numpy(backend.row_norms([backend.from_numpy(rows)]))
    for row, norm in zip(rows, got.tolist(), strict=True):
        exact = sum(Fraction(float(value)) ** 2 for value in row)
        assert Fraction(norm) ** 2 - exact >= -exact * Fraction(20, 2**53)
        assert Fraction(norm) ** 2 - exact <= exact * (Fraction(20, 2**53) + 2 * Fraction(RAISED[backend.name]))


@few
@given(seeds, st.sampled_from([0, 1, 33, 1025]), st.integers(1, 3), st.sampled_from(CLIP_RULES))
def test_factors_agree(backend: Any, seed: int, count: int, groups: int, rule: str) -> None:
    rng = np.random.default_rng(seed)
    norms = [10.0 ** rng.uniform(-3, 3, count) for _ in range(groups)]
    for group in norms:
        chosen = rng.random(count) < 0.1
        group[chosen] = rng.choice([0, 5e-324, 1e-45, 1e-30, 1e30, 1e300, np.inf, np.nan], size=int(chosen.sum()))
    bounds = rng.choice([1e-3, 1.0, 2.5], size=groups).tolist()
    sizes, unit = rng.integers(0, 10**7, groups).tolist(), float(rng.choice([1e-12, 2.0**-30, 3e-9]))
    given_ = (rule, bounds, sizes, list(map(rounding_of_rows, sizes)), unit)
    got = backend.clip_factors([backend.from_numpy(group) for group in norms], *given_)
    expected = reference.clip_factors(norms, *given_)
    assert len(got) == groups
    for ours, theirs in zip(got, expected, strict=True):
        kept = (theirs.view(np.int64) & LEADING_BITS).view(np.float64) if backend.name == "triton" else theirs
        assert_agree("clip_factors", backend.to_numpy(ours), kept)


@pytest.mark.parametrize("rule", CLIP_RULES)
def test_the_vector_that_enters_the_sum_never_exceeds_the_bound(backend: Any, rule: str) -> None:
    """Rounded to the grid, in rational arithmetic; for vectors just about as long as the bound and for extreme ones."""
    rng = np.random.default_rng(4)
    rows = np.concatenate([rng.standard_normal((40, 3)) / 3**0.5, [[3e38] * 3, [1e-45] * 3, [1e-20, 3e38, 0]]])
    rows = rows.astype(np.float32)
    norms = [backend.row_norms([backend.from_numpy(rows)])]
    apart = np.zeros((len(rows), len(rows), 3), np.float32)  # so that a sum shows each example by itself
    apart[range(len(rows)), range(len(rows))] = rows
    for bound, steps in product((1e-30, 0.1, 1.0, 3e4), (7.0, 1e4, 2.0**36)):
        longest = 1.0 if rule == "normalized" else bound
        unit, out = longest / steps, backend.from_numpy(np.zeros(apart[0].size))
        weights = backend.clip_factors(norms, rule, [bound], [3], [rounding_of_rows(3)], unit)
        backend.weighted_sum([backend.from_numpy(apart.reshape(len(rows), -1))], weights, [out])
        for vector in backend.to_numpy(out).reshape(-1, 3).tolist():
            assert all(value.is_integer() for value in vector)
            assert sum(Fraction(value) ** 2 for value in vector) <= (Fraction(longest) / Fraction(unit)) ** 2


@few
@given(seeds, examples, widths, st.booleans(), st.booleans())
def test_weighted_sums_agree(
    backend: Any, seed: int, count: int, sizes: list[int], scaled: bool, special: bool
) -> None:
    rng = np.random.default_rng(seed)
    rows = [floats(rng, count, size, special=special) for size in sizes]
    weights = [floats(rng, count) * rng.choice([1e3, 1e9, 0.1]) * (1 + 2.0**-40) for _ in sizes]
    if rng.random() < 0.3:  # products half-way between two integers
        rows, weights = list(map(np.rint, rows)), [np.full(count, 0.5) for _ in sizes]
    out = [np.rint(floats(rng, size).astype(np.float64)) for size in sizes]
    for block, weight in zip(rows, weights, strict=True):
        # A clip gives weight 0 to every row that is not finite.
        weight[~np.isfinite(block).all(axis=1)] = 0
        weight[rng.random(count) < 0.2] = 0
    scale = [floats(rng, size) if scaled and rng.random() < 0.7 else None for size in sizes]
    sent = [
        [None if array is None else backend.from_numpy(array) for array in arrays]
        for arrays in (rows, weights, out, scale)
    ]
    with np.errstate(all="ignore"):
        factors = [np.ones(size) if v is None else v.astype(np.float64) for size, v in zip(sizes, scale, strict=True)]
        used = [weight != 0 for weight in weights]
        terms = [
            weight[own, None] * (block[own] * factor)
            for block, weight, own, factor in zip(rows, weights, used, factors, strict=True)
        ]
        # What does not fit an integer comes from a scale that no clip has seen: its sum depends on the order.
        exact = [np.all(np.abs(term) < 2.0**44, axis=0) for term in terms]
        sums = [total + np.rint(term).sum(axis=0) for total, term in zip(out, terms, strict=True)]
        reference.weighted_sum(rows, weights, out, scale)
    backend.weighted_sum(*sent)
    for ours, theirs, expected, held in zip(sent[2], out, sums, exact, strict=True):
        assert_agree("weighted_sum", theirs[held], expected[held])
        assert_agree("weighted_sum", backend.to_numpy(ours)[held], expected[held])
    for given_, read in zip([*rows, *weights], [*sent[0], *sent[1]], strict=True):
        np.testing.assert_array_equal(backend.to_numpy(read), given_)


@pytest.mark.parametrize("rule", CLIP_RULES)
def test_a_factor_that_underflows_is_zero(backend: Any, rule: str) -> None:
    """Near 2^-1074 a quotient may be rounded up by half of itself, and the example would be longer than C."""
    norms, bound = np.array([1.3e308, 3.7e306, 2.0**900, 1.0]), 1e-16
    unit = 2.0**-36 * (1.0 if rule == "normalized" else bound)
    (weights,) = backend.clip_factors([backend.from_numpy(norms)], rule, [bound], [1], [0.5], unit)
    found = backend.to_numpy(weights)
    for weight, norm in zip(found.tolist(), norms.tolist(), strict=True):
        assert Fraction(weight) * Fraction(norm) + Fraction(1, 2) <= 2**36
    assert (found > 0).tolist() == [False, False, True, True]


def test_a_product_is_rounded_before_it_becomes_an_integer(backend: Any) -> None:
    """Products that float64 rounds to a half: one operation for product and addition would see on which side it is."""
    rng = np.random.default_rng(7)
    rows, halves = rng.uniform(1, 2, 200).astype(np.float32), rng.integers(0, 2**30, 200) + 0.5
    weights = halves / rows
    weights[weights * rows != halves] = 0
    above = [Fraction(w) * Fraction(float(x)) > Fraction(h) for w, x, h in zip(weights, rows, halves, strict=True)]
    assert np.sum((weights != 0) & np.where(halves % 2 == 0.5, above, np.logical_not(above))) > 30
    out = backend.from_numpy(np.zeros(200))
    backend.weighted_sum([backend.from_numpy(np.diag(rows))], [backend.from_numpy(weights)], [out])
    np.testing.assert_array_equal(backend.to_numpy(out), np.rint(weights * rows))


def test_rows_of_weight_zero_add_nothing_where_the_scale_is_infinite(backend: Any) -> None:
    ones = np.ones((5, 4), dtype=np.float32)
    scale = np.array([1, np.inf, 1, -np.inf], dtype=np.float32)
    for operations in (backend, reference):
        out = operations.from_numpy(np.zeros(4))
        weights = operations.from_numpy(np.zeros(5))
        operations.weighted_sum([operations.from_numpy(ones)], [weights], [out], [operations.from_numpy(scale)])
        np.testing.assert_array_equal(operations.to_numpy(out), np.zeros(4))


@few
@given(seeds, examples, widths, st.booleans())
def test_combinations_are_the_same_bits(backend: Any, seed: int, count: int, sizes: list[int], special: bool) -> None:
    rng = np.random.default_rng(seed)
    first, second = ([floats(rng, count, size, special=special) for size in sizes] for _ in range(2))
    weights = (float(rng.normal()), float(rng.choice([1.0, -1.0, 0.3])))
    sent = [[backend.from_numpy(array) for array in arrays] for arrays in (first, second)]
    with np.errstate(all="ignore"):
        expected = [np.float32(weights[0]) * a + np.float32(weights[1]) * b for a, b in zip(first, second, strict=True)]
    for operations, given_ in ((backend, sent), (reference, (first, second))):
        for got, wanted in zip(operations.combine(*given_, weights), expected, strict=True):
            np.testing.assert_array_equal(operations.to_numpy(got), wanted)


def test_what_cannot_be_combined_is_refused(backend: Any) -> None:
    one, other = (backend.from_numpy(np.ones(shape, dtype=np.float32)) for shape in ((2, 3), (2, 4)))
    refused(ArgumentError, r"second\[0\].shape", backend.combine, [one], [other], (1.0, 1.0))
    refused(ArgumentError, r"len\(second\)=0", backend.combine, [one], [], (1.0, 1.0))
    refused(ArgumentError, "must be finite", backend.combine, [one], [one], (1.0, float("nan")))


def test_a_group_without_a_block_is_refused(backend: Any) -> None:
    rows = [backend.from_numpy(np.ones((2, 3), dtype=np.float32))] * 2
    for groups, text in (([0, 2], "group 1 must have a block"), ([0], r"len\(groups\)=1"), ([0, -1], "group=-1")):
        with pytest.raises(ArgumentError, match=text):
            backend.group_norms(rows, groups)


def test_rows_of_weight_zero_add_nothing(backend: Any) -> None:
    rows = np.array([[np.nan, np.inf, -np.inf], [1, 2, 3], [np.nan, 0, 0]], dtype=np.float32)
    out = backend.from_numpy(np.array([1, 1, -0.0]))
    weights = backend.from_numpy(np.array([0, 2, -0.0]))
    backend.weighted_sum([backend.from_numpy(rows)], [weights], [out])
    np.testing.assert_array_equal(backend.to_numpy(out), [3, 5, 6])


def test_rows_may_be_views(backend: Any) -> None:
    """Blocks cut out of one matrix of per-example gradients, and a transposed one."""
    rng = np.random.default_rng(0)
    values = floats(rng, 7, 50)
    matrix = backend.from_numpy(values)
    cuts = [matrix[:, 3:20], matrix[:, 20:21], backend.from_numpy(np.ascontiguousarray(values.T)).T]
    expected = [values[:, 3:20], values[:, 20:21], values]
    norms = backend.to_numpy(backend.row_norms(cuts))
    np.testing.assert_allclose(norms, reference.row_norms(expected), rtol=1e-14 + RAISED[backend.name])
    sums = [backend.zeros_like(cut[0], "float64") for cut in cuts]
    fine = backend.from_numpy(np.full(7, 2.0**20))
    backend.weighted_sum(cuts, [fine] * 3, sums)
    for total, block in zip(sums, expected, strict=True):
        integers = np.rint(2.0**20 * block.astype(np.float64))
        np.testing.assert_array_equal(backend.to_numpy(total), integers.sum(axis=0))


@few
@given(seeds, st.sampled_from([1, 5, 300]), st.sampled_from([1, 7, 1030]), st.booleans())
@example(7, 300, 1030, False)
def test_sums_of_bounded_addends_are_the_integers_of_float64(
    backend: Any, seed: int, count: int, size: int, half: bool
) -> None:
    """Of weights of 24 bits far beyond float32's range, with rows so small or large that the products are bounded."""
    rng, longest = np.random.default_rng(seed), 2.0**42
    rows = np.float32(rng.normal(size=(count, size)) * 10.0 ** rng.uniform(-44, 36, (count, 1)))
    rows[rng.random(count) < 0.2] = 1e-45
    if half:
        rows = (rows.view(np.int32) & -(1 << 16)).view(np.float32)  # numbers of bfloat16
    rows *= np.abs(rows) >= 2.0**-126 if half else True  # which Triton's interpreter reads otherwise
    norms = np.maximum(np.linalg.norm(np.float64(rows), axis=1), 1e-250)
    weights = longest * (1 - 1e-6) * np.where(rng.random(count) < 0.5, 1.0, rng.random(count) ** 20) / norms
    weights = (weights.view(np.int64) & LEADING_BITS).view(np.float64)
    weights[rng.random(count) < 0.2] = 0
    rows[weights == 0] = np.nan
    expected = np.zeros(size)
    reference.weighted_sum([rows], [weights], [expected])
    sent, out = backend.from_numpy(rows), backend.from_numpy(np.zeros(size))
    sent = sent.bfloat16() if half else sent
    backend.weighted_sum([sent], [backend.from_numpy(weights)], [out], None, [longest])
    np.testing.assert_array_equal(backend.to_numpy(out), expected)


def test_float64_is_refused_with_the_remedy(backend: Any) -> None:
    if backend.name == "torch":
        pytest.skip("takes float64, as the reference does")
    rows, norms = [backend.from_numpy(np.ones((2, 3)))], [backend.from_numpy(np.ones(2))]
    with pytest.raises(ArgumentTypeError, match=r"rows\[0\].dtype=float64: must be float32.*set_backend\('numpy'\)"):
        backend.row_norms(rows)
    with pytest.raises(ArgumentTypeError, match=r"set_backend\('numpy'\)"):
        backend.weighted_sum(rows, norms, [backend.from_numpy(np.ones(3))])
