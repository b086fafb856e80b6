"""Pairs of activations and output gradients: each norm bounds what the sum really adds, each sum is the true one.

The reference is a loop in `numpy.longdouble`: 64 bits of mantissa, and exponents that no product here leaves.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from one_layer import linear_norms, linear_sum
from tensors import OnTensors

import dpcore_numpy
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.contributions import CANCELLATION, FACTOR_BITS, rounding_of_linear, rounding_of_rows
from dpcore.spec.ops import CLIP_RULES
from tests.refused import refused

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="no wider type to compare with")

backend: Any = dpcore_numpy


@pytest.fixture(scope="module", params=["numpy", "torch"], autouse=True)
def both(request: pytest.FixtureRequest) -> Iterator[None]:
    """All tests run on the reference and on the CPU backend, which shares its bounds and not its products."""
    global backend
    backend = dpcore_numpy if request.param == "numpy" else OnTensors("torch")
    yield
    backend = dpcore_numpy


Array = np.ndarray[Any, Any]
Long = np.longdouble
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(["float32", "float64"])
# "spread": rows from denormals to the largest numbers. "near": parts at points next to each other, with weights w and
# 1 - w, as in DiSK.
kinds = st.sampled_from(["benign", "benign", "spread", "tiny", "huge", "near"])
widths = st.sampled_from([1, 2, 5, 16, 33])
times = st.one_of(st.lists(st.integers(0, 20), min_size=1, max_size=3), st.just([1]), st.just([24]), st.just([20, 20]))
LARGEST = {"float32": 3e38, "float64": 1e140}
SMALLEST = {"float32": 1e-45, "float64": 1e-140}


class Pairs(NamedTuple):
    """Arguments of the operations, on parts of one kind."""

    inputs: list[Array]
    gradients: list[Array]
    weights: list[float]


def rows(rng: np.random.Generator, kind: str, dtype: str, shape: tuple[int, ...]) -> Array:
    """Rows of the sizes that `kind` says."""
    low, high = np.log10(SMALLEST[dtype]), np.log10(LARGEST[dtype])
    exponent = {"spread": rng.uniform(low, high, (*shape[:-1], 1)), "tiny": low + 4, "huge": high - 0.7}.get(kind, 0.0)
    values = np.clip(rng.normal(size=shape), -3, 3) * 10.0 ** np.asarray(exponent)
    return np.clip(values, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)


def pairs(rng: np.random.Generator, kind: str, dtype: str, times: list[int], examples: int, p: int, q: int) -> Pairs:
    """Random parts."""
    if kind != "near":
        weights = [float(rng.choice([1.0, -0.3, 7.0, 1000.0])) for _ in times]
        return Pairs(*([rows(rng, kind, dtype, (examples, t, n)) for t in times] for n in (p, q)), weights)
    times = [times[0], times[0]]
    first = [rows(rng, kind, dtype, (examples, times[0], n)) for n in (p, q)]
    distance = rng.choice([1e-2, 1e-4, 1e-6])
    second = [(x * (1 + distance * rng.normal(size=x.shape))).astype(dtype) for x in first]
    weight = float(rng.choice([0.857, 10.0, 1000.0]))
    return Pairs([first[0], second[0]], [first[1], second[1]], [weight, 1 - weight])


def linear(one: Pairs, scale: Array | None = None) -> tuple[Array, Array]:
    """Every example's vector and the sums of its terms' sizes: (B, q p), in long doubles."""
    examples, p, q = len(one.inputs[0]), one.inputs[0].shape[2], one.gradients[0].shape[2]
    total, terms = np.zeros((examples, q, p), Long), np.zeros((examples, q, p), Long)
    for a, e, weight in zip(one.inputs, one.gradients, one.weights, strict=True):
        for t in range(a.shape[1]):
            product = Long(weight) * e[:, t, :, None].astype(Long) * a[:, t, None, :].astype(Long)
            total += product
            terms += np.abs(product)
    factor = np.ones(q * p, Long) if scale is None else scale.astype(Long)
    return total.reshape(examples, -1) * factor, terms.reshape(examples, -1) * np.abs(factor)


def embedding(
    indices: list[Array], gradients: list[Array], weights: list[float], size: int, scale: Array | None = None
):
    """The same of an embedding: (B, size q)."""
    examples, q = len(indices[0]), gradients[0].shape[2]
    total, terms = np.zeros((examples, size, q), Long), np.zeros((examples, size, q), Long)
    for index, e, weight in zip(indices, gradients, weights, strict=True):
        for i, t in np.ndindex(*index.shape):
            if index[i, t] >= 0:
                total[i, index[i, t]] += Long(weight) * e[i, t].astype(Long)
                terms[i, index[i, t]] += np.abs(Long(weight) * e[i, t].astype(Long))
    factor = np.ones(size * q, Long) if scale is None else scale.astype(Long)
    return total.reshape(examples, -1) * factor, terms.reshape(examples, -1) * np.abs(factor)


def norm(vector: Array) -> Any:
    """Euclidean norm in long doubles, over the last axis."""
    return np.sqrt(np.square(vector.astype(Long)).sum(axis=-1))


class Promise(NamedTuple):
    """What is promised beyond the bound itself."""

    rounding: float  # how far rounding to integers moves what an example adds
    loose: float  # the share of its terms' square that a norm's square may be too large by, for benign arrays
    coarse: Any = 0.0  # (B,): what underflows, where sizes of rows lie further apart than float32 reaches
    least: Any = 0.0  # (B,): norms may be as large


def linear_promise(one: Pairs, exact: bool) -> Promise:
    """In float32 products are relative to the largest entries of either side."""
    rows = sum(part.shape[1] for part in one.inputs)
    rounding = rounding_of_linear(one.gradients[0].shape[2], one.inputs[0].shape[2], rows)
    if exact or one.inputs[0].dtype == np.float64:
        return Promise(rounding, LOOSE[type(backend) is OnTensors])
    sizes = [np.max([np.abs(x).max(axis=(1, 2), initial=0) for x in side], axis=0).astype(Long) for side in one[:2]]
    return Promise(rounding, 1e-3, 1e-34 * sizes[0] * sizes[1] * np.abs(one.weights).max())


# The reference forms every product; torch adds few rows by factors, whose rounding is in the norm.
LOOSE = {False: 1e-11, True: 4 * 2.0**-FACTOR_BITS * 33**0.5}


def check(norms: Array, true: tuple[Array, Array], add: Any, kind: str, promise: Promise) -> None:
    """Hold every promise about one tensor; `add` takes weights and an output."""
    vectors, terms = true
    examples, size = vectors.shape
    assert norms.shape == (examples,)
    assert norms.dtype == np.float64
    assert np.isfinite(norms).all()
    finest = 4 * np.finfo(np.longdouble).eps
    coarse, least = np.broadcast_to(promise.coarse, examples), np.broadcast_to(promise.least, examples)
    weights = 2.0**36 / np.where(norms > 0, norms, 1.0)

    def alone(i: int, weight: float) -> Array:
        """What an example adds by itself."""
        found = np.zeros(size)
        add(np.where(np.arange(examples) == i, weight, 0.0), found)
        assert (found == np.rint(found)).all()
        return found

    every = [alone(i, weight) for i, weight in enumerate(weights)]
    for i, (own, weight) in enumerate(zip(every, weights.astype(Long), strict=True)):
        assert norm(own) <= (weight * norms[i] + promise.rounding) * (1 + finest)
        of_factors = 2.0**-FACTOR_BITS * size**0.5 * weight * terms[i].sum()
        off = weight * (1e-5 * terms[i] + coarse[i]) + promise.rounding + of_factors
        assert (np.abs(own - weight * vectors[i]) <= off).all()
        if kind == "benign":
            assert norms[i] ** 2 <= max(norm(vectors[i]), least[i]) ** 2 + promise.loose * norm(terms[i]) ** 2
    for rule in CLIP_RULES:
        bound = 0.37
        unit, longest = bound * 2.0**-36, 1 if rule == "normalized" else bound
        (given_,) = backend.clip_factors([norms], rule, [bound], [size], [promise.rounding], unit)
        for i in range(examples):
            assert norm(alone(i, given_[i])) * Long(unit) <= longest
    # All together, on top of what is there: exactly the sum, in whatever order.
    out = np.rint(np.linspace(-(2.0**40), 2.0**40, size))
    expected = out + np.sum(every, axis=0)
    add(weights, out)
    np.testing.assert_array_equal(out, expected)


@settings(max_examples=max(30, settings().max_examples))
@given(seeds, kinds, dtypes, times, widths, widths, st.booleans(), st.booleans(), st.booleans())
def test_a_linear_norm_bounds_what_the_sum_adds(
    seed: int, kind: str, dtype: str, times: list[int], p: int, q: int, scaled: bool, gram: bool, exact: bool
):
    rng = np.random.default_rng(seed)
    one = pairs(rng, kind, dtype, times, 3, p, q)
    scale = (10.0 ** rng.uniform(-6, 6, p * q)).astype(dtype) if scaled else None
    norms = linear_norms(backend, *one, scale=scale, gram=gram, exact=exact)

    def add(weights: Array, out: Array) -> None:
        linear_sum(backend, *one, weights, out, scale=scale, exact=exact)

    # Of few rows a norm is at least `CANCELLATION` of the terms' size, twice: they share a product. With a scale, that
    # size is a bound by Cauchy and Schwarz, up to sqrt(T) too large.
    floor = np.array([norm(terms) for terms in linear(one, scale)[1]]) * max(2, sum(times) ** 0.5) * CANCELLATION
    promise = linear_promise(one, exact)._replace(least=floor)
    if scale is not None:
        promise = promise._replace(coarse=promise.coarse * scale.max())
    check(norms, linear(one, scale), add, kind, promise)


@given(seeds, kinds, dtypes, times, widths, st.sampled_from([1, 3, 50]), st.booleans())
def test_an_embedding_norm_bounds_what_the_sum_adds(
    seed: int, kind: str, dtype: str, times: list[int], q: int, size: int, scaled: bool
):
    rng = np.random.default_rng(seed)
    _, gradients, weights = pairs(rng, kind, dtype, times, 3, 1, q)
    indices = [rng.integers(-1, size, e.shape[:2]) for e in gradients]
    scale = (10.0 ** rng.uniform(-6, 6, size * q)).astype(dtype) if scaled else None
    for index, e in zip(indices, gradients, strict=True):
        e[(index < 0) & (rng.random(index.shape) < 0.5)] = np.nan  # what belongs to padding is nobody's
    norms = backend.embedding_norms(indices, gradients, weights, size, scale=scale)

    def add(weights_: Array, out: Array) -> None:
        backend.embedding_sum(indices, gradients, weights, weights_, out, scale=scale)

    promise = Promise(rounding_of_rows(size * q), 1e-11)
    check(norms, embedding(indices, gradients, weights, size, scale), add, kind, promise)


@given(seeds, kinds, dtypes, times, times, widths, st.sampled_from([1, 3, 50]), st.booleans())
def test_the_norm_of_a_tied_matrix_bounds_what_both_sums_add(
    seed: int, kind: str, dtype: str, first: list[int], second: list[int], p: int, size: int, exact: bool
):
    rng = np.random.default_rng(seed)
    _, tokens, token_weights = pairs(rng, kind, dtype, first, 3, 1, p)
    indices = [rng.integers(-1, size, e.shape[:2]) for e in tokens]
    one = pairs(rng, kind, dtype, second, 3, p, size)
    if kind != "benign" and rng.random() < 0.5:  # parts that nearly cancel: the head's first token against its own row
        one = Pairs([np.abs(a) for a in one.inputs], [np.abs(e) for e in one.gradients], one.weights)
        tokens = [-np.abs(e) for e in tokens]
    norms = backend.tied_norms(indices, tokens, token_weights, *one, size, exact=exact)
    (e, e_terms), (h, h_terms) = embedding(indices, tokens, token_weights, size), linear(one)
    floor = CANCELLATION * (norm(e) + norm(h))
    assert (norms >= floor).all()

    def add(weights: Array, out: Array) -> None:
        backend.embedding_sum(indices, tokens, token_weights, weights, out)
        linear_sum(backend, *one, weights, out, exact=exact)

    promise = linear_promise(one, exact)
    promise = promise._replace(least=floor, rounding=promise.rounding + rounding_of_rows(size * p))
    check(norms, (e + h, e_terms + h_terms), add, kind, promise)


@given(seeds, kinds, dtypes, times, widths, st.sampled_from([1, 3, 50]))
def test_the_norm_of_a_table_beside_rows_bounds_what_both_sums_add(
    seed: int, kind: str, dtype: str, lengths: list[int], p: int, size: int
):
    rng = np.random.default_rng(seed)
    _, tokens, weights = pairs(rng, kind, dtype, lengths, 3, 1, p)
    indices = [rng.integers(-1, size, e.shape[:2]) for e in tokens]
    e, e_terms = embedding(indices, tokens, weights, size)
    head = rows(rng, kind, dtype, (3, size * p))
    if kind != "benign" and rng.random() < 0.5:  # parts that nearly cancel
        head = np.clip(-e, -LARGEST[dtype], LARGEST[dtype]).astype(dtype)
    for index, gradient in zip(indices, tokens, strict=True):
        gradient[index < 0] = np.nan
    norms = backend.tied_row_norms(indices, tokens, weights, head, size)
    floor = CANCELLATION * (norm(e) + norm(head))
    assert (norms >= floor).all()

    def add(factors: Array, out: Array) -> None:
        backend.embedding_sum(indices, tokens, weights, factors, out)
        backend.weighted_sum([head], [factors], [out])

    promise = Promise(2 * rounding_of_rows(size * p), 1e-11, least=floor)
    check(norms, (e + head, e_terms + np.abs(head).astype(Long)), add, kind, promise)


def benign(seed: int, times: list[int], examples: int, p: int, q: int, weights: list[float]) -> Pairs:
    """Float32 parts with these weights."""
    rng = np.random.default_rng(seed)
    return pairs(rng, "benign", "float32", times, examples, p, q)._replace(weights=weights)


@pytest.mark.parametrize(("times", "exact"), [([1], False), ([3], False), ([24], False), ([12, 13], True)])
@pytest.mark.parametrize("scaled", [False, True])
def test_matrices_of_several_tiles(times: list[int], exact: bool, scaled: bool):
    one = benign(1, times, 2, 300, 140, [-0.5, 2.0][: len(times)])
    scale = np.linspace(0.1, 9, 300 * 140, dtype=np.float32) if scaled else None

    def add(weights: Array, out: Array) -> None:
        linear_sum(backend, *one, weights, out, scale=scale, exact=exact)

    for gram in (False, True):
        norms = linear_norms(backend, *one, scale=scale, gram=gram, exact=exact)
        check(norms, linear(one, scale), add, "benign", linear_promise(one, exact))


@pytest.mark.parametrize(("times", "examples"), [([1], 1100), ([1, 2], 400), ([24], 70)])
def test_sums_are_the_same_in_any_order_and_any_micro_batches(times: list[int], examples: int):
    one = benign(2, times, examples, 4, 3, [0.5, -2.0][: len(times)])
    vectors, _ = linear(one)
    norms = linear_norms(backend, *one)
    np.testing.assert_allclose(norms, norm(vectors).astype(float), rtol=1e-3)
    assert (norms >= norm(vectors)).all()
    weights, out = 2.0**36 * np.linspace(-1, 1, examples) / norms, np.zeros(12)
    linear_sum(backend, *one, weights, out)
    true = weights.astype(Long) @ vectors
    assert (np.abs(out - true) <= 1e-3 * np.abs(weights) @ norms + examples * rounding_of_linear(3, 4)).all()
    order, again = np.random.default_rng(0).permutation(examples), np.zeros(12)
    for chosen in np.array_split(order, [1, examples // 3]):
        some = Pairs(*([part[chosen] for part in side] for side in one[:2]), one.weights)
        linear_sum(backend, *some, weights[chosen], again)
    np.testing.assert_array_equal(again, out)


def test_examples_that_cancel_do_not_leave_the_integers():
    """Terms a million times as large as the vectors would be beyond 2^53."""
    rng, bound = np.random.default_rng(3), 2.0**40
    a = rng.normal(size=(256, 1, 3)).astype(np.float32)
    e = rng.normal(size=(256, 1, 2)).astype(np.float32)
    near = (e * (1 + 1e-6 * rng.normal(size=e.shape))).astype(np.float32)
    one = Pairs([a, a], [e, near], [1e7, 1 - 1e7])
    weights = bound / linear_norms(backend, *one, exact=True)
    together, alone = np.zeros(6), np.zeros((256, 6))
    linear_sum(backend, *one, weights, together, exact=True)
    for i in range(256):
        linear_sum(backend, *one, np.where(np.arange(256) == i, weights, 0), alone[i], exact=True)
    assert together.astype(np.int64).tolist() == alone.astype(np.int64).sum(axis=0).tolist()
    assert (norm(alone) <= bound + rounding_of_linear(2, 3)).all()
    assert norm(alone).max() > bound / 2, "norms far above the vectors clip them to nothing"


@pytest.mark.parametrize("time", [1, 3])
def test_factors_that_all_round_up_make_no_example_longer_than_the_clip_norm(time: int):
    """Equal gradients on a coarse grid: every factor is rounded by nearly 1/2 in the same direction."""
    q = 64
    one = Pairs([np.ones((1, time, 1), np.float32)], [np.ones((1, time, q), np.float32)], [1.0])
    norms, rounding = linear_norms(backend, *one), rounding_of_linear(q, 1, time)
    longest = 0.0
    for steps in np.linspace(2.1, 9, 300):  # of the grid, in each factor of a gradient
        unit = 1 / (steps * 2.0**FACTOR_BITS * q**0.5 * time)
        (weights,) = backend.clip_factors([norms], "standard", [1.0], [q], [rounding], unit)
        alone = np.zeros(q)
        linear_sum(backend, *one, weights, alone)
        longest = max(longest, float(norm(alone)) * unit)
    assert 0.9 < longest <= 1


@pytest.mark.parametrize("gram", [False, True])
def test_float32_norms_hold_where_points_cancel(gram: bool):
    for seed in range(20):
        one = pairs(np.random.default_rng(seed), "near", "float32", [13], 4, 5, 6)
        norms = linear_norms(backend, *one, gram=gram)
        for i in range(4):
            alone = np.zeros(30)
            linear_sum(backend, *one, 2.0**36 / norms * (np.arange(4) == i), alone)
            assert norm(alone) <= 2.0**36 + rounding_of_linear(6, 5)


def test_what_cancels_keeps_the_share_that_sums_rely_on():
    by_factors = backend is not dpcore_numpy  # the reference forms each product
    ones = [np.ones((1, 1, 1), np.float32)]
    index = [np.zeros((1, 1), np.int64)]
    assert backend.tied_norms(index, ones, [-1.0], ones, ones, [1.0], 1)[0] >= 2 * CANCELLATION
    assert backend.tied_row_norms(index, ones, [-1.0], np.ones((1, 1), np.float32), 1)[0] >= 2 * CANCELLATION
    twice = linear_norms(backend, ones * 2, ones * 2, [1.0, -1.0])
    assert (twice[0] >= 2 * CANCELLATION) == by_factors
    none = [np.zeros((1, 1, 1), np.float32)]
    assert (
        backend.tied_norms(index, none, [1.0], ones * 2, ones * 2, [1.0, -1.0], 1)[0] >= by_factors * 2 * CANCELLATION
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("times", [[1], [3], [24], [12, 14]])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_has_no_finite_norm_and_no_part_in_a_sum(value: float, times: list[int], side: int):
    one = benign(4, times, 3, 5, 6, [0.5, -2.0][: len(times)])
    clean, weights = np.zeros((2, 30)), np.array([0.7, 0, 1]) * 2.0**30
    for exact in (False, True):
        linear_sum(backend, *one, weights, clean[int(exact)], exact=exact)
    one[side][-1][1, -1, 2] = value
    one[1 - side][-1][1, -1] = 0
    scale = np.linspace(1, 2, 30, dtype=np.float32)
    for exact in (False, True):
        for options in ({}, {"gram": True}, {"scale": scale}):
            norms = linear_norms(backend, *one, exact=exact, **options)
            assert np.isfinite(norms).tolist() == [True, False, True]
        out = np.zeros(30)
        linear_sum(backend, *one, weights, out, exact=exact)
        np.testing.assert_array_equal(out, clean[int(exact)])
    indices = [np.full(e.shape[:2], 1) for e in one.gradients]
    if side == 1:
        assert np.isfinite(backend.embedding_norms(indices, *one[1:], 2)).tolist() == [True, False, True]
        out = np.zeros(12)
        backend.embedding_sum(indices, *one[1:], weights, out)
        assert np.isfinite(out).all()
    norms = backend.tied_norms(indices, one.inputs, one.weights, *one, 6)
    assert np.isfinite(norms).tolist() == [True, False, True]
    head = np.ones((3, 6 * one.inputs[0].shape[2]), np.float32)
    head[1, -1] = value if side else 1
    norms = backend.tied_row_norms(indices, one.inputs, one.weights, head, 6)
    assert np.isfinite(norms).tolist() == [True, False, True]


@pytest.mark.parametrize("times", [[3], [24], [30, 10]])
@pytest.mark.parametrize("gram", [False, True])
def test_products_stay_float32_where_torch_is_told_to_be_fast(times: list[int], gram: bool):
    import torch

    def found() -> tuple[Array, Array]:
        one, out = benign(7, times, 3, 40, 50, [1.0] * len(times)), np.zeros(2000)
        linear_sum(backend, *one, np.full(3, 2.0**20), out)
        return linear_norms(backend, *one, gram=gram), out

    before, expected = torch.get_float32_matmul_precision(), found()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = found()
    finally:
        torch.set_float32_matmul_precision(before)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_arguments_stay_as_they_are_and_may_have_gaps():
    whole = np.random.default_rng(5).normal(size=(26, 4, 14)).astype(np.float32)
    a, e = whole.transpose(1, 0, 2)[:, :, ::2], whole.transpose(1, 0, 2)[::-1, ::-1, 1::2]
    whole.flags.writeable = False
    for time in (1, 5, 26):
        one = Pairs([a[:, :time]], [e[:, :time]], [-3.0])
        copies = Pairs([one.inputs[0].copy()], [one.gradients[0].copy()], [-3.0])
        np.testing.assert_allclose(linear_norms(backend, *one), linear_norms(backend, *copies), rtol=1e-6)
        out, same = np.zeros(49), np.zeros(49)
        linear_sum(backend, *one, np.full(4, 2.0**30), out)
        linear_sum(backend, *copies, np.full(4, 2.0**30), same)
        np.testing.assert_allclose(out, same, rtol=1e-5, atol=2.0**30 * 1e-5)


@pytest.mark.parametrize(("examples", "times", "p", "q"), [(0, [2], 3, 4), (2, [0], 3, 4), (2, [0, 0], 3, 4),
                                                           (2, [2], 0, 4), (2, [30], 3, 0)])  # fmt: skip
def test_nothing_has_norm_zero_and_adds_nothing(examples: int, times: list[int], p: int, q: int):
    one = benign(6, times, examples, p, q, [2.0, -1.0][: len(times)])
    for scale in (None, np.ones(p * q, np.float32)):
        for exact in (False, True):
            norms = linear_norms(backend, *one, scale=scale, gram=scale is None, exact=exact)
            assert norms.tolist() == [0.0] * examples
            out = np.full(p * q, 0.5)
            linear_sum(backend, *one, np.ones(examples), out, scale=scale, exact=exact)
            assert (out == 0.5).all()
    indices = [np.zeros(e.shape[:2], np.int64) for e in one.gradients]
    if 0 in (examples, sum(times), q):
        assert backend.embedding_norms(indices, *one[1:], 3).tolist() == [0.0] * examples
    if 0 in (examples, sum(times), p):
        assert backend.tied_norms(indices, one.inputs, one.weights, *one, q).tolist() == [0.0] * examples
        nothing = np.zeros((examples, q * p), np.float32)
        assert backend.tied_row_norms(indices, one.inputs, one.weights, nothing, q).tolist() == [0.0] * examples


def test_an_example_without_a_gradient_has_norm_zero():
    one = benign(7, [30], 2, 5, 6, [1.0])
    one.gradients[0][1] = 0
    assert (linear_norms(backend, *one) > 0).tolist() == [True, False]


BAD = [
    ({"inputs": []}, ArgumentError, "inputs"),
    ({"inputs": [np.zeros((2, 3), np.float32)]}, ArgumentError, "three axes"),
    ({"gradients": [np.zeros((2, 4, 6), np.float32)]}, ArgumentError, r"must be \(2, 3, 6\)"),
    ({"gradients": [np.zeros((2, 3, 6))]}, ArgumentTypeError, "must be float32 as"),
    ({"point_weights": [1.0, 2.0]}, ArgumentError, "one for each part"),
    ({"point_weights": [np.inf]}, ArgumentError, "finite"),
    ({"scale": np.zeros(29)}, ArgumentError, r"must be \(30,\)"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_refuses_parts_that_do_not_fit(change: dict[str, Any], error: type[Exception], words: str):
    good = dict(zip(("inputs", "gradients", "point_weights"), benign(8, [3], 2, 5, 6, [1.0]), strict=True))
    refused(error, words, linear_norms, backend, **{**good, **change})
    with pytest.raises(error, match=words):
        linear_sum(backend, **{**good, **change}, weights=np.ones(2), out=np.zeros(30))


def test_refuses_tokens_that_are_none_and_outputs_that_do_not_fit():
    e, index = [np.ones((2, 3, 4), np.float32)], np.zeros((2, 3), np.int64)
    with pytest.raises(ArgumentTypeError, match="int64"):
        backend.embedding_norms([index.astype(np.int32)], e, [1.0], 5)
    with pytest.raises(ArgumentError, match=r"must be \(2, 3\)"):
        backend.embedding_norms([index[:, :2]], e, [1.0], 5)
    with pytest.raises(ArgumentError, match="size=5"):
        backend.embedding_norms([index + 5], e, [1.0], 5)
    with pytest.raises(ArgumentError, match=r"out.shape=\(21,\)"):
        backend.embedding_sum([index], e, [1.0], np.ones(2), np.zeros(21))
    with pytest.raises(ArgumentError, match=r"inputs\[0\].shape"):
        backend.tied_norms(
            [index], e, [1.0], [np.ones((2, 3, 3), np.float32)], [np.ones((2, 3, 5), np.float32)], [1.0], 5
        )
    with pytest.raises(ArgumentError, match=r"gradients\[0\].shape"):
        backend.tied_norms([index], e, [1.0], e, [np.ones((2, 3, 6), np.float32)], [1.0], 5)
    with pytest.raises(ArgumentError, match=r"rows.shape=\(2, 21\).*\(2, 20\)"):
        backend.tied_row_norms([index], e, [1.0], np.ones((2, 21), np.float32), 5)
    with pytest.raises(ArgumentTypeError, match="contiguous"):
        backend.embedding_sum([index], e, [1.0], np.ones(2), np.zeros(40)[::2])


@pytest.mark.parametrize("width", [1024, 1030])
def test_wide_sums_by_tiles_add_to_the_total(width: int):
    """On both sides of a tile's width: the total's rows in a tile lie together, or not."""
    rng = np.random.default_rng(9)
    a = rng.integers(-3, 4, (2, 30, width)).astype(np.float32)
    e = rng.integers(-3, 4, (2, 30, 70)).astype(np.float32)
    before = rng.integers(-9, 10, 70 * width).astype(np.float64)
    total = before.copy()
    linear_sum(backend, [a], [e], [1.0], np.array([1.0, 2.0]), total)
    np.testing.assert_array_equal(total - before, np.einsum("b,bto,bti->oi", [1.0, 2.0], e, a).reshape(-1))


@pytest.mark.parametrize("time", [1, 3, 24])
@pytest.mark.parametrize(("dtype", "largest", "weight"), [("float32", 3e38, 1.0), ("float64", 1e307, 2.0)])
def test_what_is_zero_adds_zero(time: int, dtype: str, largest: float, weight: float):
    """A weight is as large as another tensor's vector is small; an infinite product with a row of zeros is NaN."""
    a, e = np.zeros((3, time, 2), dtype), np.full((3, time, 3), largest, dtype)
    some = np.zeros((3, time, 2), dtype)
    some[:, -1] = 1e-38
    sparse = np.zeros((3, time, 3), dtype)
    sparse[:, 0] = largest  # where `some` has zeros, unless there is one row
    weights, total = np.array([2.0**36, 2.0**300, np.finfo(np.float64).max]), np.zeros(6)
    for points in ([weight], [2.0**1000]):
        linear_sum(backend, [a], [e], points, weights, total)
        linear_sum(backend, [e[:, :, :2]], [np.zeros_like(e)], points, weights, total)
        if time > 1:
            linear_sum(backend, [some], [sparse], points, weights, total)
        index, table = np.zeros((3, time), np.int64), np.zeros(2)
        backend.embedding_sum([index], [a], points, weights, table)
        assert table.tolist() == [0.0] * 2
    assert total.tolist() == [0.0] * 6


