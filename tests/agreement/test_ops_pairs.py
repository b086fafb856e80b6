"""Norms and sums of gradients given as pairs: Triton's kernels against the NumPy reference in float64."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from one_layer import linear_norms, linear_sum
from strategies import SPECIAL, assert_agree, few, fewer, fewest, floats, seeds, writable

import dpcore_numpy as reference
from dpcore.errors import ArgumentTypeError
from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import CANCELLATION, rounding_of_rows
from dpcore.spec.pair_ops import LinearPairs

pytest.importorskip("triton")

import torch

pytestmark = pytest.mark.usefixtures("poisoned_memory")

Arrays = Sequence[np.ndarray]
# How far a norm of one position is above the true one at most: two norms, each raised by 2^-20.
ONE, RAISED = "linear_norms, one position", 2.0**-18

# Across the edges of tiles (32 rows and columns), of blocks of positions (16) and of what a product adds up (16).
examples = st.sampled_from([0, 1, 3])
times = st.lists(st.sampled_from([0, 1, 2, 15, 18]), min_size=1, max_size=2)
widths = st.sampled_from([0, 1, 3, 16, 33])
point_weights = st.sampled_from([1.0, -1.0, 0.3, 1000.0, 0.0, 1e-30])
pairs_of_weights = st.sampled_from(
    [[1000.3, -1000.3], [1000.0, -999.0], [1e-200, -1e-200], [1.0, 1e-300], [1e150, 2.0]]
)
sizes = st.sampled_from([1, 5, 40])


def sent(values: Any) -> Any:
    """Arrays in the backend's memory; what is none stays as it is."""
    if isinstance(values, list):
        return [sent(value) for value in values]
    return load_backend("triton").from_numpy(values) if isinstance(values, np.ndarray) else values


def wide(values: Any) -> Any:
    """Arrays of numbers in float64, in which the reference is the definition."""
    if isinstance(values, list):
        return [wide(value) for value in values]
    return values.astype(np.float64) if isinstance(values, np.ndarray) and values.dtype == np.float32 else values


def absolute(values: Any) -> Any:
    """Absolute values of numbers, not of indices and sizes."""
    if isinstance(values, list):
        return [absolute(value) for value in values]
    numbers = isinstance(values, float) or (isinstance(values, np.ndarray) and values.dtype == np.float64)
    return abs(values) if numbers else values


def operation_of(backend: Any, name: str) -> Callable[..., Any]:
    """Return an operation on one layer or table."""
    of_one = {"linear_norms": linear_norms, "linear_sums": linear_sum}
    return partial(of_one[name], backend) if name in of_one else getattr(backend, name)


def assert_norms_agree(operation: str, *arguments: Any, demand: str = "", **options: Any) -> np.ndarray:
    """Hold Triton's norms to those of the reference in float64, as the operation or another entry demands."""
    backend = load_backend("triton")
    given_ = {name: sent(value) for name, value in options.items()}
    got = backend.to_numpy(operation_of(backend, operation)(*map(sent, arguments), **given_))
    # Else the reference may raise a bound so that an example shares a product with others.
    exact = {} if operation in ("embedding_norms", "tied_row_norms") else {"exact": True}
    wider = {name: wide(value) for name, value in options.items()} | exact
    expected = operation_of(reference, operation)(*map(wide, arguments), **wider)
    assert got.dtype == np.float64
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    with np.errstate(over="ignore"):
        assert_agree(demand or operation, got[finite].astype(np.float32), expected[finite].astype(np.float32))
    return got


def assert_sums_agree(operation: str, *arguments: Any, scale: np.ndarray | None) -> None:
    """Hold Triton's sum to the reference's in float64, relative to the sum of the absolute values of all terms."""
    backend = load_backend("triton")
    *_, out = given_ = [*map(sent, arguments)]
    operation_of(backend, operation)(*given_, scale=sent(scale))
    expected, terms = [wide(list(arguments)) for _ in range(2)]
    terms = absolute(terms)
    expected[-1], terms[-1] = writable(expected[-1]), writable(terms[-1])
    operation_of(reference, operation)(*expected, scale=wide(scale))
    operation_of(reference, operation)(*terms, scale=absolute(wide(scale)))
    assert_agree(operation, backend.to_numpy(out), expected[-1], terms[-1])


