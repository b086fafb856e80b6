"""Normals follow the normal law on every backend: all of them by their distance from it, and the far tail by itself.

A draw beyond 6.5 standard deviations comes once in 10^10. So the words that make radii are cut to the lowest cells of
u, and everything after them is the backend's own: u is uniform below ``h = cells 2^-32`` there, ``-ln(u / h)`` has the
exponential law, and ``|z|`` exceeds ``t >= sqrt(-2 ln h)`` with probability ``2 Q(t) / h``.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dpcore.spec.backends import load_backend
from dpcore.spec.stream import Stream

pytest.importorskip("triton")

KEY = bytes(range(40, 72))
BACKENDS = ("numpy", "torch", "triton")
ROW = 4
# A sound backend is refused by one of these once in a thousand keys; the key is fixed.
LEAST = 1e-3


def drawn(backend: str, tiles: int, row: int = ROW) -> np.ndarray:
    """Return normals in float64, of whole tiles."""
    port = load_backend(backend)
    found = port.to_numpy(port.normal(KEY, row, Stream.GRADIENT, 4096 * 7, 4096 * tiles))
    return found.astype(np.float64)


def count_fits(count: int, expected: float) -> bool:
    """Whether a Poisson count is one of the likely ones."""
    return 2 * min(stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)) > LEAST


@pytest.fixture
def lowest_cells(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns what cuts the words that make radii, in a backend, to so many of the lowest cells, a power of two."""

    def cut(backend: str, cells: int) -> None:
        load_backend(backend)
        module = importlib.import_module(f"dpcore_{backend}.noise")
        if backend == "triton":
            # Compiled kernels do not look a function up again; the interpreter does at every call.
            if not importlib.import_module("dpcore_triton.launch").INTERPRETED:
                pytest.skip("the words of a compiled kernel cannot be cut")
            block = module.cipher_block

            def lowest(cipher: Any, counter: Any, TAIL: Any, RNG: Any) -> Any:
                words = block(cipher, counter, TAIL, RNG)
                return words if TAIL else tuple(w & (cells - 1) if i % 2 == 0 else w for i, w in enumerate(words))

            monkeypatch.setattr(module, "cipher_block", lowest)
            return
        blocks = module.tile_blocks

        def lowest_blocks(*args: Any, tail: bool = False, **kwargs: Any) -> Any:
            words = blocks(*args, tail=tail, **kwargs)
            if not tail:
                words = words.copy()
                words[..., 0::2] &= np.uint32(cells - 1)
            return words

        monkeypatch.setattr(module, "tile_blocks", lowest_blocks)

    return cut


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_body_is_normal(backend: str) -> None:
    z = drawn(backend, 64)
    assert stats.kstest(z, "norm").pvalue > LEAST
    for bound in (2.0, 3.0, 4.0):
        for side in (z, -z):
            assert count_fits(int((side > bound).sum()), z.size * float(stats.norm.sf(bound)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("cells", "tiles"), [(4096, 16), (16, 16)])
def test_the_tail_is_normal(backend: str, cells: int, tiles: int, lowest_cells: Any) -> None:
    share = cells * 2.0**-32
    least = math.sqrt(-2 * math.log(share))
    lowest_cells(backend, cells)
    z = drawn(backend, tiles)
    exponential = (z.reshape(-1, 8, 2, 256) ** 2).sum(axis=2).reshape(-1) / 2 + math.log(share)
    assert stats.kstest(exponential, "expon").pvalue > LEAST
    far = np.abs(z)[np.abs(z) > least]
    assert stats.kstest(far, lambda t: 1 - stats.norm.sf(t) / stats.norm.sf(least)).pvalue > LEAST
    for bound in (5.5, 6.0, 6.5, 7.0):
        if bound > least:
            for side in (z, -z):
                assert count_fits(int((side > bound).sum()), z.size * float(stats.norm.sf(bound)) / share)
