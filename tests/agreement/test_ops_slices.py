"""Layers of one position by factors of two bytes: the integers of the reference, and no example above its norm."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpcore.errors import ArgumentError
from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import LARGEST_FACTOR, WIDEST_SLICED, multiple_of, rounding_of_slices
from dpcore.spec.pair_ops import LinearPairs
from dpcore.stages.clipping.blocks import Linear, Rows
from dpcore.stages.clipping.clip import Grouping
from dpcore.stages.clipping.clipped_sum import add_clipped, add_sums
from dpcore_numpy import slices as reference
from dpcore_numpy.slices import add_slices, sliced_factors
from tests.depth import chosen
from tests.refused import refused

pytest.importorskip("triton")

import torch

from dpcore_triton import chips, linear, slices
from dpcore_triton.graphs import Graphs
from dpcore_triton.launch import INTERPRETED, jit

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SPECIAL = np.float32([0, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, 1.0])
C = 2.0**36
# Across the edges of tiles and of what is multiplied at once (64), and of a program's columns (256, or 1,024).
widths = st.sampled_from([1, 7, 8, 63, 64, 65, 255, 257, 1025])
batches = st.sampled_from([1, 2, 63, 65])
kinds = st.sampled_from(
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")]
)
bounds = st.sampled_from([1.0, 2.0**30, C, 1e11, 2.0**48])
tiles = st.sampled_from(["L4", "H200"])  # of 64 rows, and of 128


@pytest.fixture(scope="module", autouse=True)
def chip() -> Any:
    """Let a chip be there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "chip_of", lambda device: chips.CHIPS["L4"])
        yield


def rows(rng: Any, examples: int, width: int) -> Any:
    """Rows of sizes from 1e-30 to 1e30, some with special numbers, some of zeros, some with one number."""
    found = rng.normal(size=(examples, width)) * 10.0 ** rng.uniform(-30, 30, (examples, 1))
    kind = rng.integers(0, 6, examples)
    found[kind == 0] = rng.choice(SPECIAL, (examples, width))[kind == 0]
    found[kind == 1] = 0
    found[kind == 2, 1:] = 0
    found[kind == 3] *= 1e-12
    return np.float32(found)


def numbers(*tensors: torch.Tensor) -> list[Any]:
    return [tensor.float().cpu().numpy() for tensor in tensors]


def weights_of(rng: Any, a: Any, e: Any, longest: float) -> Any:
    """Weights that bring examples to the bound, or anywhere below it, of either sign; some are 0."""
    lengths = np.linalg.norm(np.float64(a), axis=1) * np.linalg.norm(np.float64(e), axis=1)
    share = np.where(rng.random(len(a)) < 0.5, 1 - 1e-12, rng.random(len(a)) ** 8)
    share *= rng.choice([1, -1, 0], len(a), p=[0.6, 0.3, 0.1])
    with np.errstate(divide="ignore", over="ignore"):
        return np.where(lengths > 0, np.minimum(longest / lengths, 1e300), 1.0) * share


def summed(a: torch.Tensor, e: torch.Tensor, point: float, weights: Any, longest: float) -> Any:
    backend = load_backend("triton")
    out = backend.from_numpy(np.zeros(a.shape[1] * e.shape[1]))
    layer = LinearPairs([a[:, None]], [e[:, None]], [point])
    backend.linear_sums([layer], [backend.from_numpy(weights)], [out], None, [longest])
    return backend.to_numpy(out).reshape(e.shape[1], a.shape[1])


