"""The adaptive clip norm: its trajectory, its noise, what it costs, what it keeps, and what it does not go with."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import dpcore
from dpcore import accounting, methods
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan import scales
from dpcore.plan.plan import Plan, grid_of
from dpcore.sampling import FixedOrderSampler, FixedSizeSampler, PoissonSampler, UserSampler
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.stream import Stream
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.clipping.adaptive import REACH, RunningNorm, limits, twice_the_bits
from dpcore.statement.verify import holds, verify
from tests.depth import pairs
from tests.unit.mechanism_tools import interrupted, started

POISSON = PoissonSampler(dataset_size=60, batch_size=20)


def rows_of(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Vectors of all sizes; every tenth is zero, every eleventh is not finite."""
    grid = np.cos(np.arange(1, 4)[None, :] * (indices[:, None] + 1) + x)
    vectors = grid * np.exp(2 * np.cos(3.0 * indices))[:, None]
    vectors[indices % 10 == 3] = 0.0
    vectors[indices % 11 == 5, 1] = np.nan
    return vectors


@pytest.mark.parametrize("rule", ["standard", "normalized"])
def test_a_loop_over_single_examples_moves_norm_and_parameters_alike(rule: str) -> None:
    sigma, bits_std, gamma, eta, batch, steps = 0.8, 3.0, 0.7, 0.5, 20.0, 12
    noise = np.random.default_rng(0).normal(size=(steps, 4))
    adaptive = AdaptiveClip(target_quantile=gamma, learning_rate=eta, bit_noise_std=bits_std)
    method = methods.dp_sgd(
        lr=0.3, noise_multiplier=sigma, max_grad_norm=5.0, clipping=rule, adaptive_clip=adaptive
    )  # fmt: skip
    key = bytes(range(32))
    found = dpcore.minimize(
        rows_of, np.zeros(3), POISSON, method, steps=steps, noise=noise, key=key, exact_key=True, record=True
    )
    sampling = RunKeys.new(key, exact_key=True).sampling
    z = 1 / math.sqrt(1 / sigma**2 - 1 / (2 * bits_std) ** 2)
    x, norm, norms, path = np.zeros(3), 5.0, [5.0], [np.zeros(3)]
    for t in range(steps):
        total, bits = np.zeros(3), 0.0
        for i in POISSON.indices(sampling, t):
            v = rows_of(x, np.array([i]))[0]
            size = math.sqrt(v @ v)
            if not math.isfinite(size):
                bits -= 0.5
            elif size > 0:
                clipped = v * min(1.0, norm / size)
                total += clipped if rule == "standard" else clipped / norm
                bits += 0.5 if size <= norm else -0.5
        bound = norm if rule == "standard" else 1.0
        x = x - 0.3 * (total + z * bound * noise[t, :3]) / batch
        share = (bits + bits_std * noise[t, 3]) / batch + 0.5
        norm *= math.exp(-eta * (share - gamma))
        norms.append(norm)
        path.append(x)
    np.testing.assert_allclose(found.clip_norms, norms, rtol=1e-9)
    np.testing.assert_allclose(found.path, path, rtol=1e-7, atol=1e-9)  # noise on a grid of 2^-36
    assert len(set(norms)) == steps + 1


@pytest.mark.parametrize(("quantile", "initial"), pairs([0.5, 0.2, 0.9], [1e-3, 1.0, 1e3], 3))
def test_without_noise_the_norm_comes_to_the_quantile(quantile: float, initial: float) -> None:
    sizes = np.exp(np.random.default_rng(1).normal(size=400))
    method = methods.dp_sgd(
        lr=0.1, noise_multiplier=0.0, max_grad_norm=initial, adaptive_clip=AdaptiveClip(quantile, 0.3, 0.0)
    )
    sampler = FixedOrderSampler(dataset_size=400, batch_size=400)
    found = dpcore.minimize(lambda _, i: sizes[i, None], np.zeros(1), sampler, method, steps=500)
    low, high = np.quantile(sizes, [quantile - 0.01, quantile + 0.01])
    assert low <= found.clip_norms[-1] <= high
    assert found.plan.epsilon(1e-5) == math.inf


