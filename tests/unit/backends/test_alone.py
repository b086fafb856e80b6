"""What is found for an example follows from its own arrays: a further one, of zeros, moves no bit."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from one_layer import linear_norms, linear_sum
from tensors import OnTensors

import dpcore_numpy
from dpcore.spec.contributions import rounding_of_linear
from dpcore.stages.clipping.blocks import Linear
from dpcore_numpy.pairs import Side
from dpcore_torch import linear
from tests.depth import pairs as choose

backend: Any = dpcore_numpy
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=["numpy", "torch"], autouse=True)
def both(request: pytest.FixtureRequest) -> Iterator[None]:
    global backend
    backend = dpcore_numpy if request.param == "numpy" else OnTensors("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # with one, torch adds the entries of any number of examples alike
    yield
    torch.set_num_threads(threads)
    backend = dpcore_numpy


# Of one batch each: on both sides of every constant by which a backend cuts its work.
@pytest.mark.parametrize(
    ("size", "examples"), [(1, 1 << 17), (10, 13107), (100, 1310), (3000, 43), (3000, 1), (20000, 6), (20000, 7)]
)
def test_norms_of_rows(size: int, examples: int):
    rows = np.zeros((examples + 1, size), np.float32)
    rows[:examples] = np.random.default_rng(1).normal(size=(examples, size)) * 10
    (with_zero, before) = (backend.row_norms([block]) for block in (rows, rows[:-1]))
    np.testing.assert_array_equal(with_zero[:-1], before)
    few = slice(examples - 1, examples)
    np.testing.assert_array_equal(backend.row_norms([rows[few]]), before[few])


def pairs(rows: int, inputs: int, outputs: int, examples: int) -> tuple[Array, Array]:
    """Numbers whose terms nearly cancel: rounding weighs as much as it can. The last example is zeros."""
    rng = np.random.default_rng(2)
    a, e = (rng.normal(size=(examples + 1, rows, width)).astype(np.float32) for width in (inputs, outputs))
    half = rows // 2
    a[:, half : 2 * half] = a[:, :half]
    e[:, half : 2 * half] = -e[:, :half] * np.float32(1 + 2**-16)
    a[-1], e[-1] = 0, 0
    return a, e


_SHAPES = [  # time and widths, and examples
    ((1, 10, 10), 13107),
    ((3, 7, 5), 700),
    ((12, 30, 20), 40),
    ((24, 2, 2), 1000),
    ((24, 10, 10), 1310),
    ((100, 7, 5), 60),
    ((257, 1, 7), 33),
    ((257, 1, 7), 1),
    ((256, 1025, 3), 33),
    ((1000, 1, 1), 1),
    ((600, 40, 30), 17),
    ((64, 1024, 3), 1),
]


@pytest.mark.parametrize(("form", "gram"), choose(_SHAPES, [False, True], 2))
def test_pairs(form: tuple[tuple[int, int, int], int], gram: bool):
    shape, examples = form
    a, e = pairs(*shape, examples)
    norms, sums = [], []
    for x, y in ((a, e), (a[:-1], e[:-1])):
        norms.append(linear_norms(backend, [x], [y], [1.0], gram=gram))
        rounding = [rounding_of_linear(shape[2], shape[1])]
        (weights,) = backend.clip_factors([norms[-1]], "standard", [1.0], [shape[1] * shape[2]], rounding, 2.0**-34)
        sums.append(np.zeros(shape[1] * shape[2]))
        linear_sum(backend, [x], [y], [1.0], weights, sums[-1])
    np.testing.assert_array_equal(norms[0][:-1], norms[1])
    np.testing.assert_array_equal(sums[0], sums[1])


@pytest.mark.parametrize("form", [(8, 1, 64), (24, 10, 128), (64, 16, 16), (300, 7, 5)])
def test_rows_of_pairs(form: tuple[int, int, int]):
    """A matrix that is also used otherwise is formed, and clipped as rows."""
    made = torch.from_numpy if backend is not dpcore_numpy else np.asarray
    a, e = map(made, pairs(*form, 3))
    every = Linear((a,), (e,), (1.0,)).rows()
    for i in range(4):
        own = slice(i, i + 1)
        assert (Linear((a[own],), (e[own],), (1.0,)).rows()[0] == every[i]).all()


SHAPES = [(24, 1, 33), (24, 33, 1), (24, 5, 7), (49, 288, 64), (784, 9, 32), (25, 64, 10), (3, 9, 7), (1, 40, 30)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_example_has_the_bits_that_it_has_alone(shape: tuple[int, int, int], exact: bool, scaled: bool):
    """Wherever in the batch it stands: its norm, and the integers that it adds."""
    time, p, q = shape
    rng = np.random.default_rng(0)
    a, e = (rng.standard_normal((4, time, width)).astype(np.float32) for width in (p, q))
    scale = rng.random(p * q).astype(np.float32) if scaled else None
    norms, together, alone = linear_norms(backend, [a], [e], [1.0], exact=exact, scale=scale), *np.zeros((2, p * q))
    weights = 2.0**36 / norms
    linear_sum(backend, [a], [e], [1.0], weights, together, exact=exact, scale=scale)
    for i in range(4):
        own = [a[i : i + 1].copy()], [e[i : i + 1].copy()], [1.0]
        assert linear_norms(backend, *own, exact=exact, scale=scale) == norms[i]
        linear_sum(backend, *own, weights[i : i + 1].copy(), alone, exact=exact, scale=scale)
    np.testing.assert_array_equal(together, alone)


def test_products_of_an_example_lie_as_those_of_any_other():
    """Whether a library's rounding follows from where arrays begin in a cache line is up to the processor."""
    (a, e), tiles = (Side([np.ones((3, 5, width), np.float32)]) for width in (7, 9)), 0
    for _, _, _, tile in linear._tiles(a, e, np.arange(3), wide=False):
        assert all(own.data_ptr() % 64 == 0 for own in tile)
        tiles += 1
    assert tiles
