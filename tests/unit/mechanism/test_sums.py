"""Sums over very large batches: one example moves a computed sum by no more than it is accounted for."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from dpcore import methods
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler, PoissonSampler, TruncatedPoissonSampler, UserSampler
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.rounding import rounding
from dpcore.statement.build import state
from dpcore.statement.statement import Statement
from dpcore.statement.verify import verify
from dpcore.statement.verify.finding import FAILED

C = 1.0


def clipped_sum(rows: np.ndarray, backend: str = "numpy") -> np.ndarray:
    """The sum as the mechanism makes it: norms, certified factors, weighted sum."""
    port = load_backend(backend)
    on_device = [port.from_numpy(rows)]
    (factors,) = port.clip_factors([port.row_norms(on_device)], "standard", [C], [rows.shape[1]], rows.dtype.name)
    total = port.zeros_like(port.from_numpy(np.zeros(rows.shape[1])))
    port.weighted_sum(on_device, [factors], [total])
    return port.to_numpy(total)


def regression(examples: int, dimension: int, dtype: str = "float32") -> np.ndarray:
    """Gradients of a linear regression far from its minimum: all clipped, all of one side."""
    rng = np.random.default_rng(examples)
    features = rng.normal(1, 0.3, (examples, dimension))
    return ((features @ np.full(dimension, 10.0))[:, None] * features).astype(dtype)


@pytest.mark.parametrize(("examples", "dimension"), [(200_000, 41), (1_000_000, 9)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_example_moves_a_very_large_sum_by_its_clip_norm(examples: int, dimension: int, dtype: str) -> None:
    rows = regression(examples, dimension, dtype)
    whole = clipped_sum(rows)
    for removed in (0, examples // 3, examples - 1):
        moved = np.linalg.norm(whole - clipped_sum(np.delete(rows, removed, axis=0)))
        assert 0.99 * C < moved <= C * (1 + rounding(examples))
    assert rounding(examples) < 1e-3


@pytest.mark.gpu
def test_one_example_moves_a_sum_by_its_clip_norm_under_triton() -> None:
    pytest.importorskip("triton")
    rows = regression(3000, 5)
    whole, less = clipped_sum(rows, "triton"), clipped_sum(rows[1:], "triton")
    assert 0.99 * C < np.linalg.norm(whole - less) <= C * (1 + 1e-6)
    np.testing.assert_allclose(whole, clipped_sum(rows), rtol=1e-12)


def test_the_bound_on_rounding_holds_in_rational_arithmetic() -> None:
    """For the order that rounds the most: one term after the other."""
    rng = np.random.default_rng(1)
    for terms in (1, 2, 10, 400):
        vectors = rng.uniform(0.1, 1, (terms, 2)) * [[0.6, 0.79]]
        computed = np.zeros(2)
        for vector in vectors:
            computed += vector
        exact = [sum(map(Fraction, column)) for column in vectors.T.tolist()]
        error = math.sqrt(sum(float(Fraction(a) - b) ** 2 for a, b in zip(computed.tolist(), exact, strict=True)))
        assert 2 * error <= rounding(terms)
    assert rounding(1_000_000) == pytest.approx(1.21e-4, rel=1e-2)


@pytest.mark.parametrize(("n", "mean"), [(10**8, 1000.0), (10**7, 5e6), (1000, 2.0)])
def test_a_poisson_batch_is_as_good_as_never_larger_than_its_likely_size(n: int, mean: float) -> None:
    sampler = PoissonSampler(dataset_size=n, batch_size=mean)
    most = sampler.likely_batch_size
    assert most < min(n, mean + 200 + 15 * math.sqrt(mean))
    assert binom.logsf(most, n, sampler.sample_rate) < math.log(1e-30)


def sampled(sampler) -> Plan:
    return Plan(methods.dp_sgd(lr=0.1, max_grad_norm=2.0, noise_multiplier=1.5), sampler, 3)


def statement(plan: Plan) -> Statement:
    return state(plan, 1e-9, steps_taken=3, keys=RunKeys.new(), backend="numpy")


@pytest.mark.parametrize(("sampler", "terms"), [
    (PoissonSampler(dataset_size=3_100_000, sample_rate=1.0), 3_100_000),
    (UserSampler(PoissonSampler(dataset_size=10, batch_size=5), np.arange(1000) % 10, 100), 10),
    (FixedOrderSampler(dataset_size=20_000_000, batch_size=5_000_000), 5_000_000),
    (FixedOrderSampler(dataset_size=20_000_000, batch_size=500_000), 500_000),
    (TruncatedPoissonSampler(dataset_size=10_000_000, batch_size=1000, max_batch_size=2000), 2000),
    (UserSampler(FixedOrderSampler(dataset_size=10, batch_size=5), np.arange(1000) % 10, 100), 5),
])  # fmt: skip
def test_the_noise_covers_the_rounding_of_the_largest_batch(sampler, terms: int) -> None:
    plan = sampled(sampler)
    assert plan.sampler.likely_batch_size == terms
    assert plan.noise_standard_deviation() == 3
    layout, x, drawn = Layout.of([("x", (2,))]), [np.zeros(2)], []
    mechanism = Mechanism(plan, layout, x, backend=load_backend("numpy"), keys=RunKeys.new())

    class Told:
        def __getattr__(self, name: str) -> Any:
            return getattr(load_backend("numpy"), name)

        def step(self, slots: Any, noise: Any, *others: Any, **more: Any) -> None:
            drawn.append(noise.scale)

    mechanism.backend = Told()  # type: ignore[assignment]
    mechanism.release(x)
    assert drawn == [pytest.approx(3 * (1 + rounding(terms)), rel=1e-8)]
    assert drawn[0] >= 3 * (1 + rounding(terms))


@pytest.mark.parametrize(
    ("size", "words"),
    [(5_000_000, "2.9e-03 of the clip norm more; the noise is raised"), (500_000, "raised"), (900, "")],
)
def test_a_statement_says_how_much_rounding_may_move_a_sum(size: int, words: str) -> None:
    said = statement(sampled(FixedOrderSampler(dataset_size=2 * size, batch_size=size)))
    sentences = [sentence for sentence in said.caveats if "Rounding" in sentence]
    assert len(sentences) == bool(words)
    assert all(words in sentence and f"{size:,}" in sentence for sentence in sentences)
    assert not [finding for finding in verify(said) if finding.status == FAILED]


def test_the_mechanisms_sum_is_in_float64_and_its_release_in_the_dtype_of_the_parameters() -> None:
    plan = Plan(methods.dp_sgd(lr=1.0, noise_multiplier=0.0), FixedOrderSampler(dataset_size=3, batch_size=3), 1)
    x = [np.zeros(2, np.float32)]
    mechanism = Mechanism(plan, Layout.of([("x", (2,))]), x, backend=load_backend("numpy"), keys=RunKeys.new())
    mechanism.add([np.float32([[0.5, 2.0**-40]] * 3)])
    assert mechanism.vectors.totals[0].tolist() == [1.5, 3 * 2.0**-40]
    mechanism.release(x)
    assert x[0].dtype == np.float32
    assert x[0].tolist() == [-0.5, -(2.0**-40)]