@given(st.floats(0.05, 20), st.floats(0.5001, 50))
def test_the_raised_noise_is_the_definition(sigma: float, ratio: float) -> None:
    bits = ratio * sigma
    z = scales.raised_multiplier(sigma, bits)
    assert z >= sigma
    assert math.hypot(1 / z, 1 / (2 * bits)) == pytest.approx(1 / sigma, rel=1e-9)


def test_sum_and_bits_cost_what_one_release_of_the_noise_multiplier_costs() -> None:
    """By the accountant: two Gaussian releases about the same example."""
    sigma, bits = 1.3, 0.9
    sums = accounting.Gaussian(scales.raised_multiplier(sigma, bits), 1)
    both = accounting.Composed((sums, accounting.Gaussian(bits / 0.5, 1)))
    one = accounting.Gaussian(sigma, 1)
    assert accounting.epsilon(both, 1e-5, "gaussian") == pytest.approx(
        accounting.epsilon(one, 1e-5, "gaussian"), rel=1e-9
    )
    assert accounting.epsilon(sums, 1e-5, "gaussian") < accounting.epsilon(one, 1e-5, "gaussian")


def test_the_event_is_that_of_a_fixed_norm() -> None:
    for sampler in (POISSON, FixedOrderSampler(dataset_size=60, batch_size=20)):
        fixed, adapted = (
            Plan(methods.dp_sgd(lr=0.1, noise_multiplier=0.9, adaptive_clip=clip), sampler, 10)
            for clip in (None, AdaptiveClip())
        )
        assert adapted.event == fixed.event
        assert adapted.noise_standard_deviation() > fixed.noise_standard_deviation()
        assert adapted.bit_noise_standard_deviation == 1.0


def test_where_an_example_is_replaced_both_bounds_double() -> None:
    """The event's multiplier, relative to 2C, is half of sigma; so is that of the pair, whose bits move by 1."""
    sampler = FixedSizeSampler(dataset_size=60, batch_size=20)
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=0.9, adaptive_clip=AdaptiveClip()), sampler, 10)
    moved = math.hypot(2 / plan.gradient_noise_multiplier, 1 / plan.bit_noise_standard_deviation)
    assert plan.event.noise_multiplier == pytest.approx(1 / moved, rel=1e-12)


def drawn_noise(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """The noise of a run whose sums are known, in units of what its bound allows: on the average, and on the bits."""
    adaptive = AdaptiveClip(target_quantile=0.5, learning_rate=0.01, bit_noise_std=3.0)
    method = methods.dp_sgd(lr=0.1, noise_multiplier=2.0, max_grad_norm=4.0, adaptive_clip=adaptive)
    sampler = FixedOrderSampler(dataset_size=10, batch_size=10, shuffle=False)
    sizes = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 1e6, 2e6, 3e6, 4e6, 5e6])
    found = dpcore.minimize(
        lambda _, i: sizes[i, None], np.zeros(1), sampler, method, steps=steps, key=bytes(32), exact_key=True,
        record_gradients=True,
    )  # fmt: skip
    norms = np.asarray(found.clip_norms)
    assert norms.min() > 0.5
    sums = found.gradients[:, 0] * 10 - (1.5 + 5 * norms[:-1])
    bits = 10 * (np.log(norms[1:] / norms[:-1]) / -0.01)  # the true sum is 5 halves less 5 halves
    return sums / norms[:-1], bits


def test_the_noise_on_sum_and_bits_has_the_scale_that_the_event_needs_and_no_other() -> None:
    sums, bits = drawn_noise(2000)
    raised = 1 / math.sqrt(1 / 4 - 1 / 36)
    for noise, scale in ((sums, raised), (bits, 3.0)):
        assert stats.kstest(noise / scale, "norm").pvalue > 1e-3
        for wrong in (0.9, 0.5, 1.1):
            assert stats.chi2.sf(np.sum((noise / (wrong * scale)) ** 2), noise.size) < 1e-5 or wrong > 1
            assert stats.chi2.cdf(np.sum((noise / (wrong * scale)) ** 2), noise.size) < 1e-5 or wrong < 1
    assert abs(np.corrcoef(sums, bits)[0, 1]) < 0.08
    assert abs(np.corrcoef(bits[1:], bits[:-1])[0, 1]) < 0.08


