"""Linear layers on tensor cores: the kernels against float64, in the interpreter with a tensor core that truncates."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from one_layer import linear_norms, linear_sum

from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import rounding_of_rows
from tests.depth import chosen
from tests.unit.backends.tensor_core import A100, LEFT_OUT, exact, truncating

pytest.importorskip("triton")

import torch

from dpcore_triton import chips, cores, linear, tied
from dpcore_triton.launch import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory")

# Across the edges of tiles (64 and 128), and of what is added up at once (16 of float32 numbers, 64 of 16 bits).
times = st.lists(st.sampled_from([1, 15, 33, 65]), min_size=1, max_size=2).filter(lambda counts: sum(counts) > 1)
widths = st.sampled_from([1, 8, 72, 136])
kinds = st.sampled_from(["float32", "bfloat16", "float16"])
ways = st.sampled_from(["core tiles", "core gram", "tiles", "gram"])
_dot, asked = truncating(A100), linear.way_of


def emulated(x: Any, y: Any, total: Any, dot: Any = _dot) -> Any:
    """`dpcore_triton.cores.product` on the interpreter's tensors."""
    found = dot(*(each.handle.data.astype(np.float64) for each in (x, y, total)))
    made = total + 0.0
    made.handle.data = found.astype(np.float32)
    return made


