"""The plan: what fits together, what it costs, what its statement says."""

import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpcore
from dpcore import accounting, methods, sampling
from dpcore.accounting import Adjacency, Composed, Gaussian, MatrixGaussian, NonPrivate
from dpcore.accounting.branches import Branch, Branches, count
from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError, PrivacyError
from dpcore.plan.plan import Plan
from dpcore.spec.keys import RunKeys
from dpcore.spec.ops import FilterCoefficients, UpdateSettings
from dpcore.stages import queries, updates
from dpcore.stages.clipping import Clip
from dpcore.stages.filters import OptimalFIR
from dpcore.stages.noise import IndependentGaussian
from dpcore.stages.queries import Point
from dpcore.stages.strategies import BandedToeplitz, Identity, from_matrix, strategy
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import Doubling, WarmupCosine
from dpcore.statement.build import state
from dpcore.statement.statement import Statement
from tests.refused import refused

POISSON = sampling.PoissonSampler(dataset_size=1000, batch_size=50)
ORDER = sampling.FixedOrderSampler(dataset_size=20, batch_size=5)
ONE = sampling.FixedOrderSampler(dataset_size=20, batch_size=1)


def test_the_sampler_and_the_event_are_one() -> None:
    plan = Plan(methods.dp_sgd(lr=0.1, noise_multiplier=1.1), POISSON, 200)
    assert plan.event == accounting.PoissonSampledGaussian(POISSON.sample_rate, 1.1, 200)
    assert plan.epsilon(1e-5) == accounting.epsilon(plan.event, 1e-5)
    assert plan.epsilon(1e-5, steps=10) < plan.epsilon(1e-5)
    assert plan.epsilon(1e-5, steps=0) == 0
    assert plan.batch_size == 50


def test_a_target_that_only_one_accountant_reaches() -> None:
    # RDP finds no epsilon between 0 and 0.00102 at this delta, whatever the noise.
    plan = Plan(methods.dp_sgd(lr=0.1), POISSON, 20).calibrated(1e-3, 1e-8)
    assert 0.0 < plan.epsilon(1e-8) <= 1e-3
    with pytest.raises(ArgumentError, match=r"target_epsilon=-1\.0|target_epsilon=-1:"):
        Plan(methods.dp_sgd(lr=0.1), POISSON, 20).calibrated(-1, 1e-8)


def test_the_noise_scale_comes_from_the_clip() -> None:
    for rule, sensitivity in (("standard", 2.5), ("automatic", 2.5), ("normalized", 1.0)):
        method = methods.dp_sgd(lr=0.1, max_grad_norm=2.5, clipping=rule, noise_multiplier=2.0)
        assert Plan(method, POISSON, 1).noise_standard_deviation() == pytest.approx(2 * sensitivity)
    per_tensor = methods.dp_sgd(lr=0.1, clipping="normalized", clipping_groups="per_tensor", noise_multiplier=2.0)
    assert Plan(per_tensor, POISSON, 1, ("a", "b", "c")).noise_standard_deviation() == pytest.approx(2 * math.sqrt(3))


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: Plan("dp_sgd", POISSON, 1), ArgumentTypeError, "method='dp_sgd'"),
    (lambda: Plan(methods.dp_sgd(lr=1), "poisson", 1), ArgumentTypeError, "sampler='poisson'"),
    (lambda: Plan(methods.dp_sgd(lr=1), sampling.shard(ORDER, 0, 2), 1), ArgumentTypeError, "be a sampler from dpcore"),
    (lambda: Plan(methods.dp_sgd(lr=1), POISSON, 0), ArgumentError, "steps=0"),
    (lambda: Plan(methods.dp_sgd(lr=1, batch_size=64), POISSON, 1), ArgumentError, "batch_size=64"),
    (lambda: Plan(methods.dp_sgd(lr=1), POISSON, 1).event, PrivacyError, "noise_multiplier=None"),
    (lambda: Plan(methods.dp_sgd(lr=1), POISSON, 1).epsilon(1e-5), PrivacyError, "noise_multiplier=None"),
    (lambda: plan(MEMF).epsilon(1e-5, accountant="pdl"), ArgumentError, "did you mean 'pld'"),
])  # fmt: skip
def test_what_does_not_fit(make, error, words: str) -> None:
    refused(error, re.escape(words), make)