def test_norms_beside_weights_far_apart_are_no_shorter():
    """Products with the weights of points, and their squares, may leave float64 before a power of two comes in."""
    a, e = np.zeros((1, 8, 1), np.float32), np.zeros((1, 8, 1), np.float32)
    a[0, :, 0], e[0, 4, 0] = [3e38, 0, 0, 0, 1000, 0, 0, 3e38], 0.1
    true = Long(e[0, 4, 0]) * 1000 * Long(2) ** -1000
    assert linear_norms(backend, [a], [e], [2.0**-1000])[0] >= true
    index, tokens = np.zeros((1, 1), np.int64), np.full((1, 1, 1), 1e-3, np.float32)
    norms = backend.embedding_norms([index, index], [tokens, 0 * tokens], [1.0, 2.0**1000], 1)
    assert norms[0] >= tokens[0, 0, 0]
    # Rows so small that no float64 number takes them to 1, beside large ones.
    a, e = np.full((1, 3, 1), 2.0**-1040), np.full((1, 3, 1), 2.0**200)
    norms, total = linear_norms(backend, [a], [e], [1.0]), np.zeros(1)
    linear_sum(backend, [a], [e], [1.0], 2.0**36 / norms, total)
    assert abs(total[0] - 2.0**36) <= 2.0**20
    assert total[0] <= 2.0**36 + rounding_of_linear(1, 1, 3)
    tiny, total = np.full((1, 3, 1), 1e-200), np.zeros(1)
    linear_sum(backend, [tiny], [tiny], [2.0], np.array([np.finfo(np.float64).max]), total)
    assert total[0] == 0
