"""Sums over very large batches: one example moves a sum by no more than its clip norm, exactly."""

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from dpcore import methods
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler, PoissonSampler, TruncatedPoissonSampler, UserSampler
from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import rounding_of_rows
from dpcore.spec.keys import RunKeys
from dpcore.stages.clipping.blocks import Linear
from dpcore.statement.build import state
from dpcore.statement.statement import Statement
from dpcore.statement.verify import verify
from dpcore.statement.verify.finding import FAILED
from tests.unit.mechanism_tools import NumPyBut, interrupted, started

C, UNIT = 1.0, 2.0**-30


def clipped_sum(rows: np.ndarray, backend: str = "numpy") -> np.ndarray:
    """The sum as the mechanism makes it, in steps of the grid: norms, certified weights, integers."""
    port, size = load_backend(backend), rows.shape[1]
    on_device = [port.from_numpy(rows)]
    norms, rounding = [port.row_norms(on_device)], [rounding_of_rows(size)]
    (weights,) = port.clip_factors(norms, "standard", [C], [size], rounding, UNIT)
    total = port.zeros_like(port.from_numpy(np.zeros(size)))
    port.weighted_sum(on_device, [weights], [total])
    return port.to_numpy(total)


def regression(examples: int, dimension: int, dtype: str = "float32") -> np.ndarray:
    """Gradients of a linear regression far from its minimum: all clipped, all of one side."""
    rng = np.random.default_rng(examples)
    features = rng.normal(1, 0.3, (examples, dimension))
    return ((features @ np.full(dimension, 10.0))[:, None] * features).astype(dtype)


@pytest.mark.parametrize(("examples", "dimension", "dtype"), [(200_000, 41, "float64"), (1_000_000, 9, "float32")])
def test_one_example_moves_a_very_large_sum_by_its_clip_norm(examples: int, dimension: int, dtype: str) -> None:
    """By its own integers, whatever the others and their order are. With float32 sums it was 5.65 C."""
    rows = regression(examples, dimension, dtype)
    whole = clipped_sum(rows)
    for removed in (0, examples // 3, examples - 1):
        moved = whole - clipped_sum(np.delete(rows, removed, axis=0))
        np.testing.assert_array_equal(moved, clipped_sum(rows[removed : removed + 1]))
        assert 0.99 * C < UNIT * np.linalg.norm(moved) <= C
    np.testing.assert_array_equal(whole, clipped_sum(rows[::-1]))


@pytest.mark.gpu
def test_one_example_moves_a_sum_by_its_clip_norm_under_triton() -> None:
    pytest.importorskip("triton")
    rows = regression(3000, 5)
    whole, less = clipped_sum(rows, "triton"), clipped_sum(rows[1:], "triton")
    np.testing.assert_array_equal(whole - less, clipped_sum(rows[:1], "triton"))
    assert 0.99 * C < UNIT * np.linalg.norm(whole - less) <= C


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
def test_the_noise_on_a_sum_is_what_the_plan_says(sampler, terms: int) -> None:
    """Sums are exact, however large a batch may be: nothing is added for their rounding."""
    plan = sampled(sampler)
    assert plan.sampler.likely_batch_size == terms
    drawn = []

    def step(slots: Any, noise: Any, *others: Any, **more: Any) -> None:
        drawn.append((noise.scale, noise.bits, more["unit"]))

    mechanism, x = started(plan, [("x", (2,))], np.float64, backend=NumPyBut(step=step))
    mechanism.release(x)
    ((scale, bits, unit),) = drawn
    assert scale == plan.noise_standard_deviation() == 3
    assert unit == 3 * 2.0**-bits
    assert terms * 2 / unit <= 2.0**48


def test_a_statement_of_a_very_large_batch_has_no_sentence_about_rounding() -> None:
    said = statement(sampled(FixedOrderSampler(dataset_size=10_000_000, batch_size=5_000_000)))
    assert not [sentence for sentence in said.caveats if "Rounding" in sentence]
    assert not [finding for finding in verify(said) if finding.status == FAILED]


def test_the_mechanisms_sum_is_in_float64_and_its_release_in_the_dtype_of_the_parameters() -> None:
    plan = Plan(methods.dp_sgd(lr=1.0, noise_multiplier=0.0), FixedOrderSampler(dataset_size=3, batch_size=3), 1)
    mechanism, x = started(plan, [("x", (2,))])
    mechanism.add([np.float32([[0.5, 2.0**-30]] * 3)])
    assert mechanism.unit == 2.0**-80
    assert (mechanism.unit * mechanism.vectors.totals[0]).tolist() == [1.5, 3 * 2.0**-30]
    mechanism.release(x)
    assert x[0].dtype == np.float32
    assert x[0].tolist() == [-0.5, -(2.0**-30)]


def test_nothing_that_the_totals_held_before_a_step_is_in_its_sum() -> None:
    """They keep a released sum until the next one takes its place: of a step without examples, that is zeros."""
    plan = Plan(methods.dp_sgd(lr=1.0, noise_multiplier=0.0), FixedOrderSampler(dataset_size=3, batch_size=3), 4)
    mechanism, x = started(plan, [("x", (2,))])
    for _ in range(2):
        mechanism.add([np.float32([[0.5, 0.0]])])
        mechanism.add([np.float32([[0.0, 0.25]])])
        assert mechanism.summed().tolist() == [0.5, 0.25]
        mechanism.release(x)
        mechanism.vectors.totals[0][:] = np.nan
    assert mechanism.summed().tolist() == [0, 0]
    mechanism.vectors.totals[0][:] = np.nan
    mechanism.discard()
    mechanism.release(x)
    assert np.isfinite(x[0]).all()


def test_what_an_interruption_leaves_of_a_first_addition_is_not_in_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tensors one is summed, and the other one still has the sum of the step before."""
    sampler = FixedOrderSampler(dataset_size=2, batch_size=2)
    plan = Plan(methods.dp_sgd(lr=1.0, noise_multiplier=0.0), sampler, 2, ("x", "y"))
    port = NumPyBut()
    mechanism, x = started(plan, [("x", (1,)), ("y", (1, 1))], backend=port)
    rows, pair = np.float32([[0.25]]), Linear((np.float32([[[0.5]]]),), (np.float32([[[0.5]]]),), (1.0,))
    mechanism.add([rows, pair])
    mechanism.release(x)
    monkeypatch.setattr(port, "linear_sums", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        mechanism.add([rows, pair])
    monkeypatch.undo()
    mechanism.add([rows, pair])
    assert mechanism.summed().tolist() == [0.25, 0.25]