@pytest.fixture(scope="module", autouse=True)
def way() -> Any:
    """Let a chip be there, a truncating tensor core in the interpreter, and the test choose how norms are taken."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(cores, "product", emulated)

        def force(name: str, chip: str = "L4") -> None:
            patch.setattr(linear, "chip_of", lambda device: chips.CHIPS[chip])
            patch.setattr(linear, "way_of", lambda *arguments, **options: name)

        yield force


def parts(seed: int, counts: list[int], width: int, kind: str) -> list[torch.Tensor]:
    """Rows of three examples, of sizes from 1e-6 to 1e6."""
    rng = np.random.default_rng(seed)
    found = [rng.normal(size=(3, count, width)) * 10.0 ** rng.uniform(-6, 6, (3, 1, 1)) for count in counts]
    if kind == "float16":
        found = [np.clip(x, -1e4, 1e4) for x in found]
    backend = load_backend("triton")
    return [backend.from_numpy(np.float32(x)).to(getattr(torch, kind)) for x in found]


def true(a: list[torch.Tensor], e: list[torch.Tensor], points: list[float]) -> tuple[Any, Any]:
    """Every example's vector in float64, and the sum of its terms' norms."""
    wide = [[x.double().cpu().numpy() for x in side] for side in (a, e)]
    v = sum(w * np.einsum("btq,btp->bqp", y, x) for x, y, w in zip(*wide, points, strict=True))
    norm = [[np.linalg.norm(x, axis=2) for x in side] for side in wide]
    terms = sum(abs(w) * (x * y).sum(axis=1) for x, y, w in zip(*norm, points, strict=True))
    return v.reshape(len(v), -1), terms


@given(
    st.integers(0, 2**32 - 1), times, widths, widths, kinds, ways, st.sampled_from([2.0, -3.7, 1e-30]),
    st.sampled_from(["L4", "H100"]),
)  # fmt: skip
@example(1, [17, 33], 8, 9, "float32", "core tiles", -3.7, "L4")
@example(2, [33, 65], 9, 8, "bfloat16", "core gram", -3.7, "H100")
# One chain over two parts.
@example(3, [33, 65], 72, 136, "bfloat16", "core tiles", 2.0, "H100")
@settings(max_examples=chosen(4, 100))
def test_what_an_example_adds_is_its_vector_and_within_its_norm(
    way: Callable[..., None], seed: int, counts: list[int], p: int, q: int, kind: str, name: str, point: float,
    chip: str,
) -> None:  # fmt: skip
    way(name, chip)
    backend, points = load_backend("triton"), [2.0, point][: len(counts)]
    a, e = parts(seed, counts, p, kind), parts(seed + 1, counts, q, kind)
    norms = backend.to_numpy(linear_norms(backend, a, e, points))
    v, terms = true(a, e, points)
    length = np.linalg.norm(v, axis=1)
    assert (norms >= length).all()
    assert (norms <= length * (1 + 2.0**-18) + 2.0**-13 * terms + 2.0**-30).all() or name == "core gram"
    assert (norms**2 <= length**2 + 2.0**-12 * (terms**2 + terms) + 2.0**-30).all()
    weights = 2.0**36 / norms
    for i in range(3):
        out = backend.from_numpy(np.zeros(p * q))
        linear_sum(backend, a, e, points, backend.from_numpy(weights * (np.arange(3) == i)), out, longest=2.0**36)
        k = backend.to_numpy(out)
        np.testing.assert_array_equal(k, np.rint(k))
        assert np.linalg.norm(k) <= 2.0**36 + rounding_of_rows(p * q)
        assert np.linalg.norm(k - weights[i] * v[i]) <= weights[i] * 2.0**-14 * terms[i] + rounding_of_rows(p * q)


@pytest.mark.filterwarnings("ignore:All-NaN")  # of the interpreter's maximum
@pytest.mark.parametrize("name", ["core tiles", "core gram"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_what_is_not_finite_in_one_example_changes_that_one_only(
    way: Callable[..., None], name: str, kind: str
) -> None:
    way(name)
    backend, point = load_backend("triton"), [1.5]
    a, e = parts(3, [18], 8, kind), parts(4, [18], 9, kind)
    before = backend.to_numpy(linear_norms(backend, a, e, point))
    weights = backend.from_numpy(2.0**36 / before * [1, 0, -1])
    whole = backend.from_numpy(np.zeros(72))
    linear_sum(backend, a, e, point, weights, whole, longest=2.0**36)
    for side, value in ((a, np.nan), (e, np.inf), (a, 2.0**50)):
        a[0][1], e[0][1] = 1e-9, 1e-9
        side[0][1, 17, 3] = value
        after = backend.to_numpy(linear_norms(backend, a, e, point))
        assert np.isfinite(after).tolist() == [True, False, True]
        np.testing.assert_array_equal(after[[0, 2]], before[[0, 2]])
        again = backend.from_numpy(np.zeros(72))
        linear_sum(backend, a, e, point, weights, again, longest=2.0**36)
        np.testing.assert_array_equal(*map(backend.to_numpy, (again, whole)))


def test_many_examples_have_one_sum_in_any_batches(way: Callable[..., None]) -> None:
    """Words of 22 bits leave room for 256 examples at a time; largest ones, all of one sign."""
    way("core tiles")
    backend, rng = load_backend("triton"), np.random.default_rng(5)
    a, e = (backend.from_numpy(np.float32(rng.uniform(0.5, 1, (260, 2, n)))) for n in (3, 2))
    weights = backend.from_numpy(np.where(np.arange(260) < 250, 2.0**40, -3.0))
    whole, apart = (backend.from_numpy(np.zeros(6)) for _ in range(2))
    linear_sum(backend, [a], [e], [0.5], weights, whole, longest=2.0**42)
    for some in (slice(0, 7), slice(7, 260)):
        linear_sum(backend, [a[some]], [e[some]], [0.5], weights[some], apart, longest=2.0**42)
    np.testing.assert_array_equal(*map(backend.to_numpy, (whole, apart)))
    v, _ = true([a], [e], [0.5])
    np.testing.assert_allclose(backend.to_numpy(whole), backend.to_numpy(weights) @ v, rtol=1e-5)


@given(st.integers(0, 2**32 - 1), st.integers(-30, 30), st.floats(-20, 41))
@example(1, 0, 41.0)
@settings(max_examples=chosen(12, 200))
def test_what_is_added_is_the_nearest_integer_of_the_exact_product(
    way: Callable[..., None], seed: int, scale: int, size: float
) -> None:
    """Of numbers that a tensor core has exactly, and weights that are no powers of two; some products are halves."""
    way("core tiles")
    backend, rng = load_backend("triton"), np.random.default_rng(seed)
    v = np.rint(rng.uniform(-1, 1, 64) * 2**12) * 2.0 ** (scale - 12)
    v[:3] = np.float64([1.5, -2.5, 2.0**10 + 0.5]) * 2.0 ** (scale - 10)
    weight = float(np.float32(2.0 ** (10 - scale) if seed % 2 else 2.0 ** (size - scale)))
    a, e = np.zeros((1, 2, 1)), np.zeros((1, 2, 64))
    a[0, 0], e[0, 0] = 1, v
    out = backend.from_numpy(np.zeros(64))
    sides = (backend.from_numpy(np.float32(side)) for side in (a, e))
    linear_sum(
        backend, *([side] for side in sides), [1.0], backend.from_numpy(np.array([weight])), out, longest=2.0**42
    )
    for found, x in zip(backend.to_numpy(out), v, strict=True):
        # The interpreter rounds twice, by way of float64.
        assert abs(Fraction(float(found)) - Fraction(x) * Fraction(weight)) <= Fraction(1, 2) + Fraction(1, 2**20)


@pytest.mark.parametrize("longest", [None, 2.0**43, 2.0**80])
def test_addends_that_words_do_not_hold_are_added_in_float64(way: Callable[..., None], longest: float | None) -> None:
    """As in a run without noise, whose grid is 2^-80 of the clip norm."""
    way("core tiles")
    backend = load_backend("triton")
    a, e = parts(3, [18], 8, "float32"), parts(4, [18], 9, "float32")
    v, _ = true(a, e, [1.0])
    weights = (longest or 2.0**60) / np.linalg.norm(v, axis=1)
    out = backend.from_numpy(np.zeros(72))
    linear_sum(backend, a, e, [1.0], backend.from_numpy(weights), out, longest=longest)
    np.testing.assert_allclose(backend.to_numpy(out), weights @ v, rtol=1e-12, atol=1e-12 * (longest or 2.0**60))


def test_a_tied_matrix_has_room_for_what_the_head_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a chip without tensor cores that are known the norm is that of float64."""
    backend, rng = load_backend("triton"), np.random.default_rng(6)
    a, g, e = (backend.from_numpy(np.float32(rng.normal(size=(2, 40, n)))) for n in (3, 3, 5))
    index = [backend.from_numpy(rng.integers(0, 5, (2, 40)))]

    def found(exact: bool) -> Any:
        return backend.to_numpy(backend.tied_norms(index, [g], [1.0], [a], [e], [-2.0], 5, exact=exact))

    assert (found(False) == found(True)).all() or not INTERPRETED
    monkeypatch.setattr(tied, "chip_of", lambda device: chips.CHIPS["L4"])
    more = found(False) - found(True)
    _, terms = true([a], [e], [-2.0])
    rho = cores.rounding([40], split=True)
    assert (more >= rho * terms).all()
    assert (more <= 1.1 * rho * terms).all()


