"""Whole runs of every method: NumPy and Triton draw the same batches and words, and end at the same place."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dpcore
from dpcore import methods, sampling
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import CLIP_RULES
from dpcore.stages import queries
from dpcore.stages.filters import NAMED_FILTERS, OptimalFIR, ScalarKalman
from dpcore.stages.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.stages.strategies import BLT, NamedStrategy, from_matrix
from dpcore.stages.updates import Adam, Momentum
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import WarmupCosine
from tests.agreement.runs import RNG
from tests.depth import chosen

pytest.importorskip("triton")

EXAMPLES, STEPS = 30, 3
few = settings(max_examples=max(1, settings().max_examples // 30))

pick = st.sampled_from
bases = pick(["sgd", "momentum", "nesterov", "adam", "adamw", "adagrad"])
decays = pick([0.0, 0.1])
bands = np.array([[1.0, 0, 0], [0.5, 1, 0], [0, 0.4, 1]])
full = np.array([[1.0, 0, 0], [0.5, 1, 0], [0.3, 0.4, 1]])
banded, blt = NamedStrategy("banded-inverse-square-root", 2), BLT([0.4, 0.1], [0.9, 0.3], STEPS)
correlations = pick(["identity", "tree", "tree-optimal", "square-root", bands, full, banded, blt])
shared = st.fixed_dictionaries({
    "lr": pick([0.01, 0.3]), "max_grad_norm": pick([0.1, 1.0, 30.0]), "clipping": pick(CLIP_RULES),
    "noise_multiplier": pick([0.3, 2.0]), "schedule": pick([None, WarmupCosine(1, 0.1)]),
    "averaging": pick([None, None, ExponentialAverage(0.5), UniformAverage(1)]), "radius": pick([None, None, 2.0]),
})  # fmt: skip


def build(make: Callable[..., dpcore.Method], **drawn: st.SearchStrategy) -> st.SearchStrategy[dpcore.Method]:
    return st.builds(lambda rest, own: make(**rest, **own), shared, st.fixed_dictionaries(drawn))


def free(query, update, strategy, lr, max_grad_norm, clipping, noise_multiplier, **rest) -> dpcore.Method:
    """A combination that has no name."""
    if strategy is None:
        noise = IndependentGaussian(noise_multiplier)
    else:
        if not hasattr(strategy, "describe"):
            strategy = NamedStrategy(strategy) if isinstance(strategy, str) else from_matrix(strategy)
        noise = CorrelatedGaussian(noise_multiplier, strategy)
    clip = dpcore.clipping.Clip(max_grad_norm, clipping)
    return dpcore.Method(query=query, update=update(lr), clip=clip, noise=noise, **rest)


scales = st.fixed_dictionaries(
    {
        "scale_eps": pick([1e-2, 0.3]),
        "max_scaled_norm": pick([None, 2.0]),
        "eps": pick([1e-3]),
        "max_update_norm": pick([None, 0.5]),
    }
)
adaptive = {"weight_decay": decays, "strategy": st.one_of(st.none(), correlations)}


def preconditioned(make: Callable[..., dpcore.Method]) -> st.SearchStrategy[dpcore.Method]:
    cycle = pick([("scale_then_privatize", {}), *(
        (variant, {"unscaled_steps": s1, "scaled_steps": s2})
        for variant, s1, s2 in (
            ("delayed_preconditioner", 1, 1), ("delayed_preconditioner", 2, 2), ("delayed_scale", 1, 2),
            ("delayed_scale", 0, 3),
        )
    )])  # fmt: skip
    return st.builds(
        lambda rest, own, scale, chosen: make(variant=chosen[0], **chosen[1], **rest, **own, **scale),
        shared, st.fixed_dictionaries(adaptive), scales, cycle,
    )  # fmt: skip


METHODS = {
    "dp_sgd": build(methods.dp_sgd, base=bases, weight_decay=decays),
    "dp_sgd, adaptive clip": st.builds(
        lambda rest, **own: methods.dp_sgd(**{**rest, **own}),
        shared, clipping=pick(["standard", "normalized"]), base=bases,
        adaptive_clip=st.builds(dpcore.clipping.AdaptiveClip, pick([0.2, 0.7]), pick([0.2, 3.0]), pick([1.1, 6.0])),
    ),
    "doppler": build(methods.doppler, filter=pick(sorted(NAMED_FILTERS)), base=pick(["sgd", "momentum", "adagrad"])),
    "doppler with adam": build(
        methods.doppler, filter=pick(sorted(NAMED_FILTERS)), base=pick(["adam", "adamw"]), eps=pick([0.03]),
        bias_corrected=st.booleans(), weight_decay=decays,
    ),
    "doppler with optimal weights": build(methods.doppler, filter=pick([OptimalFIR(1), OptimalFIR(2, "paper")])),
    "disk": build(
        methods.disk, kappa=pick([0.3, 0.7, 1.0, ScalarKalman(0.1, 0.2, 0.7)]), gamma=pick([-1.0, 0.5, 1.0]),
        base=bases, filter=pick([None, "second-order"]),
    ),
    "pmlf": build(methods.pmlf, window=pick([1, 2, 3]), beta=pick([0.1, 0.7]), filter=pick(["pmlf-cifar", "p7"])),
    "inner_outer": build(methods.inner_outer, window=pick([2, 3]), weight_decay=decays),
    "memf": build(methods.memf, base=bases, strategy=correlations),
    "srg_memf": build(methods.srg_memf, base=pick(["sgd", "momentum", "adam"]), strategy=correlations,
                      decay=pick([0.08, 1.0, [0.0, 0.5, 0.9]])),
    "accelerated_srgd": build(
        methods.accelerated_srgd, variant=pick(["accelerated", "unaccelerated"]), strategy=correlations
    ),
    "accelerated, independent": build(methods.accelerated_srgd, variant=st.just("independent")),
    "dp_adam": build(methods.dp_adam, **adaptive),
    "dp_adam, bias corrected": build(methods.dp_adam, variant=st.just("bias_corrected"), eps=pick([0.05]), **adaptive),
    "dp_adam, independent": build(
        methods.dp_adam, variant=st.just("independent_moments"), eps=pick([0.05]), **adaptive
    ),
    "dp_adam, noiseless": build(
        methods.dp_adam, variant=st.just("noiseless_preconditioner"), allow_nonprivate=st.just(True), **adaptive
    ),
    "dp_adam, noiseless scale": build(
        methods.dp_adam, variant=st.just("noiseless_scale_then_privatize"), allow_nonprivate=st.just(True), **adaptive
    ),
    "dp_adam, scaled": preconditioned(methods.dp_adam),
    "dp_adam, public": build(methods.dp_adam, variant=st.just("side_information"), **adaptive),
    "dp_adagrad": build(methods.dp_adagrad, **adaptive),
    "dp_adagrad, bias corrected": build(methods.dp_adagrad, variant=st.just("bias_corrected"), **adaptive),
    "dp_adagrad, independent": build(methods.dp_adagrad, variant=st.just("independent_moments"), **adaptive),
    "dp_adagrad, scaled": preconditioned(methods.dp_adagrad),
    "joint moments": build(
        lambda kind, **rest: kind(variant="joint_moments", eps=0.5, **rest),
        kind=pick([methods.dp_adam, methods.dp_adagrad]),
    ),
    "a scaled window of predicted points": build(
        partial(free, queries.Preconditioned(queries.ParameterWindow(2, 0.5, query=queries.TwoPoint(0.7, 0.5)), 0.3)),
        update=st.just(partial(Adam, betas=(0.8, 0.9), eps=1e-2)), strategy=st.one_of(st.none(), correlations),
    ),
    "differences of a window": build(
        partial(free, queries.RecursiveDifference(0.5, queries.ParameterWindow(2, 0.5)),
                filter=dpcore.filters.Accumulation(0.5)),
        update=st.just(Momentum), strategy=st.one_of(st.none(), correlations),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _quick_words() -> Iterator[None]:
    """Let runs draw Philox in the interpreter, where ChaCha20 takes more than twice as long; words have their tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(Mechanism.__init__.__kwdefaults__, "rng", RNG)
        yield


