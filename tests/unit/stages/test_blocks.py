"""Blocks: each kind against loops over examples and time, in NumPy's and in torch's arrays."""

import itertools
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpcore.spec.backends import load_backend
from dpcore.spec.pair_ops import LinearPairs
from dpcore.stages.clipping.blocks import (
    Block,
    Embedding,
    Linear,
    Rows,
    Tied,
    as_blocks,
    as_rows,
    combined,
    joined,
    of_units,
    scaled,
)
from dpcore.stages.clipping.clipped_sum import add_sums, norms_of

PORT = load_backend("numpy")
EXAMPLES, SIZE, WIDTH = 5, 4, 3
KINDS = ("rows", "linear", "embedding", "tied")
LIBRARIES = ("numpy", "torch")


def library(name: str) -> Any:
    """What makes a library's arrays of NumPy's, as a backend does."""
    return np.array if name == "numpy" else pytest.importorskip("torch").tensor


def block_of(kind: str, seed: int, times: tuple[int, ...] = (2, 3)) -> Block:
    """A (4, 3) matrix's block, of as many parts as there are lengths."""
    rng = np.random.default_rng(seed)
    weights = tuple(rng.normal(size=len(times)).tolist())

    def arrays(width: int) -> tuple[np.ndarray, ...]:
        return tuple(rng.normal(size=(EXAMPLES, time, width)) for time in times)

    if kind == "rows":
        return Rows(rng.normal(size=(EXAMPLES, SIZE * WIDTH)))
    if kind == "linear":
        return Linear(arrays(WIDTH), arrays(SIZE), weights)
    if kind == "embedding":
        indices = tuple(rng.integers(-1, SIZE, (EXAMPLES, time)) for time in times)
        return Embedding(indices, arrays(WIDTH), weights, SIZE)
    return Tied(block_of("embedding", seed + 100, times), block_of("linear", seed + 200, times))


def loop(block: Block) -> np.ndarray:
    """The examples' vectors by definition, one product at a time."""
    if isinstance(block, Tied):
        return loop(block.embedding) + loop(block.linear)
    if isinstance(block, Rows):
        return np.asarray(block.values)
    out = np.zeros((block.examples, SIZE, WIDTH))
    firsts = block.inputs if isinstance(block, Linear) else block.indices
    for first, gradient, weight in zip(firsts, block.gradients, block.point_weights, strict=True):
        for i, t in itertools.product(range(block.examples), range(first.shape[1])):
            for r, c in itertools.product(range(SIZE), range(WIDTH)):
                if isinstance(block, Linear):
                    out[i, r, c] += weight * float(gradient[i, t, r]) * float(first[i, t, c])
                elif int(first[i, t]) == r:
                    out[i, r, c] += weight * float(gradient[i, t, c])
    return out.reshape(block.examples, -1)


def sums(vectors: np.ndarray, sizes: list[int]) -> np.ndarray:
    """The sum of each unit's vectors."""
    ends = np.cumsum(sizes)
    return np.stack([vectors[end - size : end].sum(0) for size, end in zip(sizes, ends, strict=True)])


@pytest.mark.parametrize("arrays", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_vectors_of_the_definition(kind: str, arrays: str) -> None:
    make = library(arrays)
    for seed in range(5):
        block = block_of(kind, seed)
        found = block.map(make)
        assert (found.examples, found.dtype) == (EXAMPLES, "float64")
        assert np.prod(found.shape) == SIZE * WIDTH
        np.testing.assert_allclose(np.asarray(found.rows()), loop(block), rtol=1e-12, atol=1e-12)
        assert found.weighted(1.0).rows() is not None
        np.testing.assert_allclose(np.asarray(found.weighted(-2.5).rows()), -2.5 * loop(block), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("arrays", LIBRARIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1], [5], [1, 3, 1], [2, 1, 2], [3, 2], [1, 4]])
