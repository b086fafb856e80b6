"""Sums that take the place of what an array holds: the bits of sums that are added to zeros, whatever it held."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dpcore.spec.backends import load_backend
from dpcore.spec.pair_ops import LinearPairs
from dpcore.stages.clipping.blocks import Embedding, Linear, Rows, Tied
from dpcore.stages.clipping.clipped_sum import add_sums

pytest.importorskip("triton")

import torch
import triton.language as tl

from dpcore_triton import chips, core_linear, linear, slices
from dpcore_triton.launch import INTERPRETED

rng = np.random.default_rng(0)
# More examples than a program adds up, which are four, or 64 of bytes, in the interpreter.
MANY, MANY_BYTES = (6, 70) if INTERPRETED else (257, 2049)


@pytest.fixture(params=["triton", "torch", "numpy"])
def backend(request: pytest.FixtureRequest) -> Any:
    return load_backend(request.param)


def array(backend: Any, *shape: int, kind: str = "float32") -> Any:
    found = backend.from_numpy(np.float32(rng.normal(size=shape)))
    return found if kind == "float32" else found.to(getattr(torch, kind))


def both(backend: Any, size: int, add: Any) -> tuple[Any, Any]:
    """Return a sum that is added to zeros, and one that was put in the place of NaN twice."""
    zeros, held = backend.from_numpy(np.zeros(size)), backend.from_numpy(np.full(size, np.nan))
    add(zeros, False)
    add(held, True)
    once = backend.to_numpy(held).copy()
    add(held, True)
    np.testing.assert_array_equal(backend.to_numpy(held), once)
    return backend.to_numpy(zeros), once


@pytest.mark.parametrize("examples", [0, 3, 70])
@pytest.mark.parametrize(("scaled", "longest"), [(False, None), (False, [2.0**40]), (True, None)])
def test_rows(backend: Any, examples: int, scaled: bool, longest: Any) -> None:
    rows, weights = array(backend, examples, 1030), backend.from_numpy(1e9 * rng.random(examples))
    scale = [array(backend, 1030)] if scaled else None

    def add(out: Any, overwrite: bool) -> None:
        backend.weighted_sum([rows], [weights], [out], scale, longest, overwrite=overwrite)

    zeros, held = both(backend, 1030, add)
    np.testing.assert_array_equal(zeros, held)
    assert (np.abs(held).max() > 0) == (examples > 0)


# The way of a sum on a chip, T, and examples: fewer and more than a program adds up where programs share a number.
WAYS = [
    ("bytes", 1, 3), ("bytes", 1, MANY_BYTES), ("one row, float64", 1, 3), ("few rows", 5, 3),
    ("tiles", 30, 3), ("scaled", 30, 3), ("16 bits, one chain", 30, 3), ("16 bits, one chain", 30, MANY),
    ("16 bits, in chunks", 300, 2), ("split", 30, 3), ("split", 30, MANY),
]  # fmt: skip


@pytest.mark.parametrize(("way", "time", "examples"), [*WAYS, *dict.fromkeys((way, time, 0) for way, time, _ in WAYS)])
def test_layers(backend: Any, monkeypatch: pytest.MonkeyPatch, way: str, time: int, examples: int) -> None:
    plain = way in ("one row, float64", "few rows", "tiles", "scaled")
    monkeypatch.setattr(linear, "chip_of", lambda device: None if plain else chips.CHIPS["L4"])
    if INTERPRETED:
        for module, batch in ((linear, 4), (core_linear, 4), (slices, 64)):
            monkeypatch.setattr(module, "BATCH", tl.constexpr(batch))
    kind = "bfloat16" if way.startswith("16 bits") and backend.arrays == "torch" else "float32"
    p, q = 9, 66
    layer = LinearPairs(
        [array(backend, examples, time, p, kind=kind)], [array(backend, examples, time, q, kind=kind)], [1.0]
    )
    weights = backend.from_numpy(1e6 * rng.random(examples))
    scales = [array(backend, q * p)] if way == "scaled" else [None]
    longest = {"bytes": [1e8], "16": [2.0**40], "split": [2.0**40]}.get(way.split(maxsplit=1)[0])
    if backend.name == "triton":
        words = {"by": "8 bits", "sp": "3 products", "16": "one product"}.get(way[:2], "float64")
        assert words in linear.linear_way(layer, None, scaled=way == "scaled")

    def add(out: Any, overwrite: bool) -> None:
        backend.linear_sums([layer], [weights], [out], scales, longest, overwrite=overwrite)

    zeros, held = both(backend, p * q, add)
    np.testing.assert_array_equal(zeros, held)
    assert (np.abs(held).max() > 0) == (examples > 0)


def test_a_micro_batch_of_all_kinds(backend: Any) -> None:
    """Tables, whose sums are added at their tokens, begin with zeros."""
    tokens = backend.from_numpy(np.int64([[1, 2, 1], [4, 0, 2]]))
    table = Embedding((tokens,), (array(backend, 2, 3, 4),), (1.0,), 6)
    head = Linear((array(backend, 2, 3, 4),), (array(backend, 2, 3, 6),), (1.0,))
    blocks = [table, head, Rows(array(backend, 2, 24)), Tied(table, head), Tied(table, Rows(array(backend, 2, 24)))]
    weights = [backend.from_numpy(np.float64([1e6, 3e5]))] * len(blocks)
    zeros, held = ([backend.from_numpy(np.full(24, number)) for _ in blocks] for number in (0.0, np.nan))
    add_sums(backend, blocks, weights, zeros, [None] * len(blocks))
    add_sums(backend, blocks, weights, held, [None] * len(blocks), None, True)
    for one, other in zip(zeros, held, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(one), backend.to_numpy(other))