@pytest.mark.parametrize(("make", "words"), [
    (methods.dp_sgd, "lr=None"), (lambda: methods.dp_sgd(lr=-1), "lr=-1"),
    (lambda: methods.dp_sgd(lr=0.1, base="adan"), "did you mean 'adam'"),
    (lambda: methods.dp_sgd(lr=0.1, momentun=0.9, base="momentum"), "did you mean 'momentum'"),
    (lambda: methods.dp_sgd(lr=0.1, base=dpcore.updates.SGD(0.1)), "base"),
    (lambda: methods.dp_sgd(lr=0.1, noise_multiplier=-1), "noise_multiplier=-1"),
    (lambda: methods.dp_sgd(lr=0.1, noise_multiplier=math.nan), "noise_multiplier=nan"),
    (lambda: methods.dp_sgd(lr=0.1, batch_size=0), "batch_size=0"),
    (lambda: methods.doppler(lr=0.1, filter="first"), "filter='first'"),
    (lambda: methods.doppler(lr=0.1, filter="f1", b=[1.0]), "must not be given together"),
    (lambda: methods.doppler(lr=0.1, a=[-0.9]), "b=None"), (lambda: methods.disk(lr=0.1, gamma=0), "gamma=0"),
    (lambda: methods.disk(lr=0.1, kappa=0), "kappa=0"), (lambda: methods.disk(lr=0.1, kappa=1.5), "kappa=1.5"),
    (lambda: methods.dp_adam(lr=0.1, variant="bias_correct"), "did you mean 'bias_corrected'"),
    (lambda: methods.dp_adam(lr=0.1, scale_eps=0.1), "scale_eps=0.1: is only for variant scale_then_privatize"),
    (lambda: methods.dp_adam(lr=0.1, scaled_steps=2), "scaled_steps=2: is only for variant delayed_preconditioner"),
    (lambda: methods.dp_adam(lr=0.1, joint_scale=0.1), "joint_scale=0.1: is only for variant joint_moments"),
    (lambda: methods.dp_adam(lr=0.1, variant="delayed_preconditioner"), "needs unscaled_steps and scaled_steps"),
    (lambda: methods.dp_adam(lr=0.1, max_update_norm=0), "max_update_norm=0"),
    (lambda: methods.dp_adam(lr=0.1, variant="delayed_preconditioner", unscaled_steps=0, scaled_steps=1,
                             unscaled_lr_factor=2.0), "unscaled_lr_factor=2.0: is only for second_moment='delayed'"),
    (lambda: dpcore.Method(update=dpcore.updates.Adam(0.1, second_moment="delayed")), "needs query=Preconditioned"),
    (lambda: methods.dp_adam(lr=0.1, variant="noiseless_preconditioner"), "give allow_nonprivate=True"),
    (lambda: methods.dp_adagrad(lr=0.1, variant="noiseless_preconditioner"), "give allow_nonprivate=True"),
    (lambda: methods.dp_adam(lr=0.1, variant="noiseless_scale_then_privatize"), "give allow_nonprivate=True"),
    (lambda: methods.doppler(lr=0.1, bias_corrected=True), "is only for base='adam' or 'adamw'"),
    (lambda: methods.doppler(lr=0.1, base="adam", betas=(0.9, 0.99)), "the first must be 0"),
    (lambda: methods.pmlf(lr=0.1, window=0), "window=0"), (lambda: methods.pmlf(lr=0.1, beta=1.0), "beta=1.0"),
    (lambda: methods.inner_outer(lr=0.1, window=2.5), "window=2.5"),
    (lambda: methods.inner_outer(lr=0.1, outer_momentum=1.0), "momentum=1.0"),
    (lambda: methods.srg_memf(lr=0.1, decay=2.0), "decay=2.0"),
    (lambda: methods.memf(lr=0.1, strategy="tre"), "did you mean 'tree'"),
    (lambda: methods.memf(lr=0.1, strategy=[[1.0, 1.0], [0.0, 1.0]]), "is above the diagonal"),
    (lambda: methods.memf(lr=0.1, strategy=[[1.0, 0.0], [1.0, 0.0]]), "the matrix is singular"),
    (lambda: methods.accelerated_srgd(lr=0.1, variant="accelerate"), "did you mean 'accelerated'"),
    (lambda: methods.dp_sgd(lr=0.1, radius=0), "radius=0"),
    (lambda: methods.dp_sgd(lr=0.1, schedule="cosine"), "schedule='cosine'"),
    (lambda: methods.dp_sgd(lr=0.1, galore=4), "galore=4"), (lambda: dpcore.Method(update="sgd"), "update='sgd'"),
    (lambda: dpcore.Method(update=dpcore.updates.SGD(0.1), filter=dpcore.filters.Identity), "dpcore.stages.filters"),
])  # fmt: skip
def test_bad_methods(make, words: str) -> None:
    refused(DpcoreError, re.escape(words), make)


