"""The audit of every method, of their variants, and under every sampler: a lower bound below the claim, no flag."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dpcore import methods
from dpcore.audit import audit
from dpcore.methods import METHODS, VARIANTS
from dpcore.sampling import (
    CyclicPoissonSampler,
    FixedBatches,
    FixedOrderSampler,
    FixedSizeSampler,
    PoissonSampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
    UserSampler,
)
from dpcore.spec.ops import CLIP_RULES
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.method import Method
from dpcore.stages.updates.galore import GaLore
from tests.depth import chosen, pairs

KEY = bytes([5]) * 32
ORDER = FixedOrderSampler(dataset_size=160, batch_size=40)
SINGLE = FixedOrderSampler(dataset_size=4, batch_size=1)
SAMPLERS: dict[str, Any] = {
    "poisson": PoissonSampler(dataset_size=300, batch_size=30),
    "everybody": PoissonSampler(dataset_size=100, sample_rate=1.0),
    "truncated": TruncatedPoissonSampler(dataset_size=300, batch_size=30, max_batch_size=36),
    "cut in every second step": TruncatedPoissonSampler(dataset_size=300, batch_size=30, max_batch_size=30),
    "users": UserSampler(PoissonSampler(dataset_size=150, batch_size=15), [i % 150 for i in range(400)], 2),
    "fixed size": FixedSizeSampler(dataset_size=300, batch_size=30),
    "cyclic": CyclicPoissonSampler(dataset_size=300, batch_size=30, groups=3),
    "shuffled": ShuffledSampler(dataset_size=160, batch_size=40),
    "fixed batches": FixedBatches([range(20), range(10, 40), [], range(40)]),
}
PRIVATE_VARIANTS = [name for name in VARIANTS if not name.startswith("noiseless")]
DELAYED = {"unscaled_steps": 2, "scaled_steps": 2, "max_scaled_norm": 3.0}
BANDS = np.linalg.inv(np.linalg.inv(np.eye(9) + 0.5 * np.eye(9, k=-1) + 0.25 * np.eye(9, k=-2)))


def passes(method: Method, sampler: Any, steps: int = 9, **settings: Any) -> float:
    """Audit in half as many runs as by default; return how much of the claim was shown."""
    found = audit(method, sampler, steps, **{"delta": 1e-5, "key": KEY, "runs": 16, **settings})
    assert not found.flagged, str(found)
    assert 0 <= found.lower_bound_any <= found.lower_bound < found.claimed_epsilon
    assert found.noise_ratio == pytest.approx(1, abs=0.03)
    return found.lower_bound / found.claimed_epsilon


@pytest.mark.parametrize("name", METHODS)
def test_every_method(name: str) -> None:
    # A bound that is far too low would pass as well: the audit must come near to be worth anything.
    assert passes(METHODS[name](lr=0.1, noise_multiplier=2.0), ORDER) > 0.4


@pytest.mark.parametrize(("variant", "make"), pairs(PRIVATE_VARIANTS, [methods.dp_adam, methods.dp_adagrad], 2))
def test_every_variant(variant: str, make: Callable[..., Method]) -> None:
    more: dict[str, Any] = DELAYED if variant.startswith("delayed") else {}
    single = variant == "joint_moments"
    method = make(lr=0.1, noise_multiplier=2.0, variant=variant, **more)
    # Independent moments meet the bound of the square in batches of one only; joint ones have few canaries here.
    less = 0.25 if variant in ("independent_moments", "joint_moments") else 0.4
    assert passes(method, SINGLE if single else ORDER, **({"runs": 64} if single else {})) > less


def test_independent_moments_in_batches_of_one_show_both_releases() -> None:
    method = methods.dp_adam(lr=0.1, noise_multiplier=2.0, variant="independent_moments")
    # One audit of so few runs shows something or nothing by luck.
    assert max(passes(method, SINGLE, steps=8, runs=96, key=bytes([k]) * 32) for k in chosen((3,), (1, 2, 3))) > 0.3


SAMPLED = ["dp_sgd", "disk", "doppler", "pmlf", "inner_outer", "dp_adam", "dp_adagrad"]


@pytest.mark.parametrize(("name", "sampler"), pairs(SAMPLED, SAMPLERS, 7))
def test_every_sampler(name: str, sampler: str) -> None:
    passes(METHODS[name](lr=0.1, noise_multiplier=1.0), SAMPLERS[sampler], runs=8)


@pytest.mark.parametrize(
    ("name", "sampler"), pairs(["memf", "srg_memf", "accelerated_srgd"], ["shuffled", "fixed batches"], 2)
)
def test_correlated_noise_under_other_orders(name: str, sampler: str) -> None:
    passes(METHODS[name](lr=0.1, noise_multiplier=2.0), SAMPLERS[sampler])


GROUPS = ["flat", "per_layer", "per_tensor", {"first.*": 0.3, "*": 2.0}]


@pytest.mark.parametrize(("clipping", "groups"), pairs(CLIP_RULES, GROUPS, 4))
def test_every_clip(clipping: str, groups: Any) -> None:
    method = methods.dp_sgd(lr=0.1, noise_multiplier=2.0, clipping=clipping, clipping_groups=groups, max_grad_norm=7.0)
    assert passes(method, ORDER) > 0.4


def test_an_adaptive_clip_a_subspace_banded_noise_and_acceleration() -> None:
    adaptive = methods.dp_sgd(lr=0.1, noise_multiplier=1.0, adaptive_clip=AdaptiveClip(bit_noise_std=1.5))
    for sampler in (ORDER, SAMPLERS["users"], SAMPLERS["fixed size"]):
        passes(adaptive, sampler, runs=8)
    passes(methods.doppler(lr=0.1, noise_multiplier=2.0, base="adam", galore=GaLore(1, every=2)), ORDER)
    passes(methods.memf(lr=0.1, noise_multiplier=1.0, strategy=BANDS), SAMPLERS["cyclic"])
    for variant in ("unaccelerated", "independent"):
        passes(methods.accelerated_srgd(lr=0.1, noise_multiplier=2.0, variant=variant), ORDER)


@pytest.mark.gpu
def test_the_triton_backend() -> None:
    pytest.importorskip("triton")
    from dpcore.spec.backends import use_backend

    method = methods.disk(lr=0.1, noise_multiplier=1.0)
    with use_backend("triton"):
        passes(method, FixedOrderSampler(dataset_size=64, batch_size=32), steps=2, runs=1, dtype="float32")
