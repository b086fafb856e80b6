"""Clipping: rules, groups, certified factors, non-finite rows, extreme values."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpcore import Plan
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.methods import dp_sgd
from dpcore.sampling import PoissonSampler
from dpcore.spec.contributions import rounding_of_rows
from dpcore.spec.ops import CLIP_RULES
from dpcore.stages.clipping import Clip, Grouping, Sensitivity
from dpcore_numpy import clip_factors, row_norms, weighted_sum
from tests.refused import refused

UNIT = 2.0**-36

finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def exact_norm_squared(vector: np.ndarray) -> Fraction:
    """In rational arithmetic: no rounding at all."""
    return sum((Fraction(float(value)) ** 2 for value in vector), Fraction(0))


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=finite32)
    | hnp.arrays(np.float64, st.tuples(st.integers(1, 3), st.integers(1, 8)), elements=st.floats(-1e300, 1e300))
)
def test_norms_of_any_finite_row(rows: np.ndarray) -> None:
    for row, norm in zip(rows, row_norms([rows]), strict=True):
        exact = exact_norm_squared(row)
        if rows.dtype == np.float32 or exact > Fraction(2.0**-1022) ** 2:
            assert abs(Fraction(float(norm)) ** 2 - exact) <= exact * Fraction(2 * (row.size + 8), 2**53)


@pytest.mark.parametrize("rule", CLIP_RULES)
@given(
    st.sampled_from([1e-30, 1e-3, 0.1, 1.0, 3.7, 1e4, 1e30]),
    hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 12)), elements=finite32),
)
def test_the_vector_that_enters_the_sum_never_exceeds_the_bound(rule: str, bound: float, rows: np.ndarray) -> None:
    """Rounding to the grid included, in exact arithmetic."""
    unit, size = (1 if rule == "normalized" else bound) * UNIT, rows.shape[1]
    (weights,) = clip_factors([row_norms([rows])], rule, [bound], [size], [rounding_of_rows(size)], unit)
    limit = (Fraction(1 if rule == "normalized" else bound) / Fraction(unit)) ** 2
    for i, weight in enumerate(weights):
        added = np.zeros(size)
        weighted_sum([rows[i : i + 1]], [np.array([weight])], [added])
        assert (added == np.rint(added)).all()
        assert exact_norm_squared(added) <= limit


def test_rules_are_their_formulas() -> None:
    norms = np.array([0.0, 0.2, 0.5, 2.0, 100.0])
    c = 0.5
    expected = {
        "standard": np.minimum(1, c / np.maximum(norms, 1e-300)),
        "automatic": c / (norms + 0.01),
        "automatic_v": np.where(norms > 0, c / np.maximum(norms, 1e-300), 0),
        "normalized": np.minimum(1, c / np.maximum(norms, 1e-300)) / c,
        "psac": c / (norms + 0.1 / (norms + 0.1)),
    }
    assert set(expected) == set(CLIP_RULES)
    for rule, factors in expected.items():
        (got,) = clip_factors([norms], rule, [c], [7], [0.0], UNIT)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got * UNIT, factors, rtol=32 * 2.0**-53)
        assert (got * UNIT <= factors).all()
        (less,) = clip_factors([norms], rule, [c], [7], [2.0**30], UNIT)  # room for a rounding of 2^-6
        longest = 1 if rule == "normalized" else c
        shorter = np.where(factors == 1, 1, factors * (1 - 2.0**-6 / longest)) if rule == "standard" else None
        if shorter is None:
            shorter = factors * (1 - 2.0**-6 / longest)
        np.testing.assert_allclose((less * UNIT)[norms != c], shorter[norms != c], rtol=32 * 2.0**-53)
    (kept,) = clip_factors([np.array([0.0, 0.5, 1 - 1e-7])], "standard", [1.0], [10], [1.0], UNIT)
    assert (kept * UNIT == 1).all()  # short vectors are left alone


@pytest.mark.parametrize("rule", CLIP_RULES)
def test_a_grid_that_is_too_coarse_for_a_clip_norm_is_refused(rule: str) -> None:
    longest = 1.0 if rule == "normalized" else 0.01
    clip_factors([np.ones(1)], rule, [0.01], [10], [0.25 * longest / UNIT], UNIT)
    with pytest.raises(ArgumentError, match="noise_multiplier: is so large that the grid of its noise"):
        clip_factors([np.ones(1)], rule, [0.01], [10], [0.26 * longest / UNIT], UNIT)


def test_psac_weighs_most_near_the_root_of_its_constant_and_less_on_either_side() -> None:
    """The weight of the paper, 1/(N + r/(N + r)), has its maximum where N + r is the root of r."""
    peak = math.sqrt(0.1) - 0.1
    norms = np.array([0.0, peak / 2, peak, 2 * peak, 100.0])
    (weights,) = clip_factors([norms], "psac", [3.0], [7], [0.0], UNIT)
    factors = weights * UNIT
    assert factors.argmax() == 2
    assert factors[2] == pytest.approx(3.0 / (2 * math.sqrt(0.1) - 0.1), rel=1e-12)
    assert factors[0] == pytest.approx(3.0, rel=1e-12)  # not 3/r, as AUTO-S gives
    assert (np.diff(norms * factors) > 0).all()
    assert norms[-1] * factors[-1] < 3.0


@pytest.mark.parametrize("rule", CLIP_RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_row_adds_exactly_zero_in_every_group(rule: str, bad: float) -> None:
    blocks = [np.ones((3, 4), np.float32), np.ones((3, 2), np.float32)]
    blocks[1][1, 0] = bad
    factors = clip_factors([row_norms([block]) for block in blocks], rule, [1.0, 1.0], [4, 2], [1.0, 1.0], UNIT)
    out = [np.zeros(4), np.zeros(2)]
    weighted_sum(blocks, factors, out)
    kept = [block[[0, 2]] for block in blocks]
    expected = [np.zeros(4), np.zeros(2)]
    weighted_sum(kept, [factor[[0, 2]] for factor in factors], expected)
    for got, wanted in zip(out, expected, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, wanted)


def norm_of_few(values: np.ndarray) -> float:
    """The norm of many numbers of which few differ: its square is added up in rational arithmetic."""
    found = zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True)
    return math.sqrt(sum(Fraction(value) ** 2 * count for value, count in found))


def test_ten_million_entries_never_pass_where_torch_lets_them() -> None:
    """The claim of algorithms.md 11, with its contrast: torch's own float32 norm of the same row is short."""
    torch = pytest.importorskip("torch")
    row = np.full((1, 10_000_000), 0.1, np.float32)
    row[0, ::7] = 1e-3
    norms = row_norms([row])
    assert norms[0] == pytest.approx(norm_of_few(row), rel=1e-9)
    rounding = [rounding_of_rows(row.shape[1])]
    (factor,) = clip_factors([norms], "standard", [1.0], [row.shape[1]], rounding, UNIT)
    total = np.zeros(row.shape[1])
    weighted_sum([row], [factor], [total])
    assert 1 - 1e-5 < UNIT * norm_of_few(total) <= 1

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        short = float(torch.linalg.vector_norm(torch.from_numpy(row[0])))
    finally:
        torch.set_num_threads(threads)
    assert norm_of_few(np.float32(1 / short) * row[0]) > 1.0005