def test_the_statement_is_of_the_steps_taken() -> None:
    plan = Plan(methods.disk(lr=0.1, noise_multiplier=1.0), POISSON, 100)
    statement = stated(plan, 40)
    assert statement.epsilon["pld"] == plan.epsilon(1e-5, steps=40)
    assert statement.epsilon_planned["pld"] == plan.epsilon(1e-5)
    assert statement.noise["standard_deviation_on_sum"] == plan.noise_standard_deviation()
    caller = stated(plan, 40, bytes(32))
    assert any("stays secret" in caveat for caveat in caller.caveats)
    assert bytes(32).hex() not in caller.to_json()


@pytest.mark.parametrize("change", [{"rng": "philox"}, {"caller_noise": True}])
def test_simulations_are_not_private(change: dict) -> None:
    statement = stated(Plan(methods.dp_sgd(lr=0.1, noise_multiplier=1.0), POISSON, 100), 100, **change)
    assert not statement.private
    assert "not" in statement.text()


ADAM = updates.Adam(0.1)
SCALED = queries.Preconditioned()
FIR = OptimalFIR(2)


def adam(**settings) -> updates.Adam:
    return updates.Adam(0.1, eps=0.1, **settings)


@pytest.mark.parametrize(("stages", "words"), [
    ({"query": SCALED, "update": updates.SGD(0.1)}, "needs an update with a second moment, such as Adam"),
    ({"query": SCALED, "update": adam(second_moment="independent")}, "must be 'filtered', 'released' or 'public'"),
    ({"query": SCALED, "update": adam(second_moment="joint")}, "must be 'filtered', 'released' or 'public'"),
    ({"query": SCALED, "update": ADAM, "filter": FIR}, "take one of them away"),
    ({"query": SCALED, "update": adam(denominator="floored", bias_corrected=True)}, "take one of them away"),
    (
        {"query": queries.Preconditioned(max_scaled_norm=1.0), "update": ADAM, "clip": Clip(groups={"*": 1.0})},
        "must be None with a mapping of clipping_groups",
    ),
    ({"query": queries.ParameterWindow(2, query=SCALED), "update": ADAM}, "put it outermost"),
    ({"query": queries.RecursiveDifference(0.5, SCALED), "update": ADAM}, "put it outermost"),
    (
        {"update": ADAM, "filter": FIR, "noise": dpcore.noise.CorrelatedGaussian(1.0, Identity())},
        "give strategy=None, or another filter",
    ),
    ({"filter": FIR, "update": adam(denominator="floored", bias_corrected=True)}, "give second_moment='released'"),
    *(({"update": updates.SGD(0.1), "schedule": Doubling(), **others}, "take dp_sgd with base='sgd', without")
      for others in ({"update": ADAM}, {"update": updates.Momentum(0.1)}, {"filter": FIR}, {"galore": GaLore(2)},
                     {"query": queries.TwoPoint(0.5, 0.5)}, {"filter": dpcore.filters.named_filter("f5")},
                     {"noise": dpcore.noise.CorrelatedGaussian(1.0, Identity())})),
    ({"galore": GaLore(2), "update": ADAM, "filter": FIR}, "galore: takes filters"),
    ({"galore": GaLore(2), "update": ADAM, "query": SCALED}, "no preconditioned query"),
    ({"galore": GaLore(2), "update": updates.Accelerated(0.1)}, "no accelerated coupling"),
    ({"galore": GaLore(2), "update": adam(second_moment="public")}, "of the released gradient only"),
    ({"galore": GaLore(2), "update": adam(second_moment="independent")}, "of the released gradient only"),
])  # fmt: skip
def test_combinations_without_a_meaning(stages: dict, words: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        dpcore.Method(**stages)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def plan(method, sampler=ORDER, steps: int = 8) -> Plan:
    return Plan(method, sampler, steps)


def stated(plan: Plan, steps: int = 8, key: bytes | None = None, **said: Any) -> Statement:
    return state(plan, 1e-5, steps_taken=steps, keys=RunKeys.new(key), backend="numpy", **said)


INDEPENDENT = methods.dp_adam(lr=0.1, variant="independent_moments", noise_multiplier=1.0)
JOINT = methods.dp_adam(lr=0.1, variant="joint_moments", noise_multiplier=1.0)
MEMF = methods.memf(lr=0.1, noise_multiplier=1.0)
NEVER = methods.dp_adam(lr=0.1, variant="delayed_preconditioner", unscaled_steps=8, scaled_steps=2)
TRUNCATED = sampling.FixedSizeSampler(dataset_size=20, batch_size=5)


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: plan(MEMF, POISSON), PrivacyError, "'random-allocation', or strategy=None"),
    (lambda: plan(MEMF, TRUNCATED), PrivacyError, "'random-allocation', or strategy=None"),
    (lambda: plan(INDEPENDENT, POISSON), PrivacyError, "need a hard maximum of examples in a batch"),
    (lambda: plan(INDEPENDENT, TRUNCATED), PrivacyError, "use FixedOrderSampler"),
    (lambda: plan(JOINT, sampling.FixedOrderSampler(dataset_size=20, batch_size=2)), PrivacyError, "batch_size=1"),
    (lambda: plan(JOINT, sampling.PoissonSampler(dataset_size=20, batch_size=1)), PrivacyError, "batch_size=1"),
    (lambda: plan(JOINT, sampling.FixedSizeSampler(dataset_size=20, batch_size=1)), PrivacyError, "batch_size=1"),
    (lambda: plan(methods.memf(lr=1, strategy=[[1.0, 0.0], [0.5, 1.0]])), ArgumentError, "take at most 2 steps or a"),
    (lambda: plan(methods.dp_sgd(lr=1, schedule=WarmupCosine(8))), ArgumentError, "must be less than the 8 steps of"),
    (lambda: plan(methods.srg_memf(lr=1, decay=[0.0, 0.5])), ArgumentError, "decay"),
    (lambda: plan(NEVER), ArgumentError, "unscaled_steps=8: must be less than the 8 steps"),
])  # fmt: skip
def test_what_the_analysis_does_not_cover_is_refused(make, error: type, words: str) -> None:
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_nearest_allowed_settings_are_allowed() -> None:
    assert plan(MEMF).event.adjacency is Adjacency.ZERO_OUT
    assert plan(INDEPENDENT).event == Gaussian(1.0, 2, Adjacency.ZERO_OUT)
    assert plan(JOINT, ONE).event.adjacency is Adjacency.REPLACE_ONE
    plan(methods.memf(lr=1, strategy=[[1.0, 0.0], [0.5, 1.0]]), steps=2)
    plan(methods.dp_sgd(lr=1, schedule=WarmupCosine(7)))
    plan(methods.srg_memf(lr=1, decay=[0.0] + [0.5] * 7))