@given(st.integers(0, 2**32 - 1), batches, widths, widths, kinds, bounds, st.sampled_from([1.0, -3.7]), tiles)
@example(1, 65, 257, 65, ("float32", "float32"), C, -3.7, "L4")
@example(2, 2, 8, 1025, ("bfloat16", "bfloat16"), 2.0**48, 1.0, "L4")
@example(3, 65, 65, 129, ("bfloat16", "bfloat16"), C, 1.0, "H200")
@settings(max_examples=chosen(8, 200))
def test_the_kernels_add_the_integers_of_the_reference(
    seed: int, examples: int, p: int, q: int, kind: tuple[str, str], longest: float, point: float, name: str
) -> None:
    rng, backend = np.random.default_rng(seed), load_backend("triton")
    a, e = (
        backend.from_numpy(rows(rng, examples, n)).to(getattr(torch, own)).nan_to_num(0, 6e4, -6e4)
        for n, own in zip((p, q), kind, strict=True)
    )
    if kind[1] == "bfloat16":  # whose denormal numbers Triton's interpreter reads as others
        a, e = (side * (side.abs() >= 2.0**-126) for side in (a, e))
    if seed % 2:  # no arrays of their own: some columns of wider ones
        a, e = (torch.nn.functional.pad(side, (0, 3))[:, :-3] for side in (a, e))
    x, y = numbers(a, e)
    weights = weights_of(rng, x, y, longest) / point
    expected = np.zeros((q, p))
    add_slices(x, y, weights * point, expected, longest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear, "chip_of", lambda device: chips.CHIPS[name])
        np.testing.assert_array_equal(summed(a, e, point, weights, longest), expected)


def whole(factors: Any) -> list[list[int]]:
    return [[int(number) for number in row] for row in factors]


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 20), st.integers(1, 20), bounds)
@settings(max_examples=chosen(30, 500))
def test_the_integers_are_those_of_a_loop_and_no_longer_than_the_vector_and_its_room(
    seed: int, examples: int, p: int, q: int, longest: float
) -> None:
    """In whole numbers and fractions of Python; and near the vector where `contributions` says."""
    rng = np.random.default_rng(seed)
    a, e = rows(rng, examples, p), rows(rng, examples, q)
    weights = weights_of(rng, a, e, longest)
    x, y = map(whole, sliced_factors(a, e, weights, longest))
    multiple, out = multiple_of(longest), np.zeros((q, p))
    add_slices(a, e, weights, out, longest)
    for r in range(q):
        for c in range(p):
            assert out[r, c] == multiple * sum(x[i][c] * y[i][r] for i in range(examples))
    for i in range(examples):
        of_factors = sum(n * n for n in x[i]) * sum(n * n for n in y[i]) * multiple**2
        of_vector = Fraction(weights[i]) ** 2
        for side in (a, e):
            of_vector *= sum(Fraction(float(n)) ** 2 for n in side[i])
        length = Fraction(isqrt(int(of_vector * 4**64)), 2**64)  # a little below that of the vector
        assert of_factors <= (length + Fraction(rounding_of_slices(q, longest))) ** 2
        assert max(map(abs, [*x[i], *y[i]])) <= LARGEST_FACTOR
        ideal = weights[i] * np.float64(e[i])[:, None] * np.float64(a[i])
        own = multiple * np.float64(y[i])[:, None] * np.float64(x[i])
        assert np.linalg.norm(own - ideal) <= (p**0.5 + 2 * q**0.5) * multiple * LARGEST_FACTOR


# So many equal numbers become factors that are all rounded up by nearly a half.
ROUNDED_UP = next(p for p in range(1000, 3000) if 0.5 < LARGEST_FACTOR / p**0.5 % 1 < 0.51)