def factors(rng: np.random.Generator, arrays: Arrays) -> np.ndarray:
    """Weights as a clip gives them: 0 for every example that is not finite, and for some others."""
    weights = writable(floats(rng, len(arrays[0])))
    for array in arrays:
        weights[~np.isfinite(array).all(axis=(1, 2))] = 0
    weights[rng.random(len(weights)) < 0.2] = 0
    return weights.astype(np.float64)


@few
@given(seeds, examples, times, widths, widths, st.data())
def test_linear_maps_agree(seed: int, count: int, lengths: list[int], p: int, q: int, data: st.DataObject) -> None:
    rng, special = np.random.default_rng(seed), data.draw(st.booleans()) and p * q > 0
    inputs = [floats(rng, count, length, p, special=special) for length in lengths]
    gradients = [floats(rng, count, length, q) for length in lengths]
    points = [data.draw(point_weights) for _ in lengths]
    scale = floats(rng, q * p) if data.draw(st.booleans()) else None
    chosen = {"scale": scale, "gram": data.draw(st.booleans()), "exact": data.draw(st.booleans())}
    demand = ONE if sum(lengths) == 1 and scale is None else ""
    assert_norms_agree("linear_norms", inputs, gradients, points, demand=demand, **chosen)
    out = floats(rng, q * p).astype(np.float64)
    assert_sums_agree("linear_sums", inputs, gradients, points, factors(rng, inputs), out, scale=scale)


@pytest.mark.parametrize("by", ["tiles", "gram", "scale"])
def test_linear_maps_of_several_blocks_agree(by: str) -> None:
    """More rows, columns and positions than a program takes at once."""
    rng = np.random.default_rng(5)
    inputs, gradients = ([floats(rng, 2, time, n) for time in (15, 18)] for n in (33, 34))
    scale = floats(rng, 34 * 33) if by == "scale" else None
    assert_norms_agree("linear_norms", inputs, gradients, [2.0, -0.3], scale=scale, gram=by == "gram")
    weights, out = factors(rng, inputs), floats(rng, 34 * 33).astype(np.float64)
    assert_sums_agree("linear_sums", inputs, gradients, [2.0, -0.3], weights, out, scale=scale)