def test_the_bits_have_a_stream_of_their_own() -> None:
    _, bits = drawn_noise(5)
    keys, backend = RunKeys.new(bytes(32), exact_key=True), load_backend("numpy")
    draws = {
        stream: [backend.normal(keys.noise, t, stream, 0, 1)[0] for t in range(5)]
        for stream in (Stream.CLIP_BOUND, Stream.GRADIENT)
    }
    np.testing.assert_allclose(bits / 3.0, draws[Stream.CLIP_BOUND], rtol=1e-9)
    assert not np.allclose(bits / 3.0, draws[Stream.GRADIENT])


def advance(mechanism: Mechanism, x: list[np.ndarray], steps: int, parts: int = 1) -> None:
    for _ in range(steps):
        indices = mechanism.draw()
        for part in np.array_split(indices, parts):
            vectors = [np.cos(np.outer(part + 1.0, np.arange(p.size) + 1.0) + p.reshape(-1)) for p in x]
            mechanism.add([(v * (1 + part[:, None] % 7)).astype(np.float32) for v in vectors])
        mechanism.release(x)


ADAPTED = methods.dp_sgd(lr=0.1, noise_multiplier=0.7, adaptive_clip=AdaptiveClip())


def build() -> tuple[Mechanism, list[np.ndarray]]:
    keys = RunKeys.new(bytes(range(32)), exact_key=True)
    return started(Plan(ADAPTED, POISSON, 12, ("w", "b")), [("w", (2, 2)), ("b", (2,))], keys=keys)


def test_the_bits_of_microbatches_add_up_and_a_discarded_sum_takes_its_bits_along() -> None:
    whole, x = build()
    advance(whole, x, 3)
    parts, y = build()
    parts.add([np.full((5, p.size), 9.0, np.float32) for p in y])
    parts.discard()
    advance(parts, y, 3, parts=4)
    assert parts.clip_norms == whole.clip_norms


def test_an_interrupted_step_leaves_the_norm_as_it_was_and_its_row_spent() -> None:
    mechanism, x = build()
    advance(mechanism, x, 2)
    before = mechanism.clip_norm
    mechanism.add([np.ones((3, p.size), np.float32) for p in x])
    with pytest.raises(KeyboardInterrupt):
        mechanism.release(x, observe=interrupted)
    assert mechanism.clip_norm == before
    assert len(mechanism.clip_norms) == mechanism.step + 1 == 4
    advance(mechanism, x, 1)
    assert mechanism.clip_norm != before


def test_the_norm_stays_within_its_limits_whatever_the_noise() -> None:
    adaptive = AdaptiveClip(0.5, 10.0, 1.0)
    assert adaptive.next_norm(3.0, 1e6, 10.0, 3.0) == 3.0 / REACH
    assert adaptive.next_norm(3.0, -1e6, 10.0, 3.0) == 3.0 * REACH
    assert adaptive.next_norm(3.0, 0.0, 10.0, 3.0) == 3.0
    assert limits(2.0) == (2e-6, 2e6)