CUT = sampling.TruncatedPoissonSampler(dataset_size=1000, batch_size=5, max_batch_size=20)


def test_independent_moments_hold_under_a_hard_maximum_of_a_random_batch() -> None:
    """The square's noise follows the largest batch that can be drawn, not the expected one."""
    whole = plan(INDEPENDENT, CUT)
    assert whole.event == accounting.TruncatedPoissonSampledGaussian(1000, CUT.sample_rate, 20, 1.0, 8)
    assert whole.noise_standard_deviation() == pytest.approx(math.sqrt(2))
    assert whole.square_noise_standard_deviation() == pytest.approx(math.sqrt(2) * 39 / 25)
    assert whole.event_after(3, 2) == whole.event_after(5)
    shuffled = sampling.ShuffledSampler(dataset_size=20, batch_size=5)
    assert plan(INDEPENDENT, shuffled).event == Gaussian(1.0, 2, Adjacency.ZERO_OUT)
    cyclic = sampling.CyclicPoissonSampler(dataset_size=20, batch_size=2, groups=4)
    assert plan(INDEPENDENT, cyclic).square_noise_standard_deviation() == pytest.approx(math.sqrt(2) * 9 / 4)
    for sampler in (CUT, cyclic):
        refused(PrivacyError, "joint moments need batches of one example", plan, JOINT, sampler)
    refused(PrivacyError, "or strategy=None with this sampler", plan, MEMF, CUT)


def test_joint_moments_are_half_the_noise_relative_to_a_replacement() -> None:
    """The pair's sensitivity is 2C under replacement, and the noise sigma C."""
    assert plan(JOINT, ONE, 50).event == Gaussian(0.5, 3, Adjacency.REPLACE_ONE)
    correlated = methods.dp_adam(lr=0.1, variant="joint_moments", noise_multiplier=1.0, strategy="tree")
    event = plan(correlated, ONE).event
    assert isinstance(event, MatrixGaussian)
    assert (event.noise_multiplier, event.adjacency) == (0.5, Adjacency.REPLACE_ONE)
    assert event.mu == pytest.approx(2 * plan(methods.memf(lr=1, noise_multiplier=1.0, strategy="tree"), ONE).event.mu)