@pytest.mark.parametrize("count", [16, 17])
def test_many_examples_of_one_position_agree(count: int) -> None:
    """More than a program takes together, and some that a clip left out."""
    rng = np.random.default_rng(count)
    inputs, gradients = [floats(rng, count, 1, 33, special=True)], [floats(rng, count, 1, 2)]
    assert_norms_agree("linear_norms", inputs, gradients, [-3.0], demand=ONE)
    weights, out = factors(rng, inputs), floats(rng, 66).astype(np.float64)
    assert_sums_agree("linear_sums", inputs, gradients, [-3.0], weights, out, scale=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_one_position_are_upper_bounds(dtype: torch.dtype) -> None:
    """Of numbers whose squares float32 rounds down, loses, or cannot hold, and of rows longer than a program takes."""
    rng, sizes = np.random.default_rng(4), 10.0 ** np.array([-44, -30, -20, -12, -7, -3, 0, 2, 4, 15, 19, 25, 34, 37])
    down = np.full(2085, 1 + 2027 * 2.0**-23)
    a = torch.tensor(sizes[:, None, None] * np.concatenate([down[None], rng.standard_normal((13, 2085))])[:, None])
    e = torch.tensor(sizes[::-1, None, None] * down[:1050])
    a, e = (x.to(torch.float32).to(dtype) for x in (a, e))
    got = load_backend("triton").linear_norms([LinearPairs([a], [e], [-0.7])])[0].numpy()
    with np.errstate(invalid="ignore"):  # infinite times 0
        exact = 0.7 * np.prod([np.linalg.norm(x[:, 0].double().numpy(), axis=1) for x in (a, e)], axis=0)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    assert finite.sum() == (14 if dtype != torch.float16 else 4)
    assert (got[finite] >= exact[finite] * (1 - 1e-12)).all()
    assert (got[finite] <= exact[finite] * (1 + RAISED) + 1e-80).all()


@few
@given(seeds, examples, times, widths.filter(bool), sizes, st.data())
def test_embeddings_agree(seed: int, count: int, lengths: list[int], q: int, size: int, data: st.DataObject) -> None:
    rng, special = np.random.default_rng(seed), data.draw(st.booleans())
    indices = [rng.integers(-1, size, (count, length)) for length in lengths]
    gradients = [writable(floats(rng, count, length, q, special=special)) for length in lengths]
    points = [data.draw(point_weights) for _ in lengths]
    scale = floats(rng, size * q) if data.draw(st.booleans()) else None
    weights = factors(rng, gradients)
    for index, gradient in zip(indices, gradients, strict=True):
        gradient[index < 0] = np.nan  # what is at a padding token does not matter
    assert_norms_agree("embedding_norms", indices, gradients, points, size, scale=scale)
    out = floats(rng, size * q).astype(np.float64)
    assert_sums_agree("embedding_sum", indices, gradients, points, weights, out, scale=scale)


@fewer
@given(seeds, st.integers(1, 2), st.sampled_from([1, 16, 17, 40]), st.sampled_from([1, 64, 65, 257]), sizes)
@example(0, 2, 40, 65, 1)
@example(0, 2, 40, 257, 40)
def test_the_positions_of_a_token_are_one_sum(seed: int, count: int, time: int, q: int, size: int) -> None:
    """Against the tables, of integers that no order of additions rounds; across blocks of positions and columns."""
    backend, rng = load_backend("triton"), np.random.default_rng(seed)
    index, rows = rng.integers(-1, size, (count, time)), np.float32(rng.integers(-9, 10, (count, time, q)))
    tables = np.zeros((count, size + 1, q))  # the last row is of padding
    np.add.at(tables, (np.arange(count)[:, None], index), rows)
    vectors, weights = tables[:, :size].reshape(count, size * q), rng.uniform(0.1, 9, count)
    out = sent(np.zeros(size * q))
    backend.embedding_sum(sent([index]), sent([rows]), [1.0], sent(weights), out)
    np.testing.assert_array_equal(backend.to_numpy(out), np.rint(weights[:, None] * vectors).sum(axis=0))
    norms, expected = (
        backend.to_numpy(backend.embedding_norms(sent([index]), sent([rows]), [1.0], size)),
        np.linalg.norm(vectors, axis=1),
    )
    assert (norms >= expected).all()
    np.testing.assert_allclose(norms, expected, rtol=1e-11, atol=1e-80)


@few
@given(seeds, examples, times, times, st.sampled_from([1, 3, 17]), sizes, st.data())
def test_norms_of_tied_matrices_agree(
    seed: int, count: int, token_lengths: list[int], lengths: list[int], p: int, size: int, data: st.DataObject
) -> None:
    rng, special = np.random.default_rng(seed), data.draw(st.booleans())
    indices = [rng.integers(-1, size, (count, length)) for length in token_lengths]
    token_gradients = [writable(floats(rng, count, length, p)) for length in token_lengths]
    inputs = [floats(rng, count, length, p) for length in lengths]
    gradients = [floats(rng, count, length, size, special=special) for length in lengths]
    points = [[data.draw(point_weights) for _ in chosen] for chosen in (token_lengths, lengths)]
    for index, gradient in zip(indices, token_gradients, strict=True):
        gradient[index < 0] = np.nan
    assert_norms_agree("tied_norms", indices, token_gradients, points[0], inputs, gradients, points[1], size)


@few
@given(seeds, examples, times, st.sampled_from([1, 3, 65]), sizes, st.data())
def test_norms_of_tables_beside_rows_agree(
    seed: int, count: int, lengths: list[int], p: int, size: int, data: st.DataObject
) -> None:
    rng, special = np.random.default_rng(seed), data.draw(st.booleans())
    indices = [rng.integers(-1, size, (count, length)) for length in lengths]
    gradients = [writable(floats(rng, count, length, p)) for length in lengths]
    points, rows = [data.draw(point_weights) for _ in lengths], floats(rng, count, size * p, special=special)
    for index, gradient in zip(indices, gradients, strict=True):
        gradient[index < 0] = np.nan
    assert_norms_agree("tied_row_norms", indices, gradients, points, rows, size)


def test_rows_that_are_those_of_the_table_are_twice_as_long() -> None:
    """Among numbers without relation the cross term is small."""
    backend, rows = load_backend("triton"), floats(np.random.default_rng(1), 2, 3, 5)
    arguments = [sent(np.array([[0, 1, 2]] * 2))], [sent(rows)], [1.0], sent(rows.reshape(2, 15)), 3
    found = backend.to_numpy(backend.tied_row_norms(*arguments))
    np.testing.assert_allclose(found, 2 * np.linalg.norm(rows.reshape(2, 15).astype(np.float64), axis=1), rtol=1e-5)


def squared(vector: Iterable[Fraction | float]) -> Fraction:
    """The squared norm, exactly."""
    return sum((Fraction(value) ** 2 for value in vector), Fraction(0))


def assert_certified(
    norms: torch.Tensor, add: Callable[[torch.Tensor, torch.Tensor], None], coordinates: int, sums: int = 1
) -> None:
    """Hold each norm to be one of what is added for that example alone, in rational arithmetic, on two grids.

    Each of the `sums` rounds to integers once; a clip leaves 2^-50 for the product with the weight.
    """
    backend, rounding = load_backend("triton"), sums * Fraction(rounding_of_rows(coordinates))
    for i, norm in enumerate(norms.tolist()):
        for steps in (5.0, 2.0**46):
            weights, out = np.zeros(len(norms)), sent(np.zeros(coordinates))
            weights[i] = steps / norm
            add(sent(weights), out)
            added = backend.to_numpy(out).tolist()
            assert all(map(float.is_integer, added))
            most = Fraction(weights[i]) * Fraction(norm) * (1 + Fraction(2) ** -51) + rounding
            assert squared(added) <= most**2, (i, norm)


def true_gradients(inputs: Arrays, gradients: Arrays, points: list[float], scale: Any) -> Iterator[list[Fraction]]:
    """Each example's vector, exactly."""
    to_exact = np.vectorize(Fraction, otypes=[object])
    for i in range(len(inputs[0])):
        terms = [
            Fraction(point) * to_exact(gradient[i].astype(float)).T @ to_exact(rows[i].astype(float))
            for point, rows, gradient in zip(points, inputs, gradients, strict=True)
        ]
        v = sum(terms[1:], terms[0]).ravel()
        yield list(v if scale is None else v * to_exact(scale.astype(float)))


def nearly_the_same(rng: np.random.Generator, *shape: int) -> list[np.ndarray]:
    """Rows at two points, at relative distances of 1e-2, 1e-4 and 1e-6 in three examples.

    In the fourth they are of any size, in the fifth 0 at the first point.
    """
    first = rng.standard_normal((5, *shape))
    second = first * (1 + rng.standard_normal(first.shape) * np.array([1e-2, 1e-4, 1e-6, 0, 0])[:, None, None])
    first[3], second[3] = (rng.choice(SPECIAL[np.isfinite(SPECIAL)], shape) for _ in range(2))
    first[4] = 0
    return [first.astype(np.float32), second.astype(np.float32)]


@pytest.mark.parametrize("by", ["tiles", "gram", "exact", "scale"])
@fewest
@given(seeds, st.sampled_from([1, 5, 17]), pairs_of_weights)
def test_what_a_linear_map_adds_is_within_its_norm(by: str, seed: int, time: int, points: list[float]) -> None:
    """And so is the true vector, since another order of additions may round to it."""
    backend, rng = load_backend("triton"), np.random.default_rng(seed)
    inputs, gradients = nearly_the_same(rng, time, 3), nearly_the_same(rng, time, 2)
    scale = rng.choice(SPECIAL[2:5], 6) if by == "scale" else None
    parts, scales = (sent(inputs), sent(gradients), points), {"scale": sent(scale)}
    norms = linear_norms(backend, *parts, **scales, gram=by == "gram", exact=by == "exact")
    assert_certified(norms, lambda weights, out: linear_sum(backend, *parts, weights, out, **scales), 6)
    for norm, vector in zip(norms.tolist(), true_gradients(inputs, gradients, points, scale), strict=True):
        assert squared(vector) <= Fraction(norm) ** 2


@fewest
@given(seeds, st.sampled_from([1, 5, 17]), st.sampled_from(["none", "pairs", "rows"]), pairs_of_weights)
def test_what_a_tied_matrix_adds_is_within_its_norm(seed: int, time: int, head: str, points: list[float]) -> None:
    backend, rng = load_backend("triton"), np.random.default_rng(seed)
    index = rng.integers(-1, 3, (5, time))
    tokens = (sent([index, index]), sent(nearly_the_same(rng, time, 2)), points)
    linear = (sent(nearly_the_same(rng, time, 2)), sent(nearly_the_same(rng, time, 3)), points)
    rows = sent(nearly_the_same(rng, 1, 6)[1].reshape(5, 6))

    def add(weights: torch.Tensor, out: torch.Tensor) -> None:
        backend.embedding_sum(*tokens, weights, out)
        if head == "pairs":
            linear_sum(backend, *linear, weights, out)
        if head == "rows":
            backend.weighted_sum([rows], [weights], [out])

    norms = {
        "none": lambda: backend.embedding_norms(*tokens, 3),
        "pairs": lambda: backend.tied_norms(*tokens, *linear, 3),
        "rows": lambda: backend.tied_row_norms(*tokens, rows, 3),
    }[head]()
    assert_certified(norms, add, 6, 1 if head == "none" else 2)


def sums_of_all_kinds(rng: np.random.Generator, count: int) -> Iterator[tuple[Callable[..., None], int]]:
    """Sums of so many examples at weights (B,), of linear maps and of a table, and their coordinates."""
    backend = load_backend("triton")
    for time, scaled in ((1, False), (18, False), (3, True)):
        a, e, scale = floats(rng, count, time, 33), floats(rng, count, time, 2), floats(rng, 66) if scaled else None
        given_ = (sent([a]), sent([e]), [0.3])
        yield partial(linear_sum, backend, *given_, scale=sent(scale)), 66
        index = rng.integers(-1, 5, (count, time))
        table = floats(rng, 10) if scaled else None
        yield partial(backend.embedding_sum, sent([index]), sent([e]), [0.3], scale=sent(table)), 10


def test_what_an_example_adds_does_not_depend_on_the_others() -> None:
    """Sums of integers are exact: one of all examples is the sum of those of each, whatever the order."""
    backend, rng, count = load_backend("triton"), np.random.default_rng(6), 7
    weights = np.abs(rng.standard_normal(count)) * 1e3
    for add, coordinates in sums_of_all_kinds(rng, count):
        found = []
        for own in [weights, *np.diag(weights)]:
            out = sent(np.zeros(coordinates))
            add(sent(own), out)
            found.append(backend.to_numpy(out))
        assert np.count_nonzero(found[0]) >= 4
        np.testing.assert_array_equal(found[0], np.sum(found[1:], axis=0))
        np.testing.assert_array_equal(found[0], np.rint(found[0]))


def test_a_product_with_a_weight_is_rounded_before_it_becomes_an_integer() -> None:
    """Products that float64 rounds to a half: one operation for product and addition would see on which side it is."""
    backend, rng = load_backend("triton"), np.random.default_rng(7)
    numbers, half = rng.uniform(1, 2, 500).astype(np.float32).tolist(), 2.0**20 + 0.5
    above = [x for x in numbers if half / x * x == half and Fraction(half / x) * Fraction(x) > half]
    for x, time in product(above[:4], (1, 2)):
        weights, a, e = (
            sent(np.array([half / x])),
            np.zeros((1, time, 1), np.float32),
            np.ones((1, time, 1), np.float32),
        )
        a[0, 0] = x
        for add in (
            partial(linear_sum, backend, sent([a]), sent([e]), [1.0]),
            partial(backend.embedding_sum, [sent(np.zeros((1, time), np.int64))], sent([a]), [1.0]),
        ):
            out = sent(np.zeros(1))
            add(weights, out)
            assert backend.to_numpy(out) == 2.0**20


def test_a_tied_matrix_whose_parts_cancel_keeps_a_share_of_their_norms() -> None:
    one, index = np.ones((1, 1, 1), np.float32), np.zeros((1, 1), np.int64)
    got = assert_norms_agree("tied_norms", [index], [one], [1.0], [one], [one], [-1.0], 1)
    assert got[0] >= 2 * CANCELLATION
    got = assert_norms_agree("tied_row_norms", [index], [one], [1.0], -np.ones((1, 1), np.float32), 1)
    assert got[0] >= 2 * CANCELLATION


def test_lengths_of_terms_are_their_norms() -> None:
    """What rounding is bounded by: it is too small to be seen in a norm."""
    from dpcore_triton import embedding, gram, layers, linear, pairs

    rng, backend = np.random.default_rng(2), load_backend("triton")
    a, e, scale = floats(rng, 2, 18, 33), floats(rng, 2, 18, 34), floats(rng, 34 * 33)
    one = LinearPairs([sent(a)], [sent(e)], [-1.5])
    given_ = layers.layers_of([one, one], [None, sent(scale)], [0, 0])
    got = given_.parts.empty(36)
    gram.fill_lengths(given_, got, [True, False])
    linear._fill_scaled_lengths(given_, got)
    terms = 1.5 * np.einsum("btq,btp->btqp", wide(e), wide(a))
    plain, scaled = backend.to_numpy(got).reshape(2, 2, 18)
    exact = np.linalg.norm(terms, axis=(2, 3))
    assert ((plain >= exact * (1 - 1e-12)) & (plain <= exact * (1 + RAISED))).all()
    exact = np.linalg.norm(terms * wide(scale).reshape(34, 33), axis=(2, 3))
    np.testing.assert_allclose(scaled, exact, rtol=1e-12)
    index, parts = rng.integers(-1, 33, (2, 18)), pairs.parts_of([sent(a)], [sent(e)], [-1.5], got.device, [0])
    expected = 1.5 * np.linalg.norm(wide(e) * wide(scale).reshape(33, 34)[index], axis=2) * (index >= 0)
    _, got = embedding.tokens_of(parts, sent(index), 34, 33, sent(scale))
    np.testing.assert_allclose(backend.to_numpy(got), expected, rtol=1e-12)


@pytest.mark.parametrize("time", [1, 3])
def test_what_is_zero_adds_zero_whatever_the_weights(time: int) -> None:
    """An infinite product of two weights with a row of zeros would be NaN."""
    backend = load_backend("triton")
    a, e, index = np.zeros((2, time, 3)), np.ones((2, time, 2)), np.zeros((2, time), np.int64)
    a, e = a.astype(np.float32), e.astype(np.float32)
    weights, out = backend.from_numpy(np.array([2.0**36, 2.0**300])), backend.from_numpy(np.zeros(6))
    linear_sum(backend, sent([a]), sent([e]), [2.0**1000], weights, out)
    backend.embedding_sum(sent([index]), sent([a]), [2.0**1000], weights, out)
    assert backend.to_numpy(out).tolist() == [0.0] * 6
    small = backend.from_numpy(np.array([2.0**-964, 0.0]))
    linear_sum(backend, sent([e[:, :, :1]]), sent([e]), [2.0**1000], small, out[:2])
    backend.embedding_sum(sent([index]), sent([e]), [2.0**1000], small, out[2:4])
    assert backend.to_numpy(out).tolist() == [time * 2.0**36] * 4 + [0.0] * 2


def test_arrays_may_be_views() -> None:
    """Activations with time first, a cut, one row for all examples, columns with gaps."""
    backend, rng = load_backend("triton"), np.random.default_rng(0)
    rows = floats(rng, 5, 4, 6)
    whole = sent(rows)
    first = sent(np.ascontiguousarray(rows.transpose(1, 0, 2))).transpose(0, 1)
    views = [first, whole[:, 1:3], whole[:, :1].expand(5, 3, 6), sent(np.repeat(rows, 2, axis=2))[:, :, ::2]]
    plain = [rows, rows[:, 1:3], np.repeat(rows[:, :1], 3, axis=1), rows]
    gradients = [floats(rng, *part.shape[:2], 3) for part in plain]
    out, weights, expected = sent(np.zeros(18)), sent(np.full(5, 2.0**20)), np.zeros((5, 18))
    points = [1.0, -2.0, 0.5, 1.0]
    linear_sum(backend, views, sent(gradients), points, weights, out)
    for point, part, gradient in zip(points, plain, gradients, strict=True):
        expected += point * np.einsum("bte,bta->bea", wide(gradient), wide(part)).reshape(5, 18)
    np.testing.assert_allclose(backend.to_numpy(out), np.rint(2.0**20 * expected).sum(axis=0), rtol=1e-9)
    for gram in (False, True):
        got = linear_norms(backend, views, sent(gradients), points, gram=gram)
        np.testing.assert_allclose(
            backend.to_numpy(got), linear_norms(reference, wide(plain), wide(gradients), points), rtol=1e-9
        )


def test_float64_is_refused_with_the_remedy() -> None:
    backend, rows = load_backend("triton"), [sent(np.ones((2, 1, 3)))]
    index = [sent(np.zeros((2, 1), np.int64))]
    for run in (
        lambda: linear_norms(backend, rows, rows, [1.0]),
        lambda: linear_sum(backend, rows, rows, [1.0], sent(np.ones(2)), sent(np.ones(9))),
        lambda: backend.embedding_norms(index, rows, [1.0], 1),
        lambda: backend.embedding_sum(index, rows, [1.0], sent(np.ones(2)), sent(np.ones(3))),
        lambda: backend.tied_norms(index, rows, [1.0], rows, rows, [1.0], 3),
        lambda: backend.tied_row_norms(index, rows, [1.0], sent(np.ones((2, 9))), 3),
    ):
        with pytest.raises(ArgumentTypeError, match=r"\[0\].dtype=float64: must be float32.*set_backend\('numpy'\)"):
            run()
