"""What the stages refuse: one sentence each, as soon as the object is made or asked.

A case is a call, and what its sentence must hold; " ... " stands for anything between. `TYPE` marks errors of type.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dpcore import methods, theory
from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError, PrivacyError

from dpcore.stages.filters import (  # isort: skip
    Accumulation, Averaging, Chain, FullKalman, Identity, LowPass, OptimalFIR, ScalarKalman, butterworth, chebyshev,
    named_filter
)  # fmt: skip
from dpcore.stages.clipping import AdaptiveClip, Clip, Grouping
from dpcore.stages.noise import CorrelatedGaussian
from dpcore.stages.queries import ParameterWindow, Preconditioned, RecursiveDifference, TwoPoint

from dpcore.stages.strategies import (  # isort: skip
    BLT, Banded, BandedInverseToeplitz, BandedToeplitz, Dense, SquareRoot, Tree, TreeOptimal,
    banded_inverse_square_root, check_steps, from_matrix, sensitivity, strategy
)  # fmt: skip
from dpcore.stages.updates import SGD, AdaGrad, Adam, Momentum
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import Doubling, WarmupCosine
from dpcore_numpy import recurrence, row_norms, update, weighted_sum

TYPE = "type: "
Calls = list[tuple[Callable[[], Any], str]]


def step(rule: str, settings: Any, *, moments: int = 0, number: int = 1, size: int = 3, square: Any = None) -> None:
    arrays = [np.zeros(3) for _ in range(moments)]
    update(rule, np.zeros(3), np.zeros(size), arrays, settings.settings(), number, square)


UPDATES: Calls = [
    (lambda: SGD(0), "lr=0"), (lambda: SGD(-1), "lr=-1"), (lambda: SGD(math.nan), "lr=nan"),
    (lambda: SGD(0.1, -0.1), "weight_decay=-0.1"), (lambda: Momentum(0.1, 1.0), "momentum=1.0"),
    (lambda: Adam(0.1, (0.9,)), "betas=(0.9,)"), (lambda: Adam(0.1, (0.9, 1.0)), "beta2=1.0"),
    (lambda: Adam(0.1, eps=0), "eps=0"), (lambda: AdaGrad(0.1, -1), "eps=-1"),
    (lambda: AdaGrad(0.1, denominator="floored"), "eps=0"), (lambda: step("adan", SGD(1.0)), "did you mean 'adam'"),
    (lambda: step("adam", Adam(1.0)), "len(moments)=0: must be 2"),
    (lambda: step("sgd", SGD(1.0), number=0), "step_number=0"),
    (lambda: step("sgd", SGD(1.0), size=4), "direction.shape"),
    (lambda: step("sgd", SGD(1.0), square=np.zeros(3)), "square: must be None for rule='sgd'"),
    (lambda: step("adam", Adam(1.0), moments=2, square=np.zeros(4)), "square.shape"),
]  # fmt: skip
BESIDE: Calls = [
    (lambda: ExponentialAverage(1.0), "decay=1.0"), (lambda: ExponentialAverage(-0.1), "decay=-0.1"),
    (lambda: UniformAverage(-1), "start=-1"), (lambda: WarmupCosine(-1), "warmup_steps=-1"),
    (lambda: WarmupCosine(0, -0.1), "final=-0.1"), (lambda: Doubling(confidence=0), "confidence=0"),
    (lambda: Doubling(decay=1), "decay=1: must lie strictly between 0 and 1"),
    (lambda: WarmupCosine(10).check(10), "warmup_steps=10: must be less than the 10 steps of the run; 1 is a tenth"),
    (lambda: GaLore(0), "rank=0"), (lambda: GaLore(2, 0), "every=0"),
]  # fmt: skip
ADAPTIVE = AdaptiveClip(bit_noise_std=5.0)
CLIPS: Calls = [
    *((lambda c=c: Clip(c), f"max_grad_norm={c}") for c in (0.0, -1, math.nan, math.inf)),
    (lambda: Clip(rule="automatc"), "did you mean 'automatic'"), (lambda: Clip(groups="layers"), "groups='layers'"),
    (lambda: Clip(groups={}), "clipping_groups={}"),
    (lambda: Clip(groups={1: 1.0}), TYPE + "clipping_groups: its pattern 1"),
    (lambda: Clip(groups={"*": 0}), "must lie between 1e-100 and 1e100"),
    (lambda: Clip(groups={"c*": 1.0}).grouping(("c.weight", "f.weight")), "no pattern matches the tensor 'f.weight'"),
    (lambda: Clip(groups={"*": 1.0, "f*": 2.0}).grouping(("c.weight", "f.weight")), "matches no tensor"),
    (lambda: Grouping.of({"C.*": 1.0}, 1.0, ("c.weight",)), "no pattern matches the tensor 'c.weight'"),
    (lambda: AdaptiveClip(target_quantile=1.0), "target_quantile=1.0: must lie strictly"),
    (lambda: AdaptiveClip(target_quantile=math.nan), "target_quantile=nan"),
    (lambda: AdaptiveClip(learning_rate=0.0), "learning_rate=0.0: must be greater than 0"),
    (lambda: AdaptiveClip(bit_noise_std=-1.0), "bit_noise_std=-1.0: must be 0 or greater"),
    (lambda: AdaptiveClip(bit_noise_std="some"), TYPE + "bit_noise_std='some'"),
    (lambda: Clip(adaptive=0.5), TYPE + "adaptive_clip=0.5: must be None or a dpcore.clipping.AdaptiveClip"),
    (lambda: Clip(rule="automatic", adaptive=ADAPTIVE), "clipping='automatic': must be 'standard'"),
    (lambda: Clip(rule="automatic_v", adaptive=ADAPTIVE), "clipping='automatic_v': must be"),
    (lambda: Clip(groups="per_layer", adaptive=ADAPTIVE), "clipping_groups='per_layer': must be 'flat'"),
    (lambda: Clip(groups={"*": 1.0}, adaptive=ADAPTIVE), "must be 'flat'"),
    (lambda: methods.disk(lr=0.1, adaptive_clip=ADAPTIVE), "clipping='automatic'"),
    (lambda: methods.memf(lr=0.1, adaptive_clip=ADAPTIVE), "correlated noise ... give strategy=None"),
    *(
        (lambda variant=variant: methods.dp_adam(lr=0.1, variant=variant, adaptive_clip=ADAPTIVE), words)
        for variant, words in (
            ("independent_moments", "second_moment='independent'"), ("joint_moments", "second_moment='joint'"),
            ("bias_corrected", "must be None with bias_corrected"),
            ("scale_then_privatize", "must be None with a preconditioned query"),
        )
    ),
]  # fmt: skip
ROWS = np.ones((2, 3), np.float32)
ARRAYS: Calls = [
    (lambda: row_norms([]), "at least one block"), (lambda: row_norms([ROWS[0]]), "(B, d)"),
    (lambda: row_norms([ROWS, ROWS[:1]]), "rows[1].shape"), (lambda: row_norms([[1.0, 2.0]]), TYPE + "list"),
    (lambda: row_norms([ROWS.astype(np.int16)]), TYPE + "rows[0].dtype=int16: must be float32 or"),
    (lambda: weighted_sum([ROWS], [np.ones(2, np.float16)], [np.zeros(3)]), TYPE + "weights[0].dtype=float16"),
    (lambda: weighted_sum([ROWS], [np.ones(3)], [np.zeros(3)]), "weights[0].shape"),
    (lambda: weighted_sum([ROWS], [np.ones(2, np.float32)], [np.zeros(3)]), TYPE + "weights[0].dtype=float32"),
    (lambda: weighted_sum([ROWS], [np.ones(2)], [np.zeros(6)[::2]]), TYPE + "contiguous"),
    (lambda: weighted_sum([ROWS], [np.ones(2)], [np.zeros(3, np.float32)]),
     TYPE + "out[0].dtype=float32: must be float64"),
]  # fmt: skip
KALMAN = ScalarKalman(sigma_H=0.4, sigma_v=0.1, sigma_w=1.0)
QUERIES: Calls = [
    (lambda: ParameterWindow(0), "window=0"), (lambda: ParameterWindow(2, 1.0), "beta=1.0"),
    (lambda: ParameterWindow(2, -0.1), "beta=-0.1"),
    (lambda: RecursiveDifference(1.1), "decay=1.1: must lie between 0 and 1"),
    (lambda: RecursiveDifference([0.0, -0.5]), "decay=-0.5"),
    (lambda: RecursiveDifference([0.0, 0.5]).points(2), "decay: has 2 steps"),
    (lambda: Preconditioned(Preconditioned()), "scale once"), (lambda: Preconditioned(scale_eps=0), "scale_eps=0"),
    (lambda: Preconditioned(max_scaled_norm=-1), "max_scaled_norm=-1"),
    (lambda: Preconditioned(unscaled_steps=-1), "unscaled_steps=-1"),
    (lambda: Preconditioned(scaled_steps=0), "scaled_steps=0"),
    (lambda: TwoPoint(0.5, 0), "gamma=0.0: must not be 0 ... use doppler(a=[-0.5], b=[0.5])"),
    (lambda: TwoPoint(0.0, 1), "kappa=0.0"),
    (lambda: TwoPoint(KALMAN, 0), "gamma=0.0: must not be 0 ... leave the query plain"),
    (lambda: TwoPoint("0.7", 0.5), TYPE + "kappa"),
]  # fmt: skip


def full(dimension: int = 3, **changes: Any) -> FullKalman:
    settings = {"hessian_covariance": 0.16, "motion_covariance": 0.01, "noise_covariance": 1.0} | changes
    return FullKalman(dimension, allow_nonprivate=True, **settings)


FIR = OptimalFIR(2)
FILTERS: Calls = [
    (lambda: LowPass([0.5], [-1.5]), "pole 1.5"), (lambda: LowPass([2.0], [-1.0]), "unstable"),
    (lambda: LowPass([0.1], [0.2, 1.2]), "modulus 1.095"),
    (lambda: LowPass([0.5], [-0.9]), "gain is 5 and must be 1; divide b by 5"), (lambda: LowPass([]), "b=[]"),
    (lambda: LowPass([0.0, 1.0]), "normalizer c_t is 0 at step 0"),
    (lambda: LowPass([1.0, -1.0, 1.0]), "normalizer c_t is 0 at step 1"), (lambda: LowPass([math.nan]), "b=nan"),
    (lambda: LowPass([1.0, math.inf]), "b=inf"), (lambda: LowPass(["x"]), TYPE + "real number"),
    (lambda: named_filter("first order v1"), "did you mean 'first-order v1'"),
    *((lambda kappa=kappa: Averaging(kappa), "kappa=") for kappa in (0, -0.1, 1.1, math.nan)),
    (lambda: recurrence(np.ones(3), [], *named_filter("momentum").coefficients(0)), "len(state)=0"),
    (lambda: Chain(Identity(), OptimalFIR(3)), "adaptive filter ... cannot be in a chain"),
    (lambda: Chain(0.7), TYPE + "must be filters"), (lambda: Chain(Averaging), TYPE + "must be filters"),
    (lambda: Accumulation(-0.1), "decay=-0.1: must lie between 0 and 1"),
    (lambda: Accumulation(1.01), "between 0 and 1"), (lambda: Accumulation([0, 0.5, 2]), "decay=2: must lie"),
    (lambda: Accumulation([]), "one number a step"), (lambda: Accumulation(math.nan), "finite"),
    (lambda: Accumulation("0.5"), TYPE + "real number"),
    (lambda: Accumulation([0, 0.5, 0.5]).coefficients(3), "<3 numbers>: must have one number a step, also for step 4"),
    (lambda: ScalarKalman(2.0, 0.5, 1.0), "square root ... is not real"),
    (lambda: ScalarKalman(1.1, 1.0, 1.0), "gain would exceed 1"),
    (lambda: ScalarKalman(0.0, 0.0, 1.0), "gain would tend to 0"),
    (lambda: ScalarKalman(0.0, 1e-200, 1.0), "gain would tend to 0"),
    (lambda: ScalarKalman(-0.1, 1.0, 1.0), "sigma_H=-0.1"), (lambda: ScalarKalman(0.1, math.inf, 1.0), "sigma_v=inf"),
    (lambda: ScalarKalman(0.1, 1.0, 1.0, initial_variance=-1), "initial_variance=-1"),
    (lambda: full(2, hessian_covariance=np.diag([0.1, 1.5])), "must not exceed noise_covariance in any direction"),
    (lambda: full(2, motion_covariance=np.diag([1.0, -1.0])), "no negative eigenvalue"),
    (lambda: full(noise_covariance=np.eye(2)), "shape (3, 3)"),
    (lambda: full(observation=math.nan), "observation: must be a finite number"),
    (lambda: full().step(np.ones(2), np.zeros(3)), "gradient: must be a finite array of shape (3,)"),
    (lambda: full(hessian_covariance=1.0, motion_covariance=0.0, observation=0.0).step(np.ones(3), np.zeros(3)),
     "must not be singular"),
    (lambda: butterworth(0, 0.1), "order=0"),
    (lambda: butterworth(4, 0.1), "order=4: must be 1, 2 or 3; steeper filters are chains"),
    (lambda: butterworth(2, 1.0), "cutoff=1.0"), (lambda: butterworth(2, 0), "cutoff=0"),
    (lambda: butterworth(3, 1e-5), "normalizer c_t ... Take a higher cutoff or a lower order"),
    (lambda: butterworth(1, 1e-13), "Take a higher cutoff"), (lambda: chebyshev(2, 0.1, 0), "ripple=0"),
    (lambda: OptimalFIR(0), "length=0"), (lambda: OptimalFIR(2, weighting="optimum"), "did you mean 'optimal'"),
    (lambda: FIR.coefficients(0), "weights depend on the released averages"),
    (lambda: FIR.observe(FIR.initial(), [1.0, 1.0], 0.0), "len(products)=2: must be 1 at step 0"),
    (lambda: FIR.observe(FIR.initial(), [math.inf], 0.0), "finite"),
    (lambda: FIR.observe(FIR.initial(), [1.0], -1.0), "noise_power=-1"),
    (lambda: FIR.weights((0.0,), 0), "len(statistics)=1: must be 6"),
]  # fmt: skip


def bad(place: tuple[int, int], value: float) -> np.ndarray:
    matrix = np.tril(np.ones((4, 4)))
    matrix[place] = value
    return matrix


STRATEGIES: Calls = [
    *(
        (lambda make=make, matrix=matrix: make(matrix), words)
        for make in (Dense, from_matrix, Banded.from_matrix, lambda matrix: strategy(matrix, 3))
        for matrix, words in (
            (bad((0, 2), 0.5), "at row 0, column 2 is above the diagonal"),
            (bad((1, 1), 0.0), "row 1 must be greater than 0: the matrix is singular"),
            (bad((3, 3), -2.0), "row 3 must be greater than 0: multiply that row by -1"),
            (bad((2, 0), math.nan), "nan at (2, 0) must be finite"),
            (bad((2, 0), math.inf), "must be finite"),
            (np.ones((3, 4)), "must be square, ... such as (3, 3)"),
            (np.ones((0, 0)), "at least one entry"),
            (np.ones((2, 2, 2)), "must be 2-dimensional"),
        )
    ),
    (lambda: BandedToeplitz((1e200, 1e200)), "column norm inf is out of range"),
    (lambda: Banded([[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]]), "is in row 3 of 3 and must be 0"),
    (lambda: Banded(np.ones((3, 2))), "at most T = 2 bands"),
    (lambda: BandedToeplitz((0.0, 1.0)), "first coefficient is the diagonal"),
    (lambda: BandedToeplitz(("a",)), TYPE + "real numbers"),
    (lambda: BandedInverseToeplitz((1.0, -2.0), 5000), "overflows within 5000 rows"),
    (lambda: banded_inverse_square_root(9, 8), "bands=9: must be at most 8"),
    *((lambda kind=kind: kind(0), "steps=0") for kind in (SquareRoot, Tree, TreeOptimal)),
    (lambda: CorrelatedGaussian(-1.0, Tree(4)), "noise_multiplier=-1"),
    (lambda: CorrelatedGaussian(1.0, "tree"), TYPE + "strategy='tree': must be a strategy ... strategy(name, steps)"),
    (lambda: strategy(bad((2, 2), 1e-200), 4), "close to singular"),
    (lambda: strategy("squareroot", 5), "did you mean 'square-root'"),
    (lambda: strategy("banded-inverse-square-root", 5), "needs a number of bands"),
    (lambda: strategy("tree", 5, bands=3), "bands=3: is only for"),
    (lambda: strategy(np.eye(5), 5, bands=3), "bands=3: is only for"),
    (lambda: strategy(Tree(8), 9), "steps=9: the strategy (tree) has 8 rows"),
    (lambda: check_steps(from_matrix(np.eye(3)), 4), "the strategy (banded) has 3 rows"),
    (lambda: strategy(3.0, 5), TYPE + "must be a name"), (lambda: BLT((0.5,), (0.5, 0.2), 5), "decays"),
    (lambda: BLT((0.5,), (1.0,), 5), "decays=1.0"), (lambda: BLT((math.nan,), (0.5,), 5), "scales"),
    (lambda: BLT((0.5,), (0.5,), 0), "steps=0"),
]  # fmt: skip
PATTERNS: Calls = [
    *(
        (lambda patterns=patterns: sensitivity(BandedToeplitz((1.0,)), patterns, 12), words)
        for patterns, words in (
            ([[3, 12]], "step 12 is outside of the run, steps 0 to 11"), ([[-1]], "step -1 is outside"),
            ([[3, 1, 3]], "step 3 occurs twice"), ([[0.5]], TYPE + "must be integer steps"),
            ([[[1]]], "one-dimensional"),
        )
    ),
    (lambda: sensitivity(Tree(12), [[1]], 13), "steps=13: must be at most 12"),
]  # fmt: skip
METHODS: Calls = [
    (lambda: methods.disk(lr=0.1, gama=0.5), "did you mean 'gamma'?"),
    (lambda: methods.doppler(lr=0.1, base="adam", filtr="f1"), "did you mean 'filter'?"),
    (lambda: methods.dp_adam(lr=0.1, base="sgd"), "keyword of dp_adam()='base'"),
    (lambda: methods.inner_outer(lr=0.1, outer_momentum=1.0), "outer_momentum=1.0"),
    (lambda: methods.doppler(lr=0.1, b=1.0, a=[]), TYPE + "b=1.0: must be a sequence of numbers"),
    (lambda: methods.doppler(lr=0.1, b="1", a=[]), TYPE + "b='1': must be a sequence of numbers"),
    (lambda: methods.dp_adam(lr=0.1, betas=0.9), TYPE + "betas=0.9: must be a sequence of numbers"),
    (lambda: methods.doppler(lr=0.1, base="adam", betas=0.9), TYPE + "betas=0.9: must be a sequence"),
    (lambda: methods.dp_adam(lr=0.1, variant="delayed_preconditioner", unscaled_steps=2, scaled_steps=0),
     "scaled_steps=0"),
    (lambda: methods.memf(lr=0.1, strategy=np.zeros((3, 3))), "0: the matrix is singular; use"),
    (lambda: methods.memf(lr=0.1, strategy=-np.eye(3)), "greater than 0: multiply that row by -1"),
    *(
        (lambda name=name: methods.METHODS[name](lr=0.1, nonsense=1), f"keyword of {name}()='nonsense'")
        for name in methods.METHODS
    ),
]  # fmt: skip
THEORY: Calls = [
    *(
        (lambda f=f, sigmas=sigmas: f(*sigmas), words)
        for f in (theory.kappa_from_variances, theory.kalman_rate, theory.steady_variance)
        for sigmas, words in (((3.0, 0.1, 1.0), "not real"), ((1.05, 1.0, 1.0), "exceed 1"))
    ),
    (lambda: theory.pmlf_variance_factor(1.0, 2), "beta=1.0"), (lambda: theory.pmlf_variance_factor(-0.1, 2), "beta"),
    (lambda: theory.pmlf_variance_factor(0.5, 0), "window=0"), (lambda: theory.theoretical_noise_factor(0), "snr=0"),
    (lambda: theory.accelerated_srgd_parameters(100, 10**9, 1, 1, 1, 1, 1e-6), "dimension=1000000000: must be at most"),
    (lambda: theory.accelerated_srgd_parameters(1, 1, 1, 1, 1, 1, 1e-6), "dataset_size=1"),
    (lambda: theory.accelerated_srgd_parameters(100, 1, 1, 1, 1, 1, 0), "delta=0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "words"),
    [*UPDATES, *BESIDE, *CLIPS, *ARRAYS, *QUERIES, *FILTERS, *STRATEGIES, *PATTERNS, *METHODS, *THEORY],
    ids=lambda value: value[:60] if isinstance(value, str) else "",
)
def test_one_sentence_says_what_would_be_right(call: Callable[[], Any], words: str) -> None:
    kind = ArgumentTypeError if words.startswith(TYPE) else ArgumentError
    with pytest.raises(DpcoreError) as caught, np.errstate(over="ignore"):
        call()
    assert type(caught.value) is kind
    place = 0
    for part in words.removeprefix(TYPE).split(" ... "):
        place = str(caught.value).find(part, place)
        assert place >= 0, f"{part!r} is not in {caught.value}"
    assert ";," not in str(caught.value)


def test_the_full_filter_is_not_private() -> None:
    with pytest.raises(PrivacyError, match="epsilon is infinity"):
        FullKalman(2, hessian_covariance=0, motion_covariance=1, noise_covariance=1)
    assert not hasattr(FullKalman, "coefficients")