def run(backend: str, method: dpcore.Method, dimension: int, seed: int) -> tuple[np.ndarray, list[bytes]]:
    """The path, and the answer after it; and the batches."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(EXAMPLES, dimension)).astype(np.float32)
    start = rng.normal(size=dimension).astype(np.float32)
    drawn: list[bytes] = []

    def gradient(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        drawn.append(indices.tobytes())
        return np.tanh(features[indices] @ x)[:, None] * features[indices]

    moment = method.update.second_moment
    if moment == "joint":
        sampler: sampling.Sampler = sampling.FixedOrderSampler(dataset_size=EXAMPLES, batch_size=1)
    elif moment == "independent" or method.noise.strategy is not None:
        sampler = sampling.FixedOrderSampler(dataset_size=EXAMPLES, batch_size=6)
    else:
        sampler = sampling.PoissonSampler(dataset_size=EXAMPLES, batch_size=6)
    with dpcore.use_backend(backend):
        result = dpcore.minimize(
            gradient, start, sampler, method, steps=STEPS, key=seed.to_bytes(4, "little") * 8, exact_key=True,
            # Away from 0, where a quotient by the second moment would magnify the rounding of the cosine without bound.
            record=True, public_gradient=(lambda x: 2 + np.cos(x)) if moment == "public" else None,
        )  # fmt: skip
    assert result.path is not None
    assert result.backend == backend
    return np.vstack([result.path, result.x]), drawn


# A step of each kind in which a mechanism puts the operations together otherwise.
RUNS = [
    "dp_sgd, adaptive clip", "disk", "memf", "accelerated_srgd", "dp_adam, independent", "dp_adagrad, scaled",
    "differences of a window", "joint moments",
]  # fmt: skip


@pytest.mark.parametrize("name", chosen(RUNS, list(METHODS)))
def test_whole_runs_agree(name: str) -> None:
    @few
    @given(METHODS[name], pick(chosen([5, 1], [5, 1, 4097])), st.integers(0, 2**32 - 1))
    def check(method: dpcore.Method, dimension: int, seed: int) -> None:
        assume(seed)  # hypothesis begins with the simplest example, which shows least and costs as much as another
        expected, batches = run("numpy", method, dimension, seed)
        got, drawn = run("triton", method, dimension, seed)
        assert drawn == batches
        assert got.dtype == expected.dtype == np.float32
        # Every step rounds each coordinate a few dozen times; quotients by second moments keep relative errors.
        scale = np.abs(expected).max() + np.abs(np.diff(expected, axis=0)).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=256 * np.finfo(np.float32).eps * scale)

    check()


def in_subspaces(backend: str, method: dpcore.Method, seed: int) -> list[np.ndarray]:
    """A matrix, which is projected, and a vector, which is not."""
    rng = np.random.default_rng(seed)
    shapes = [("w", (6, 5)), ("b", (5,))]
    plan = Plan(method, sampling.FixedOrderSampler(dataset_size=8, batch_size=4), STEPS, ("w", "b"))
    port = load_backend(backend)
    x = [port.from_numpy(rng.normal(size=shape).astype(np.float32)) for _, shape in shapes]
    keys = RunKeys.new(seed.to_bytes(4, "little") * 8, exact_key=True)
    mechanism = Mechanism(plan, Layout.of(shapes), x, backend=port, keys=keys)
    for _ in range(STEPS):
        mechanism.add([port.from_numpy(rng.normal(size=(4, p.reshape(-1).shape[0])).astype(np.float32)) for p in x])
        mechanism.release(x)
    return [port.to_numpy(p) for p in mechanism.output(x)]


subspaces = build(
    lambda base, eps, **rest: methods.doppler(base=base, **({} if base == "sgd" else {"eps": eps}), **rest),
    base=pick(["sgd", "adam", "adamw"]), galore=pick([GaLore(2, 2), GaLore(3, 1)]),
    strategy=st.one_of(st.none(), correlations), eps=pick([0.1]),
)  # fmt: skip


@few
@given(subspaces, st.integers(0, 2**32 - 1))
def test_runs_in_subspaces_agree(method: dpcore.Method, seed: int) -> None:
    assume(seed)
    for got, expected in zip(in_subspaces("triton", method, seed), in_subspaces("numpy", method, seed), strict=True):
        assert got.dtype == expected.dtype == np.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=2048 * np.finfo(np.float32).eps * np.abs(expected).max())