def test_a_tied_matrix_has_room_for_what_splitting_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is of float64 and the sum of split numbers, of whose products all of the same is left out."""
    backend = load_backend("triton")
    for module in (linear, tied):
        monkeypatch.setattr(module, "chip_of", lambda device: chips.CHIPS["L4"])
    monkeypatch.setattr(linear, "way_of", lambda *arguments, **options: "core tiles")
    if INTERPRETED:
        monkeypatch.setattr(cores, "product", partial(emulated, dot=exact))
    a, e = (backend.from_numpy(np.full((1, 64, 64), value, np.float32)) for value in LEFT_OUT)
    padding, nothing = backend.from_numpy(np.full((1, 1), -1)), backend.from_numpy(np.zeros((1, 1, 64), np.float32))
    norms = backend.to_numpy(backend.tied_norms([padding], [nothing], [1.0], [a], [e], [1.0], 64))
    out = backend.from_numpy(np.zeros(64 * 64))
    weights = np.floor(2.0**36 / norms)  # of 24 bits: float32 has them
    linear_sum(backend, [a], [e], [1.0], backend.from_numpy(weights), out, longest=2.0**36)
    length = np.linalg.norm(backend.to_numpy(out))
    assert 2.0**36 * (1 - 2.0**-15) < length <= 2.0**36 + rounding_of_rows(64 * 64)


def test_the_way_follows_from_shapes_dtype_and_chip() -> None:
    def found(chip: str | None, total: int, p: int, q: int, kind: Any = torch.float32, **options: bool) -> str:
        a, e = (torch.empty((2, total, width), dtype=kind, device="meta") for width in (p, q))
        return asked(linear.LinearPairs([a], [e], [1.0], **options), chip and chips.CHIPS[chip], scaled=False)

    assert found("H100", 128, 768, 3072, torch.bfloat16) == "core gram"
    assert found("H100", 1024, 768, 3072) == "core tiles"
    assert found("H100", 128, 768, 3072, exact=True) == found(None, 128, 768, 3072) == "tiles"
    assert found("H100", 1, 768, 3072) == "one"
    # A small matrix fills a float64 tile, and a sixteenth of the tensor core's.
    assert found("H100", 16, 32, 32, torch.bfloat16) == "tiles"
    assert "core" in found("4090", 16, 32, 32, torch.bfloat16)
    # Places in a matrix are of 32 bits.
    assert found("H100", 256, 1 << 16, 1 << 15) == "tiles"