@pytest.mark.parametrize("name", ["tree", "square-root", "identity"])
@pytest.mark.parametrize("steps", [1, 3, 4, 8])
def test_a_matrix_event_has_the_sensitivity_of_what_was_run(name: str, steps: int) -> None:
    whole = plan(methods.memf(lr=0.1, noise_multiplier=1.5, strategy=name))
    event = whole.event_after(steps)
    c = strategy(name, 8).matrix(8)[:steps, :steps]
    worst = max(math.sqrt((c[:, first:steps:4].sum(axis=1) ** 2).sum()) for first in range(min(4, steps)))
    assert event.sensitivity == pytest.approx(worst)
    assert (event.noise_multiplier, event.steps) == (1.5, steps)
    assert whole.event_after(0).mu == 0


def test_abandoned_steps_of_branches_that_nobody_knows_count_as_whole_runs() -> None:
    whole = plan(MEMF)
    event = whole.event_after(3, 2)
    assert isinstance(event, Composed)
    own, others = event.events
    assert own == whole.event_after(3)
    assert others.mu == pytest.approx(math.sqrt(2) * whole.event.mu)
    joint = plan(methods.dp_adam(lr=0.1, variant="joint_moments", noise_multiplier=1.0), ONE)
    assert joint.event_after(3, 2).events == (joint.event_after(3), Gaussian(0.5, 2, Adjacency.REPLACE_ONE))


def stacked(c: np.ndarray, tree: list[tuple[int, int, int]], patterns: list[np.ndarray]) -> list[float]:
    """Squared norms by pattern of the whole tree as one matrix: for each release its row, for each of them a column.

    `tree` has (parent, first, mark) of each branch. All inputs of an example are the same unit vector, which is the
    worst case where no entry of C is negative. Multiplied by C along each branch, noise C^-1 Z is white: of shared rows
    once. That it is, is checked here by inverting the stacked matrix.
    """
    node = {}

    def at(branch: int, row: int) -> int:
        while row < tree[branch][1]:
            branch = tree[branch][0]
        return node.setdefault((branch, row), len(node))

    rows = [(branch, row) for branch, (_, first, mark) in enumerate(tree) for row in range(first, mark)]
    whole = np.zeros((len(rows), len(rows)))
    for branch, row in rows:
        here = at(branch, row)
        for step in range(row + 1):
            whole[here, at(branch, step)] += c[row, step]
    inverse = np.linalg.inv(whole)
    for branch, row in rows:  # released with noise C^-1 Z of this branch: the rows of the inverse
        noise = np.zeros(len(rows))
        for step in range(row + 1):
            noise[at(branch, step)] = np.linalg.inv(c[: row + 1, : row + 1])[row, step]
        assert np.allclose(inverse[at(branch, row)], noise)
    found = []
    for pattern in patterns:
        met = np.zeros(len(rows))
        for branch, row in rows:
            met[at(branch, row)] = row in pattern
        found.append(float(((whole @ met) ** 2).sum()))
    return found


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.sampled_from(["tree", "square-root", "banded"]), st.data())
def test_branches_of_correlated_noise_are_charged_as_rows_stacked_below_the_run(
    epoch: int, kind: str, data: Any
) -> None:
    steps, order = 12, sampling.FixedOrderSampler(dataset_size=epoch, batch_size=1)
    chosen = BandedToeplitz((1.0, 0.5, 0.2)) if kind == "banded" else strategy(kind, steps)
    whole = plan(methods.memf(lr=1.0, noise_multiplier=2.0, strategy=chosen), order, steps)
    tree, names = [(0, 0, data.draw(st.integers(1, steps)))], ["b0"]
    for number in range(1, data.draw(st.integers(2, 4))):
        parent = data.draw(st.integers(0, number - 1))
        first = data.draw(st.integers(tree[parent][1], tree[parent][2]))
        tree.append((parent, first, data.draw(st.integers(first, steps))))
        names.append(f"b{number}")
    known = {n: Branch(names[p] if n != "b0" else "", f, m) for n, (p, f, m) in zip(names, tree, strict=True)}
    left, taken = Branches(names[-1], known).abandoned, tree[-1][2]
    assert count(left) == sum(mark - first for _, first, mark in tree) - taken
    c = chosen.columns(np.arange(steps), steps)
    exact = stacked(c, tree, order.patterns(steps))
    event = whole.event_after(taken, left)
    parts = event.events if isinstance(event, Composed) else (event,)
    charged = sum(part.sensitivity**2 for part in parts)
    assert max(exact) <= charged * (1 + 1e-9)
    # It is no more than each branch with its own worst example; with one pattern only it is exact.
    windows = [(0, taken), *left]
    apart = sum(max((c[f:m][:, p[p < m]].sum(1) ** 2).sum() for p in order.patterns(steps)) for f, m in windows)
    assert charged == pytest.approx(apart)
    if epoch == 1:
        assert charged == pytest.approx(max(exact))


