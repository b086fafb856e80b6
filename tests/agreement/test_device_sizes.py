"""The interpreter's programs are large; a device's are half a tile. Here the interpreter takes those of the device."""

from importlib import import_module

import numpy as np
import pytest

pytest.importorskip("triton")

import dpcore_numpy as reference
from dpcore.spec.backends import load_backend
from dpcore.spec.ops import FilterCoefficients, NoiseRow, RingCoefficients, Slot, UpdateSettings
from dpcore.spec.stream import LANES, TILE

KEY = bytes(range(32))
# Tensors that begin inside a tile, at its last element, and beyond 2^33; that end inside the first and the second half.
CORRELATIONS = [None, RingCoefficients((0.5, -0.25), 1, 2.0), FilterCoefficients((1.0, 0.5), (0.1,))]
PLACES = [(1, 300), (TILE - 1, 2), (2**33 + 5, TILE), (TILE // 2 + LANES // 2, TILE + LANES)]


@pytest.fixture(autouse=True)
def sizes_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    load_backend("triton")
    for name in ("noise", "step", "stream"):
        monkeypatch.setattr(import_module(f"dpcore_triton.{name}"), "BLOCKS", 128)
    for name in ("clip", "row_norms"):
        module = import_module(f"dpcore_triton.{name}")
        monkeypatch.setattr(module, "ROWS", 4)
        monkeypatch.setattr(module, "COLUMNS", 512)


@pytest.mark.parametrize(("first", "size"), PLACES)
def test_words_and_normals(first: int, size: int) -> None:
    backend = load_backend("triton")
    words = backend.to_numpy(backend.words(KEY, 3, 1, first, size)).view(np.uint32)
    np.testing.assert_array_equal(words, reference.words(KEY, 3, 1, first, size))
    normals = backend.to_numpy(backend.normal(KEY, 3, 1, first, size))
    np.testing.assert_array_equal(normals, reference.normal(KEY, 3, 1, first, size))


@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_steps(correlation: RingCoefficients | FilterCoefficients | None) -> None:
    """All tensors in one launch, each between guards that must stay as they are."""
    backend, rng = load_backend("triton"), np.random.default_rng(0)
    order = 0 if correlation is None else 2 if isinstance(correlation, RingCoefficients) else 1
    ours, theirs = [], []
    for first, size in PLACES:
        vectors = [rng.standard_normal(size).astype(np.float32) for _ in range(4)]
        wide = [*(rng.standard_normal(size) for _ in range(order)), np.rint(rng.standard_normal(size) * 2.0**36)]
        for slots, own in ((ours, backend), (theirs, reference)):
            guarded = [own.from_numpy(np.pad(vector, 3, constant_values=7.0)) for vector in (*vectors, *wide)]
            parameter, displacement, m, v, *rest = [vector[3:-3] for vector in guarded]
            slots.append((guarded, Slot(parameter, rest[-1], first, (), (m, v * v), displacement, tuple(rest[:-1]))))
    settings = [UpdateSettings(0.1, 0.01, 0.9, 0.99, 1e-3)] * len(PLACES)
    arguments = (NoiseRow(KEY, 5, 0, 1.5, "philox"), 8.0, (), "adam", settings, 2)
    unit = 1.5 * 2.0**-36 / (1.0 if correlation is None else correlation.normalizer)
    for slots, own in ((ours, backend), (theirs, reference)):
        own.step([slot for _, slot in slots], *arguments, unit=unit, correlation=correlation)
    for (guarded, slot), (_, wanted) in zip(ours, theirs, strict=True):
        for vector in guarded:
            edges = backend.to_numpy(vector)
            assert (edges[:3] == 7).all()
            assert (edges[-3:] == 7).all()
        pairs = [(slot.parameter, wanted.parameter), (slot.displacement, wanted.displacement)]
        pairs += zip(slot.moments, wanted.moments, strict=True)
        for got, expected in zip(slot.noise_state, wanted.noise_state, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(got), expected)
        for got, expected in pairs:
            np.testing.assert_allclose(backend.to_numpy(got), expected, rtol=2e-5, atol=2e-6)


def test_clip() -> None:
    backend, rng = load_backend("triton"), np.random.default_rng(1)
    rows = [rng.standard_normal((9, size)).astype(np.float32) for size in (1, 511, 1025)]
    sent = [backend.from_numpy(block) for block in rows]
    for got, wanted in zip(backend.group_norms(sent, [1, 0, 1]), reference.group_norms(rows, [1, 0, 1]), strict=True):
        np.testing.assert_allclose(backend.to_numpy(got), wanted, rtol=2.0**-19)
    weights = rng.standard_normal(9) * 2.0**30
    out = [np.zeros(block.shape[1]) for block in rows]
    sums = [backend.from_numpy(total) for total in out]
    backend.weighted_sum(sent, [backend.from_numpy(weights)] * 3, sums)
    reference.weighted_sum(rows, [weights] * 3, out)
    for got, wanted in zip(sums, out, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(got), wanted)
    for got, block in zip(backend.combine(sent, sent, (0.5, -2.0)), rows, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(got), np.float32(0.5) * block + np.float32(-2.0) * block)