def test_the_statement_says_what_moves_and_is_verified() -> None:
    statement = dpcore.minimize(rows_of, np.zeros(3), POISSON, ADAPTED, steps=5).statement(1e-5)
    raised = 1 / math.sqrt(1 / 0.7**2 - 1 / 2.0**2)
    assert statement.clip["adaptive"]["target_quantile"] == 0.5
    assert (statement.clip["max_grad_norm"], statement.clip["greatest_norm"]) == (1.0, 1e6)
    assert statement.noise["standard_deviation_on_bits"] == 1.0
    assert statement.noise["multiplier_on_sum"] == pytest.approx(raised, rel=1e-12)
    assert statement.event["noise_multiplier"] == statement.noise["noise_multiplier"] == 0.7
    text = " ".join(statement.text().split())
    assert "multiplier on the sum times the sensitivity under the norm in force" in text
    assert holds(verify(statement))
    wrong = replace(statement, noise={**statement.noise, "multiplier_on_sum": 0.7})
    assert not holds(verify(wrong))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: Plan(methods.dp_sgd(lr=0.1, noise_multiplier=2.0, adaptive_clip=AdaptiveClip()), POISSON, 5),
         PrivacyError, r"bit_noise_std=1.0: must be more than half of noise_multiplier=2.0"),
        (lambda: Plan(methods.dp_sgd(lr=0.1, adaptive_clip=AdaptiveClip()), POISSON, 5).calibrated(0.1, 1e-6),
         PrivacyError, "bit_noise_std=1.0: must be more than half"),
        (lambda: dpcore.minimize(rows_of, np.zeros(3), POISSON, ADAPTED, steps=5, noise=np.zeros((5, 3))),
         ArgumentError, r"noise.shape=\(5, 3\): must be \(5, 4\)"),
        (lambda: dpcore.minimize(
            lambda _, i: np.zeros((len(i), 1), np.float32), np.zeros(1, np.float32), POISSON,
            methods.dp_sgd(lr=0.1, noise_multiplier=0.7, max_grad_norm=1e26, adaptive_clip=AdaptiveClip()), steps=2),
         ArgumentError, "which is out of the range of float32"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence(make, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_the_noise_on_bits_has_a_grid_finer_than_a_bit() -> None:
    """Where one step of the grid were an example's bit, the noise that makes up for it would be infinite."""
    sampler = PoissonSampler(dataset_size=100, batch_size=10)

    def grid(bit_noise_std: float) -> object:
        clip = AdaptiveClip(bit_noise_std=bit_noise_std)
        return grid_of(Plan(methods.dp_sgd(lr=0.1, noise_multiplier=1.0, adaptive_clip=clip), sampler, 3), 5)

    grid(2.0**36 / 13)
    with pytest.raises(ArgumentError, match=r"bit_noise_std=.*must be at most 5.73e\+09"):
        grid(2.0**36 / 3)


def test_a_user_gives_one_bit_for_the_sum_of_the_user() -> None:
    users = UserSampler(FixedOrderSampler(dataset_size=3, batch_size=3), [0, 0, 0, 1, 1, 2], 5)
    method = methods.dp_sgd(lr=0.1, noise_multiplier=1.0, adaptive_clip=AdaptiveClip(0.5, 0.2, 1.0))
    found = dpcore.minimize(
        lambda _, i: np.full((len(i), 1), 0.4), np.zeros(1), users, method, steps=1, noise=np.zeros((1, 2))
    )
    # 1.2 is above the norm of 1, 0.8 and 0.4 below: half a bit more below than above.
    assert found.clip_norms[1] == pytest.approx(math.exp(-0.2 * 0.5 / 3), rel=1e-12)


def test_bits_by_hand() -> None:
    """At most C is small, the norm itself included; a zero vector has no bit; what is not finite is large."""
    cases = {1.0: 1, 0.5: 1, np.nextafter(1.0, 2): -1, 0.0: 0, 1e-9: 0, 1e-7: 1, np.inf: -1, np.nan: -1}
    for norm, bit in cases.items():
        assert twice_the_bits(np.array([norm]), 1.0) == bit
    assert twice_the_bits(np.array([*cases]), 1.0) == sum(cases.values())


def test_steps_that_were_cut_off_left_the_norm_as_it_was() -> None:
    running = RunningNorm(AdaptiveClip(), 2.0, 10.0)
    running.keep(1, 3.0)
    running.keep(4, 5.0)
    assert running.norms == [2.0, 3.0, 3.0, 3.0, 5.0]
    assert running.at(6) == [2.0, 3.0, 3.0, 3.0, 5.0, 5.0, 5.0]
