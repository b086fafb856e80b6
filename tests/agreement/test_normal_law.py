"""Normals follow the normal law on every backend: all of them by their distance from it, and the far tail by itself.

A draw beyond 5.5 standard deviations comes once in 26 million. All of them are drawn by rejection, as 4.5e-5 of all
draws are. So the tables are changed, to choose this rest for every element; everything after it is the backend's own.
There ``|z|`` exceeds t with probability ``2 Q(t)`` over the mass of the rest, for t beyond the last staircase.
"""

from importlib import import_module

import numpy as np
import pytest
from scipy import stats

from dpcore.spec import rounded_normal as law
from dpcore.spec.backends import load_backend
from dpcore.spec.stream import Stream
from tests.depth import chosen

pytest.importorskip("triton")

KEY = bytes(range(40, 72))
BACKENDS = ("numpy", "torch", "triton")
ROW = 4
# A sound backend is refused by one of these once in a thousand keys; the key is fixed.
LEAST = 1e-3


def drawn(backend: str, tiles: int) -> np.ndarray:
    """Return normals of whole tiles."""
    port = load_backend(backend)
    return port.to_numpy(port.normal(KEY, ROW, Stream.GRADIENT, 4096 * 7, 4096 * tiles, rng="philox"))


def count_fits(count: int, expected: float) -> bool:
    """Whether a Poisson count is one of the likely ones."""
    return 2 * min(stats.poisson.cdf(count, expected), stats.poisson.sf(count - 1, expected)) > LEAST


# test_ops_stream holds the others to the bits of the reference, also in the rest.
@pytest.fixture(scope="module", params=chosen(("numpy",), BACKENDS))
def rest_alone(request: pytest.FixtureRequest) -> tuple[np.ndarray, float]:
    """Return what a backend draws where every column stands for the rest, and the rest's mass of old."""
    noises = [import_module(f"dpcore_{name}.noise") for name in BACKENDS]
    columns = np.full_like(law.tables().columns, law.REST)
    mass = 1 - sum(strip.box + strip.staircase for strip in law.strips()) * 2.0**-24
    tables = law.tables()._replace(columns=columns)
    caches = noises[1]._columns.cache_clear, noises[2].tables_on.cache_clear
    with pytest.MonkeyPatch.context() as patch:
        for module in (law, *noises[:2]):
            patch.setattr(module, "tables", lambda: tables)
        for clear in caches:
            clear()
        z = drawn(request.param, 8)
    for clear in caches:
        clear()
    return z, mass


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_body_is_normal(backend: str) -> None:
    z = drawn(backend, 64)
    assert stats.kstest(z, "norm").pvalue > LEAST
    for bound in (2.0, 3.0, 4.0):
        for side in (z, -z):
            assert count_fits(int((side > bound).sum()), z.size * float(stats.norm.sf(bound)))


def test_the_tail_is_normal(rest_alone: tuple[np.ndarray, float]) -> None:
    (z, mass), least = rest_alone, 5.5
    far = np.abs(z)[np.abs(z) > least]
    assert far.size > 15
    assert stats.kstest(far, lambda t: 1 - stats.norm.sf(t) / stats.norm.sf(least)).pvalue > LEAST
    for bound in (5.5, 5.75, 6.0, 6.5):
        for side in (z, -z):
            assert count_fits(int((side > bound).sum()), z.size * float(stats.norm.sf(bound)) / mass)


def test_the_rest_has_what_boxes_and_staircases_leave(rest_alone: tuple[np.ndarray, float]) -> None:
    z, mass = rest_alone
    edges = np.arange(law.STRIPS + 1) / 64
    taken = np.array([strip.box + strip.staircase for strip in law.strips()]) * 2.0**-24
    expected = np.maximum(2 * (stats.norm.sf(edges[:-1]) - stats.norm.sf(edges[1:])) - taken, 0) / mass * z.size
    counts = np.bincount((np.where(z < 0, -z, z) * 64).astype(int), minlength=law.STRIPS)
    _, group = np.unique(np.cumsum(expected) // 40, return_inverse=True)
    found, likely = (np.bincount(group, weights=part) for part in (counts, expected))
    assert stats.chi2.sf(((found - likely) ** 2 / likely).sum(), len(likely) - 1) > LEAST
    assert stats.binomtest(int((z < 0).sum()), z.size).pvalue > LEAST