def test_a_branch_of_reshuffled_epochs_is_bounded_by_its_rows() -> None:
    chosen = strategy("square-root", 8)
    sampler = sampling.ShuffledSampler(dataset_size=8, batch_size=2)
    whole = plan(methods.memf(lr=1.0, noise_multiplier=2.0, strategy=chosen), sampler, 8)
    c = chosen.columns(np.arange(8), 8)
    for first, stop in ((0, 8), (1, 3), (3, 7), (5, 6)):
        own, left = whole.event_after(2, ((first, stop),)).events
        one_of_each = itertools.product(*sampler.blocks(stop))
        exact = max(float((c[first:stop][:, list(steps)].sum(1) ** 2).sum()) for steps in one_of_each)
        assert exact <= left.sensitivity**2 * (1 + 1e-12)
        assert left.sensitivity <= whole.event.sensitivity
        assert own == whole.event_after(2)


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=4))
def test_abandoned_steps_of_a_kept_order_meet_an_example_as_often_as_is_counted(
    epoch: int, branches: list[tuple[int, int]]
) -> None:
    fixed = sampling.FixedOrderSampler(dataset_size=epoch, batch_size=1)
    left = tuple((first, first + length) for first, length in branches)
    for sampler in (fixed, sampling.ShuffledSampler(dataset_size=epoch, batch_size=1)):
        whole = plan(methods.dp_sgd(lr=1.0, noise_multiplier=2.0), sampler, steps=30)
        event = whole.event_after(3, left)
        met = np.zeros(epoch)
        for first, stop in left:
            for step in range(first, stop):
                met[sampler.indices(bytes(32), step)] += 1
        assert event.events[0] == whole.event_after(3)
        assert met.max() <= event.events[1].count <= count(left)
    once = plan(methods.dp_sgd(lr=1.0, noise_multiplier=2.0), fixed, steps=30)
    assert [once.event_after(3, (rows,)).events[1].count for rows in left] == [
        -(-(stop - first) // epoch) for first, stop in left
    ]


def test_negative_products_of_columns_are_bounded_by_their_size() -> None:
    matrix = [[1.0, 0, 0, 0], [0, 1, 0, 0], [-0.9, 0, 1, 0], [0, -0.9, 0, 1]]
    twice = sampling.FixedOrderSampler(dataset_size=2, batch_size=1)
    event = plan(methods.memf(lr=0.1, noise_multiplier=1.0, strategy=matrix), twice, 4).event
    c = from_matrix(matrix).matrix(4)
    # The worst pair of vectors points against each other: the columns' difference, not their sum.
    assert event.sensitivity == pytest.approx(math.sqrt(((c[:, 0] - c[:, 2]) ** 2).sum()))
    assert event.sensitivity > 1.5 * math.sqrt(((c[:, 0] + c[:, 2]) ** 2).sum())


@pytest.mark.parametrize("variant", ["noiseless_preconditioner", "noiseless_scale_then_privatize"])
def test_noiseless_variants_cost_everything(variant: str) -> None:
    method = methods.dp_adam(lr=0.1, variant=variant, allow_nonprivate=True, noise_multiplier=1.0)
    assert isinstance(plan(method).event, NonPrivate)
    assert isinstance(plan(method).event_after(3, 2), NonPrivate)


def test_scaled_steps_have_their_own_clip_noise_and_line_in_the_statement() -> None:
    method = methods.dp_adam(
        lr=0.1, variant="delayed_preconditioner", unscaled_steps=2, scaled_steps=1, max_grad_norm=0.5,
        max_scaled_norm=3.0, noise_multiplier=2.0,
    )  # fmt: skip
    whole = plan(method, POISSON)
    assert [whole.noise_standard_deviation(t) for t in range(6)] == [1.0, 1.0, 6.0] * 2
    assert [whole.clip_at(t).max_grad_norm for t in range(3)] == [0.5, 0.5, 3.0]
    assert whole.event == accounting.PoissonSampledGaussian(POISSON.sample_rate, 2.0, 8)
    statement = stated(whole)
    assert statement.clip["max_scaled_norm"] == statement.clip["scaled_sensitivity"] == 3.0
    assert statement.clip["standard_deviation_on_scaled_sum"] == 6.0


def test_what_a_statement_says_of_separate_moments_and_of_seed_noise() -> None:
    noise = stated(plan(INDEPENDENT)).noise
    assert noise["standard_deviation_on_sum"] == pytest.approx(math.sqrt(2))
    assert noise["standard_deviation_on_square"] == pytest.approx(math.sqrt(2) * 9 / 25)
    assert noise["sensitivity_of_square"] == pytest.approx(9 / 25)
    joint = stated(plan(JOINT, ONE))
    assert joint.noise["joint_scale"] == pytest.approx(1 / math.sqrt(2))
    share = joint.noise["standard_deviation_on_sum"] / joint.noise["sensitivity_under_replacement"]
    assert share == joint.event["noise_multiplier"]
    assert joint.adjacency == joint.sampler["adjacency"] == "replace-one"  # not the sampler's own
    seed = stated(plan(MEMF)).noise
    assert seed["seed_standard_deviation_on_sum"] == 1.0
    assert "standard_deviation_on_sum" not in seed


@pytest.mark.parametrize("name", ["poisson", "memf", "joint", "independent"])
def test_calibration_meets_the_target_of_every_event(name: str) -> None:
    uncalibrated = {
        "poisson": plan(methods.doppler(lr=0.1), POISSON, 200),
        "memf": plan(methods.srg_memf(lr=0.1)),
        "joint": plan(methods.dp_adam(lr=0.1, variant="joint_moments"), ONE, 40),
        "independent": plan(methods.dp_adam(lr=0.1, variant="independent_moments", strategy="tree")),
    }[name]
    calibrated = uncalibrated.calibrated(3.0, 1e-5)
    assert 3.0 * (1 - 1e-3) < calibrated.epsilon(1e-5) <= 3.0
    if name in ("memf", "independent"):  # one Gaussian mechanism: sigma = sensitivity / mu
        assert calibrated.event.mu == pytest.approx(calibrated.event.sensitivity / calibrated.noise_multiplier)


def test_a_plan_refuses_a_strategy_that_streams_another_matrix_than_it_accounts_for() -> None:
    class Liar(BandedToeplitz):
        """Accounts for more correlation than its noise has."""

        def coefficients(self, step: int) -> FilterCoefficients:
            return BandedToeplitz((1.0, 0.1)).coefficients(step)

    with pytest.raises(ArgumentError, match="must describe one matrix"):
        plan(methods.memf(lr=0.1, noise_multiplier=2.0, strategy=Liar((1.0, 0.9))))


class Own:
    """A filter, or a query, of the caller's own."""

    adaptive, order, uses_displacement, lags = False, 1, False, 1

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def coefficients(self, step: int) -> Any:
        return self.answer

    def points(self, step: int) -> Any:
        return self.answer if step else (Point(1.0),)


@pytest.mark.parametrize(("stage", "answer", "words"), [
    ("filter", (FilterCoefficients((1.0,), (-1.1,)),), "unstable at step 0, a pole has modulus 1.1"),
    ("filter", FilterCoefficients((1.0,), (-0.5,)), "must be a tuple of FilterCoefficients"),
    ("filter", [FilterCoefficients((1.0,), (-0.5,))], "must be a tuple of FilterCoefficients"),
    ("filter", (FilterCoefficients((math.nan,), (-0.5,)),), "must be finite"),
    ("filter", (FilterCoefficients((1.0,), (-0.5,), 0.0),), "coefficients(0).normalizer=0: must not be 0"),
    ("filter", (FilterCoefficients([1.0], (-0.5,)),), "b=[1.0], a=(-0.5,); both must be tuples of numbers"),
    ("filter", (FilterCoefficients(1.0, (-0.5,)),), "both must be tuples of numbers"),
    ("filter", (FilterCoefficients((), (-0.5,)),), "b with its b_0"),
    ("filter", (FilterCoefficients(("1",), (-0.5,)),), "coefficients(0).b='1': must be a real number"),
    ("filter", (FilterCoefficients((1j,), (-0.5,)),), "coefficients(0).b=1j: must be a real number"),
    ("filter", (FilterCoefficients((1.0,), ()),), "order=1: must be 0"), ("query", (), "has no point at step 1"),
    ("query", None, "must be a tuple of dpcore.queries.Point, not None"), ("query", Point(1.0), "must be a tuple"),
    ("query", (Point("a"),), "points(1).weight='a': must be a real number"),
    ("query", (Point(1.0, lag=0.5),), "points(1).lag=0.5: must be an integer"),
    ("query", ((1.0, 0.0, 0),), "must return dpcore.queries.Point"), ("query", (Point(math.nan),), "must be finite"),
    ("query", (Point(1.0, lag=2),), "needs 2 earlier parameter points, and at step 1 there are 1"),
    ("query", (Point(1.0, lag=-1),), "lag=-1: must be an integer of at least 0"),
    ("query", (Point(1.0, 0.5),), "say uses_displacement=True"),
])  # fmt: skip
def test_stages_of_the_callers_own_are_checked_before_the_run(stage: str, answer: Any, words: str) -> None:
    method = dpcore.Method(update=updates.SGD(0.1), noise=IndependentGaussian(1.0), **{stage: Own(answer)})
    refused(DpcoreError, re.escape(words), plan, method, steps=2)


class OwnUpdate(updates.SGD):
    """Its numbers at step 1 are another's."""

    answer: Any = None

    def prepared(self, numbers: Any, step: int, variances: Any) -> Any:
        return self.answer if step else numbers


@pytest.mark.parametrize(("changes", "words"), [
    ({}, "prepared(settings, 1, None) must be dpcore.spec.ops.UpdateSettings of finite numbers, not None"),
    ({"answer": UpdateSettings(math.nan)}, "of finite numbers, not UpdateSettings(learning_rate=nan"),
    ({"rule": "lion"}, "rule='lion': must be one of 'sgd'"),
])  # fmt: skip
def test_updates_of_the_callers_own_are_checked_before_the_run(changes: dict[str, Any], words: str) -> None:
    method = dpcore.Method(update=type("OwnUpdate", (OwnUpdate,), changes)(0.1), noise=IndependentGaussian(1.0))
    refused(DpcoreError, re.escape(words), plan, method, steps=2)


def test_what_a_stage_of_the_callers_own_lacks_is_named() -> None:
    with pytest.raises(ArgumentTypeError, match="one of your own must have points, uses_displacement, too"):
        dpcore.Method(update=updates.SGD(0.1), query=SimpleNamespace(lags=0))  # type: ignore[arg-type]


@pytest.mark.parametrize(("stage", "answer", "words"), [
    ("filter", (FilterCoefficients((1.0,), (-1.1,)),), "unstable at step 7, a pole has modulus 1.1"),
    ("filter", (FilterCoefficients((1.0,), (math.inf,)),), "coefficients(7).a=inf: must be finite"),
    ("filter", (FilterCoefficients((1.0, 0.5), (-0.5,)),), "other numbers of b and a than at step 0"),
    ("query", (), "has no point at step 7"), ("query", (Point(1.0, lag=3),), "needs 3 earlier parameter points"),
])  # fmt: skip
def test_stages_of_the_callers_own_are_checked_at_every_step(stage: str, answer: Any, words: str) -> None:
    """A stage that is wrong in the middle of the run only: its first and last step are sound."""
    sound: Any = {"filter": (FilterCoefficients((1.0,), (-0.5,)),), "query": (Point(1.0),)}[stage]

    class Midway(Own):
        def coefficients(self, step: int) -> Any:
            return answer if step == 7 else sound

        points = coefficients

    method = dpcore.Method(update=updates.SGD(0.1), noise=IndependentGaussian(1.0), **{stage: Midway(answer)})
    refused(DpcoreError, re.escape(words), plan, method, steps=20)
    plan(method, steps=7)


def test_an_adaptive_filter_and_lags_of_the_callers_own_are_checked() -> None:
    wanting, odd = Own(()), Own((Point(1.0),))
    wanting.adaptive, odd.lags = True, -1  # type: ignore[misc]
    for stage, words in (
        ({"filter": wanting}, "must have memory, initial, observe, weights"),
        ({"query": odd}, "lags=-1"),
    ):
        with pytest.raises(DpcoreError, match=words):
            plan(dpcore.Method(update=updates.SGD(0.1), noise=IndependentGaussian(1.0), **stage), steps=2)


def test_stages_of_the_callers_own_that_are_sound_are_taken() -> None:
    stages = {"filter": Own((FilterCoefficients((1.0,), (-1.0,)),)), "query": Own((Point(0.5), Point(0.5, lag=1)))}
    plan(dpcore.Method(update=updates.SGD(0.1), noise=IndependentGaussian(1.0), **stages), steps=2)