def test_units_are_the_sums_of_neighbors(kind: str, arrays: str, sizes: list[int]) -> None:
    """Unit by unit, those of one size together, whichever array library; nothing is padded."""
    make = library(arrays)
    block = block_of(kind, len(sizes))
    vectors = sums(loop(block), sizes)
    found = [units for (units,) in of_units([block.map(make)], sizes)]
    order = np.argsort(sizes, kind="stable")
    assert [units.examples for units in found] == [sizes.count(size) for size in sorted(set(sizes))]
    np.testing.assert_allclose(
        np.concatenate([np.asarray(units.rows()) for units in found]), vectors[order], rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("arrays", LIBRARIES)
@pytest.mark.parametrize(
    "kinds", [*((one,) for one in KINDS), *itertools.product(KINDS, repeat=2), *itertools.permutations(KINDS, 3)]
)
def test_joined_is_the_sum(kinds: tuple[str, ...], arrays: str) -> None:
    make = library(arrays)
    blocks = [block_of(kind, seed, (seed + 1,)) for seed, kind in enumerate(kinds)]
    found = joined([block.map(make) for block in blocks])
    np.testing.assert_allclose(np.asarray(found.rows()), sum(map(loop, blocks)), rtol=1e-12, atol=1e-12)
    if "rows" in kinds:
        assert isinstance(found, Rows)
    elif "tied" in kinds or len(set(kinds)) > 1:
        assert isinstance(found, Tied)
    else:
        assert isinstance(found, Linear if kinds[0] == "linear" else Embedding)


@pytest.mark.parametrize("arrays", LIBRARIES)
@pytest.mark.parametrize("kinds", ["re", "er", "rle", "erl", "eer", "lere"])
def test_a_large_table_stays_one_beside_rows(kinds: str, arrays: str) -> None:
    """Of rows, layers and tables: norm and sum are those of the vectors; a table of 8 rows a token is large."""
    make, size, port = library(arrays), 8 * 3, load_backend(arrays)
    rng, blocks, vectors = np.random.default_rng(len(kinds)), list[Block](), np.zeros((EXAMPLES, size, WIDTH))
    for kind in kinds:
        index, e = rng.integers(-1, size - 1, (EXAMPLES, 3)), rng.normal(size=(EXAMPLES, 3, WIDTH))
        if kind == "e":
            blocks.append(Embedding((index,), (e,), (1.0,), size))
            np.add.at(vectors, (np.arange(EXAMPLES)[:, None], index), e * (index >= 0)[..., None])
            continue
        linear = Linear((e,), (rng.normal(size=(EXAMPLES, 3, size)),), (1.0,))
        blocks.append(linear if kind == "l" else Rows(linear.rows()))
        vectors += linear.rows().reshape(vectors.shape)
    found, flat = joined([block.map(make) for block in blocks]), vectors.reshape(EXAMPLES, -1)
    assert isinstance(found, Tied)
    assert isinstance(found.linear, Rows)
    assert (found.shape, found.exact) == ((size, WIDTH), False)
    np.testing.assert_allclose(np.asarray(found.rows()), flat, rtol=1e-12, atol=1e-12)
    scale = rng.uniform(1, 2, size * WIDTH)
    for own, factor in ((None, 1.0), (make(scale), scale)):
        norms, out = np.asarray(found.norms(port, own)), make(np.zeros(size * WIDTH))
        np.testing.assert_allclose(norms, np.linalg.norm(flat * factor, axis=1), rtol=1e-9)
        weights = 2.0**20 * np.arange(EXAMPLES)
        found.add_sum(port, make(weights), out, own)
        assert np.abs(np.asarray(out) - weights @ (flat * factor)).max() <= EXAMPLES
    tables = [replace(block, size=size - 1) for block in blocks if isinstance(block, Embedding)]
    assert isinstance(joined([*tables, Rows(np.zeros((EXAMPLES, (size - 1) * WIDTH)))]), Rows)


def test_one_tensor_read_in_two_shapes_becomes_rows() -> None:
    rng = np.random.default_rng(0)
    wide = Linear((rng.normal(size=(EXAMPLES, 2, 6)),), (rng.normal(size=(EXAMPLES, 2, 2)),), (1.0,))
    block = block_of("linear", 1)
    found = joined([block, wide])
    assert isinstance(found, Rows)
    np.testing.assert_array_equal(found.rows(), block.rows() + wide.rows())


@pytest.mark.parametrize("with_scale", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_sums_are_those_of_the_vectors(kind: str, with_scale: bool) -> None:
    for seed in range(5):
        block, rng = block_of(kind, seed), np.random.default_rng(seed)
        scale = np.exp(rng.normal(size=SIZE * WIDTH)) if with_scale else None
        vectors = loop(block) * (1 if scale is None else scale)
        norms = block.norms(PORT, scale)
        true = np.linalg.norm(vectors, axis=1)
        assert (norms >= true * (1 - 1e-15)).all()
        np.testing.assert_allclose(norms, true, rtol=1e-6)
        out = np.rint(rng.normal(size=SIZE * WIDTH) * 2.0**40)
        expected, weights = out.copy(), rng.normal(size=EXAMPLES) * 2.0**40
        block.add_sum(PORT, weights, out, scale)
        np.testing.assert_allclose(out, expected + weights @ vectors, rtol=1e-9, atol=2.0**11)
        for i in range(EXAMPLES):
            alone = np.zeros(SIZE * WIDTH)
            block.add_sum(PORT, np.where(np.arange(EXAMPLES) == i, weights, 0.0), alone, scale)
            assert np.linalg.norm(alone) <= abs(weights[i]) * norms[i] + block.rounding
            expected += alone
        np.testing.assert_array_equal(out, expected)


def test_blocks_that_take_a_scale_are_scaled_exactly() -> None:
    blocks = [block_of(kind, seed) for seed, kind in enumerate(KINDS)]
    scales = list(np.exp(np.random.default_rng(0).normal(size=(4, SIZE * WIDTH))))
    found = scaled(blocks)
    assert [type(block) for block in found] == [Rows, Linear, Embedding, Rows]
    vectors = [loop(block) * scale for block, scale in zip(blocks, scales, strict=True)]
    (norms,) = norms_of(PORT, found, [(0, 1, 2, 3)], scales)
    np.testing.assert_allclose(norms, np.linalg.norm(np.concatenate(vectors, axis=1), axis=1), rtol=1e-6)
    totals, weights = [np.zeros(SIZE * WIDTH) for _ in blocks], (np.arange(EXAMPLES) + 0.5) * 2.0**40
    add_sums(PORT, found, [weights] * 4, totals, scales)
    np.testing.assert_allclose(totals, [weights @ each for each in vectors], rtol=1e-9, atol=2.0**5)


class Given:
    """A block that knows its norms only."""

    def __init__(self, *norms: float) -> None:
        self._norms = np.array(norms, float)

    def norms(self, *_: Any) -> np.ndarray:
        return self._norms


NORMS = st.one_of(st.just(0.0), st.floats(1e-300, 1e300), st.floats(-600, 600).map(lambda e: 2.0 ** (e * 1.6)))


@given(st.lists(NORMS, min_size=1, max_size=6))
def test_the_norm_of_a_group_is_a_tight_upper_bound(norms: list[float]) -> None:
    """Neither are large squares infinite, nor small ones lost."""
    ((found,),) = norms_of(PORT, [Given(norm) for norm in norms], [range(len(norms))], [None] * len(norms))
    square = sum(Fraction(norm) ** 2 for norm in norms)
    assert square <= Fraction(float(found)) ** 2 <= square * (1 + Fraction(4 * len(norms) + 40, 2**53))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_the_norm_of_a_group_with_a_member_that_is_not_finite_is_not(value: float) -> None:
    given = [Given(1.0, value, 0.0), Given(2.0, 3.0, value), Given(0, 0, 0)]
    (found,) = norms_of(PORT, given, [(0, 1, 2)], [None] * 3)
    np.testing.assert_array_equal(np.isfinite(found), [True, False, False])


def test_rows_and_layers_are_normed_and_summed_in_one_operation_each_whatever_the_groups() -> None:
    """A run asks the port once a micro-batch for each kind, not once a tensor or a group."""
    calls: list[tuple[str, int]] = []

    def watched(name: str) -> Any:
        def run(first: list[Any], *rest: Any, **options: Any) -> Any:
            calls.append((name, len(first)))
            return getattr(PORT, name)(first, *rest, **options)

        return run

    names = ("group_norms", "weighted_sum", "linear_norms", "linear_sums", "joined_norms")
    port: Any = SimpleNamespace(**{name: watched(name) for name in names})
    kinds = ("rows", "linear", "rows", "linear", "rows", "linear")
    blocks = [block_of(kind, seed) for seed, kind in enumerate(kinds)]
    groups, scales = [(3,), (5, 0, 1, 2), (4,)], list(np.exp(np.random.default_rng(1).normal(size=(6, SIZE * WIDTH))))
    weights = [2.0**40 * (np.linspace(0, 1, EXAMPLES) + i) for i in range(6)]
    totals = [np.zeros(SIZE * WIDTH) for _ in blocks]
    found = norms_of(port, blocks, groups, scales)
    add_sums(port, blocks, weights, totals, scales)
    norms_, sums_ = (
        [("linear_norms", 3), ("group_norms", 3), ("joined_norms", 3)],
        [("weighted_sum", 3), ("linear_sums", 3)],
    )
    assert calls == [*norms_, *sums_]
    vectors = [loop(block) * scale for block, scale in zip(blocks, scales, strict=True)]
    for norms, members in zip(found, groups, strict=True):
        whole = np.concatenate([vectors[i] for i in members], axis=1)
        np.testing.assert_allclose(norms, np.linalg.norm(whole, axis=1), rtol=1e-6)
    for total, weight, own in zip(totals, weights, vectors, strict=True):
        np.testing.assert_allclose(total, weight @ own, rtol=1e-9, atol=2.0**5)


def test_points_of_all_kinds_are_combined_and_rows_by_one_operation_a_point() -> None:
    calls: list[int] = []

    def combine(first: list[Any], second: list[Any], weights: tuple[float, float]) -> Any:
        calls.append(len(first))
        return PORT.combine(first, second, weights)

    kinds = ("rows", "linear", "rows", "embedding")
    points = [[block_of(kind, 10 * point + seed) for seed, kind in enumerate(kinds)] for point in range(3)]
    weights = (0.5, -1.25, 2.0)
    found = combined(SimpleNamespace(combine=combine), weights, iter(points))  # type: ignore[arg-type]
    assert calls == [2, 2]
    for place, block in enumerate(found):
        expected = sum(weight * loop(blocks[place]) for weight, blocks in zip(weights, points, strict=True))
        np.testing.assert_allclose(block.rows(), expected, rtol=1e-5, atol=1e-5)
    (alone,) = combined(PORT, (0.5,), [points[0][:1]])
    np.testing.assert_array_equal(alone.rows(), 0.5 * points[0][0].rows())


@pytest.mark.parametrize(
    ("weights", "exact"), [((1.0, 2.0), False), ((1.0, -1e-3), True), ((-1.0, -2.0), False), ((0.0, 1.0), False)]
)
def test_points_that_are_subtracted_are_computed_exactly(weights: tuple[float, ...], exact: bool) -> None:
    asked: list[bool] = []

    def watched(layers: list[LinearPairs[Any]], *_: Any) -> list[None]:
        asked.extend(layer.exact for layer in layers)
        return [None]

    port: Any = SimpleNamespace(linear_norms=watched, linear_sums=watched)
    linear = Linear(block_of("linear", 0).inputs, block_of("linear", 0).gradients, weights)
    linear.norms(port)
    linear.add_sum(port, None, None)
    assert asked == [exact, exact]


@pytest.mark.parametrize(("table", "head", "exact"), [(1.0, 2.0, False), (-1.0, 2.0, True), (1.0, -2.0, True)])
def test_a_tied_matrix_is_summed_as_its_norm_was_taken(table: float, head: float, exact: bool) -> None:
    """The norm bounds the sum of the same arithmetic."""
    asked: list[bool] = []

    def norms(*_: Any, exact: bool) -> None:
        asked.append(exact)

    def sums(layers: list[LinearPairs[Any]], *_: Any) -> None:
        asked.extend(layer.exact for layer in layers)

    port: Any = SimpleNamespace(tied_norms=norms, linear_sums=sums, embedding_sum=lambda *_, **__: None)
    tied = joined([block_of("embedding", 0, (2,)), block_of("linear", 0, (2,))])
    assert isinstance(tied, Tied)
    tied = Tied(replace(tied.embedding, point_weights=(table,)), replace(tied.linear, point_weights=(head,)))
    tied.norms(port)
    tied.add_sum(port, np.ones(EXAMPLES), None)
    assert asked == [exact, exact]


def test_a_part_of_a_tied_matrix_may_be_longer_than_both_together() -> None:
    """Sixteen times, since the norm counts as no less; and a layer of one row is not cut for a bound."""
    asked = list[Any]()

    def sums(first: list[Any], weights: Any, out: Any, scales: Any, longest: Any) -> None:
        asked.append(longest)

    port: Any = SimpleNamespace(linear_sums=sums, weighted_sum=sums, embedding_sum=lambda *_, **__: None)
    table, head = block_of("embedding", 0, (2,)), block_of("linear", 0, (2,))
    one = replace(head, inputs=(head.inputs[0][:, :1],), gradients=(head.gradients[0][:, :1],))
    for part in (head, Rows(head.rows()), one):
        Tied(table, part).add_sum(port, np.ones(EXAMPLES), None, None, 3.0)
        part.add_sum(port, np.ones(EXAMPLES), None, None, 3.0)
    assert asked == [[48.0], [3.0], [48.0], [3.0], None, None]


def test_rows_are_taken_quickly_or_left_to_the_long_way() -> None:
    values = [np.ones((4, size), np.float32) for size in (3, 5)]
    assert as_rows(values, [3, 5]) == as_blocks(values, [3, 5]) == [Rows(value) for value in values]
    for other in ([*values[:1], Rows(values[1])], values[::-1], [values[0], values[1][:2]], [values[0][0], values[1]],
                  [None, values[1]], [values[0].tolist(), values[1]], []):  # fmt: skip
        assert as_rows(other, [3, 5]) is None