def test_no_example_whose_numbers_are_all_rounded_up_is_longer_than_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand, of equal positive numbers, by a hash that is 0; then those whose a is rounded up, too."""
    monkeypatch.setattr(reference, "hashed", np.zeros_like)
    rng, shares = np.random.default_rng(7), list[Any]()
    for q, p, count in [(q, p, 10_000) for q in (1, 2, 3, 16, 200) for p in (1, 5)] + [(200, ROUNDED_UP, 1000)]:
        longest = C * 2.0 ** -rng.integers(0, 12)
        a = np.float32(rng.normal(size=(count, p)) if p < 1000 else rng.choice([-1, 1], (count, p)))
        e = np.float32(rng.uniform(1, 1000, (count, 1)) * np.ones(q))
        one, other = (np.linalg.norm(np.float64(side), axis=1) for side in (a, e))
        # |a'| is about `LARGEST_FACTOR`, so that e' is about e.
        weights = other * multiple_of(longest) * LARGEST_FACTOR / (one * other)
        x, y = (np.sqrt(np.square(side).sum(axis=1)) for side in sliced_factors(a, e, weights, longest))
        assert (multiple_of(longest) * x * q**0.5 <= rounding_of_slices(q, longest)).all()
        shares.append(multiple_of(longest) * x * (y - q**0.5) / (weights * one * other))
        if p > 1000:
            assert x.min() > LARGEST_FACTOR * (1 + 2.0**-12)
    share = np.concatenate(shares)
    assert len(share) == 101_000
    assert share.max() <= 1 + 1e-12  # of what float64 rounds here
    assert (share > 1 - 1e-4).sum() > 100
    assert (shares[-1] > 1 - 1e-4).sum() > 10


@pytest.mark.skipif(not INTERPRETED, reason="a compiled kernel takes no other hash")
@pytest.mark.parametrize("rule", ["standard", "normalized"])
def test_the_clip_leaves_room_for_numbers_that_are_all_rounded_up(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setattr(slices, "hashed", jit(_zeros))
    backend, unit, size = load_backend("triton"), 2.0**-36, 9 * 65
    a, e = (backend.from_numpy(np.full((1, 1, n), 1.0, np.float32)) for n in (9, 65))
    out = backend.from_numpy(np.zeros(size))
    grouping = Grouping(("a",), ((0,),), (0.5,))
    add_clipped(backend, [Linear((a,), (e,), (1.0,))], rule, grouping, [size], unit, [out], [None], add_sums)
    longest = 1.0 if rule == "normalized" else 0.5
    assert 0.999 * longest < np.linalg.norm(backend.to_numpy(out)) * unit <= longest


def _zeros(x, column):  # type: ignore[no-untyped-def]
    return x * 0


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_is_not_finite_in_one_example_changes_that_one_only(kind: str) -> None:
    rng, backend = np.random.default_rng(3), load_backend("triton")
    a, e = (backend.from_numpy(np.float32(rng.normal(size=(70, n)))).to(getattr(torch, kind)) for n in (9, 70))
    weights = np.full(70, C / 40)
    weights[5] = 0
    without = summed(a, e, 1.0, weights, C)
    for value, side in ((np.nan, a), (np.inf, e), (-np.inf, a)):
        a[5], e[5] = 1.0, 1.0
        side[5, 8] = value
        np.testing.assert_array_equal(summed(a, e, 1.0, weights, C), without)  # not read
        # Of a norm that is not finite no clip makes another weight than 0; such an example adds nothing anyway.
        np.testing.assert_array_equal(summed(a, e, 1.0, np.where(np.arange(70) == 5, 3.0, weights), C), without)


def test_many_examples_have_one_sum_in_any_order_and_batches() -> None:
    """More than a program takes, each as large as it may be, and all of one sign: no 32-bit integer overflows."""
    backend, examples = load_backend("triton"), slices.BATCH.value + 100
    assert 2 * slices.BATCH.value * 127 * 128 < 2**31
    a = backend.from_numpy(np.float32(np.ones((examples, 1))))
    e = backend.from_numpy(np.float32(np.linspace(0.9, 1, examples))[:, None].copy())
    weights = np.full(examples, C * (1 - 1e-9))
    found, expected = summed(a, e, 1.0, weights, C), np.zeros((1, 1))
    x, y = sliced_factors(*numbers(a, e), weights, C)
    assert x.min() > 0.99 * LARGEST_FACTOR
    add_slices(*numbers(a, e), weights, expected, C)
    assert found == expected
    assert found == multiple_of(C) * sum(int(n) * int(m) for n, m in zip(x[:, 0], y[:, 0], strict=True))
    order = np.random.default_rng(1).permutation(examples)
    apart = 0.0
    for first, last in pairwise([0, 65, examples]):
        some = order[first:last]
        place = backend.from_numpy(some)
        apart = apart + summed(a[place], e[place], 1.0, weights[some], C)
    assert found == apart


@pytest.mark.parametrize(("rule", "groups"), [("standard", ((0, 1, 2),)), ("normalized", ((0,), (1, 2)))])
def test_an_example_of_several_layers_moves_the_sum_by_the_clip_norm_at_most(
    monkeypatch: pytest.MonkeyPatch, rule: str, groups: Any
) -> None:
    """Two layers and a bias by rows, clipped together or apart; then the sum of all, with graphs as without, and the
    same by float64 products, but for what factors round.
    """
    rng, backend = np.random.default_rng(8), load_backend("triton")
    sides = [np.float32(rng.normal(size=(5, 1, n)) * 10.0 ** rng.uniform(-1, 2, (5, 1, 1))) for n in (70, 9, 9, 65, 65)]
    sides[0][1], sides[1][3, 0, 2] = 0, np.nan
    unit, sizes, limits = 2.0**-36, (630, 585, 65), (0.5, 0.7)[: len(groups)]
    grouping = Grouping(("a", "b")[: len(groups)], groups, limits)
    counts = [sum(sizes[i] for i in members) for members in groups]
    a, e, b, f, g = map(backend.from_numpy, sides)

    def added(port: Any, chosen: Any, repeated: int = 0) -> list[Any]:
        blocks = [
            Linear((a[chosen],), (e[chosen],), (1.0,)),
            Linear((b[chosen],), (f[chosen],), (1.0,)),
            Rows(g[chosen][:, 0]),
        ]
        out = [backend.from_numpy(np.zeros(size)) for size in sizes]
        arguments = port, blocks, rule, grouping, counts, unit, out, [None] * 3, add_sums
        for _ in range(repeated or 1):
            port.repeat(add_clipped, *arguments) if repeated else add_clipped(*arguments)
        return [backend.to_numpy(own) for own in out]

    total = [np.zeros(size) for size in sizes]
    for i in range(5):
        own = added(backend, slice(i, i + 1))
        for members, limit in zip(groups, (1.0,) * 2 if rule == "normalized" else limits, strict=False):
            length = np.linalg.norm(np.concatenate([own[place] for place in members])) * unit
            assert length <= limit
        total = [one + other for one, other in zip(total, own, strict=True)]
    assert all(np.abs(one).max() > 0 for one in total)
    for one, other in zip(total, added(backend, slice(None)), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(total, added(Graphs(backend), slice(None), repeated=3), strict=True):
        np.testing.assert_array_equal(3 * one, other)
    monkeypatch.setattr(linear, "chip_of", lambda device: None)
    for one, other in zip(total, added(backend, slice(None)), strict=True):
        assert np.linalg.norm(one - other) <= 5 * 2.0**-10 / unit  # of factors, of examples of length 1 at most


def test_the_way_follows_from_shapes_chip_and_whether_the_sum_has_a_bound() -> None:
    def found(chip: str | None, p: int, q: int, time: int = 1, **options: bool) -> str:
        a, e = (torch.empty((2, time, width), device="meta") for width in (p, q))
        given_ = {"scaled": False, "sliced": True, **options}
        return linear.way_of(LinearPairs([a], [e], [1.0]), chip and chips.CHIPS[chip], **given_)

    assert {found(chip, 768, 3072) for chip in chips.CHIPS} == {"slices"}
    assert found("H200", 768, 3072, sliced=False) == found(None, 768, 3072) == "one"
    assert found("H200", 768, 3072, scaled=True) == "tiles"
    assert "core" in found("H200", 768, 3072, time=64)
    assert found("H200", WIDEST_SLICED + 1, 768) == found("H200", 768, 0) == "one"


def test_bounds_are_one_positive_number_for_each_layer() -> None:
    backend = load_backend("triton")
    a, weights = backend.from_numpy(np.zeros((2, 1, 3), np.float32)), backend.from_numpy(np.ones(2))
    for longest, words in (([1.0, 1.0], "longest"), ([0.0], "longest=0.0: must be greater than 0")):
        out = backend.from_numpy(np.zeros(9))
        refused(
            ArgumentError, words, backend.linear_sums, [LinearPairs([a], [a], [1.0])], [weights], [out], None, longest
        )


@pytest.mark.parametrize(("share", "off"), [(1.0, 1e-4), (1e-2, 1e-3), (1e-3, 5e-3), (1e-4, 0.05), (1e-5, 0.1)])
def test_small_parts_of_examples_arrive(share: float, off: float) -> None:
    """Of the sum of parts of this share of the clip norm nothing is lost but by chance."""
    rng = np.random.default_rng(0)
    a, e = (rng.standard_normal((64, width)).astype(np.float32) for width in (256, 1024))
    weights = share * 2.0**36 / (np.linalg.norm(a, axis=1) * np.linalg.norm(e, axis=1)).astype(np.float64)
    found = np.zeros((1024, 256))
    add_slices(a, e, weights, found, 2.0**36)
    meant = (e * weights[:, None]).T @ a.astype(np.float64)
    arrives = (found * meant).sum() / (meant * meant).sum()
    assert arrives == pytest.approx(1, abs=off)