@pytest.mark.parametrize(
    ("clip", "bounds", "sensitivity"),
    [
        (Clip(2.0), (2.0,), 2.0),
        (Clip(2.0, groups="per_layer"), (2 / math.sqrt(2),) * 2, 2.0),
        (Clip(2.0, groups="per_tensor"), (2 / math.sqrt(3),) * 3, 2.0),
        (Clip(2.0, groups={"conv*": 3.0, "*": 4.0}), (3.0, 4.0), 5.0),
        (Clip(2.0, rule="normalized"), (2.0,), 1.0),
        (Clip(2.0, rule="normalized", groups="per_tensor"), (2 / math.sqrt(3),) * 3, math.sqrt(3)),
    ],
)
def test_groups_and_what_they_are_worth(clip: Clip, bounds: tuple[float, ...], sensitivity: float) -> None:
    grouping = clip.grouping(("conv.weight", "conv.bias", "fc.weight"))
    np.testing.assert_allclose(grouping.bounds, bounds)
    assert clip.sensitivity(grouping).contribution == pytest.approx(sensitivity)
    assert sorted(i for members in grouping.members for i in members) == [0, 1, 2]


@given(st.sampled_from(CLIP_RULES), st.sampled_from(["flat", "per_layer", "per_tensor"]), st.integers(0, 2**32 - 1))
def test_the_sensitivity_object_bounds_every_example(rule: str, groups: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    clip = Clip(0.7, rule, groups)
    grouping = clip.grouping(("a.w", "a.b", "c.w"))
    blocks = [(rng.normal(size=(5, d)) * 10 ** rng.uniform(-3, 3)).astype(np.float32) for d in (6, 2, 9)]
    norms = [row_norms([blocks[i] for i in members]) for members in grouping.members]
    sizes = [sum(blocks[i].shape[1] for i in members) for members in grouping.members]
    factors = clip_factors(norms, rule, grouping.bounds, sizes, list(map(rounding_of_rows, sizes)), UNIT)
    squares = np.zeros(5)
    for members, factor in zip(grouping.members, factors, strict=True):
        for i in members:
            squares += np.square(np.rint(factor[:, None] * blocks[i])).sum(axis=1)
    assert UNIT * np.sqrt(squares).max() <= clip.sensitivity(grouping).contribution


def test_a_clip_of_the_callers_own_claims_no_less_than_its_rule_leaves() -> None:
    class Claims(Clip):
        def sensitivity(self, grouping: Grouping) -> Sensitivity:
            return Sensitivity(claim)

    plan = Plan(dp_sgd(lr=0.1, noise_multiplier=1.0), PoissonSampler(dataset_size=10, batch_size=2), 3)
    for rule, claim, allowed in (("standard", 2.0, True), ("standard", 1.99, False), ("normalized", 0.9, False)):
        own = replace(plan, method=replace(plan.method, clip=Claims(2.0, rule)))
        if allowed:
            assert own.sensitivity_at().contribution == claim
        else:
            refused(PrivacyError, "clip=Claims: says .* at most", own.sensitivity_at)
