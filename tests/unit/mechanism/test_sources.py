"""Pairs are clipped, combined and summed as the rows that they stand for: every rule, group, query, user and split."""

from typing import Any

import numpy as np
import pytest

from dpcore import methods
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.mechanism.loop import Loop
from dpcore.mechanism.mechanism import Mechanism
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedOrderSampler, PoissonSampler, UserSampler
from dpcore.spec.backends import load_backend
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import CLIP_RULES
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.clipping.blocks import Linear, Rows, of_units
from tests.depth import pairs
from tests.unit.pair_model import EXAMPLES, SHAPES, START, as_pairs, as_rows, gradients, uses

KEY = bytes(range(32))
STEPS = 4
MAPPING = {"token.*": 0.5, "first.*": 2.0, "*": 1.0}
METHODS = {
    **{
        f"{rule}, {groups if isinstance(groups, str) else 'mapping'}": methods.dp_sgd(
            lr=0.1, noise_multiplier=0.5, max_grad_norm=4.0, clipping=rule, clipping_groups=groups
        )
        for rule in CLIP_RULES
        for groups in ("flat", "per_layer", "per_tensor", MAPPING)
    },
    "adaptive clip": methods.dp_sgd(
        lr=0.1, noise_multiplier=0.5, max_grad_norm=4.0, adaptive_clip=AdaptiveClip(bit_noise_std=3.0)
    ),
    "disk, a negative weight": methods.disk(lr=0.1, noise_multiplier=0.5, kappa=0.3, clipping="standard"),
    "disk, positive weights": methods.disk(lr=0.1, noise_multiplier=0.5, clipping_groups="per_layer"),
    "pmlf": methods.pmlf(lr=0.1, window=3, noise_multiplier=0.5),
    "srg": methods.srg_memf(lr=0.1, noise_multiplier=0.5),
    "scaled": methods.dp_adam(lr=0.1, noise_multiplier=0.5, variant="scale_then_privatize"),
    "scaled, per tensor": methods.dp_adam(
        lr=0.1, noise_multiplier=0.5, variant="delayed_scale", unscaled_steps=1, scaled_steps=2,
        clipping_groups="per_tensor",
    ),
}  # fmt: skip
# Of 5, 1, 3 and 3 examples; the batch of users is no batch of neighbors.
USERS = [0, 1, 0, 2, 0, 2, 3, 0, 2, 3, 0, 3]


def sampler_of(method: Any, users: bool) -> Any:
    count = 4 if users else EXAMPLES
    kind = PoissonSampler if method.noise.strategy is None else FixedOrderSampler
    sampler = kind(dataset_size=count, batch_size=count * 3 // 4)
    return UserSampler(sampler, USERS, 5) if users else sampler


def begun(method: Any, dtype: type = np.float32, users: bool = False) -> tuple[Mechanism, list[np.ndarray]]:
    plan = Plan(method, sampler_of(method, users), STEPS, tuple(name for name, _ in SHAPES))
    x, keys = [p.astype(dtype) for p in START], RunKeys.new(KEY, exact_key=True)
    return Mechanism(plan, Layout.of(SHAPES), x, backend=load_backend("numpy"), keys=keys), x


def run(
    method: Any, kind: str, dtype: type = np.float64, most: int | None = None, users: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray], Mechanism]:
    """Take the steps; return each step's sum as one vector, the parameters after each, and the mechanism."""
    mechanism, x = begun(method, dtype, users)
    loop = Loop(mechanism, most)
    sums, path = [], []
    for _ in range(STEPS):
        indices = mechanism.draw()
        loop.sum_clipped(
            x, lambda values, _, i=indices: lambda part: gradients(kind, values, i[part]), len(indices)
        )  # fmt: skip
        sums.append(mechanism.unit * np.concatenate(mechanism.vectors.totals))
        loop.release_sum(x)
        path.append(np.concatenate([p.reshape(-1) for p in x]))
    return sums, path, mechanism


def agree(method: Any, kind: str, dtype: type, tolerance: float, **settings: Any) -> None:
    """The sums, relative to the clip norm, and the released parameters are those of rows in one batch of examples."""
    expected, expected_path, rows = run(method, "rows", dtype, users=settings.get("users", False))
    found, path, mechanism = run(method, kind, dtype, **settings)
    for step, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        norm = rows.plan.sensitivity_at(step, rows.clip_norms[step] if rows.clip_norms else None).contribution
        np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * norm)
    assert max(np.abs(total).max() for total in expected) > 0
    np.testing.assert_allclose(path, expected_path, rtol=0, atol=tolerance)  # so the noise is the same
    if rows.clip_norms:
        np.testing.assert_allclose(mechanism.clip_norms, rows.clip_norms, rtol=tolerance)


@pytest.mark.parametrize(("name", "kind"), pairs(METHODS, ["pairs", "mixed"], 2))
def test_pairs_take_the_steps_of_rows(name: str, kind: str) -> None:
    agree(METHODS[name], kind, np.float64, 5e-3 if "scaled" in name else 1e-4)


@pytest.mark.parametrize("users", [False, True])
@pytest.mark.parametrize("name", ["standard, per_layer", "disk, a negative weight", "scaled", "adaptive clip"])
@pytest.mark.parametrize(("kind", "most"), pairs(["rows", "pairs", "mixed"], [None, 1, 2, 4], 3))
def test_users_and_splits_change_nothing_but_the_order_of_sums(
    name: str, kind: str, most: int | None, users: bool
) -> None:
    """A user of five examples goes on over several micro-batches. Sums of examples are the same bits for any split."""
    agree(METHODS[name], kind, np.float64, 1e-4, most=most, users=users)
    if users:  # whose own examples are added first, in floating point
        return
    whole, split = (run(METHODS[name], kind, most=size, users=users) for size in (None, most))
    np.testing.assert_array_equal(split[0], whole[0])
    np.testing.assert_array_equal(split[1], whole[1])


@pytest.mark.parametrize("name", ["standard, flat", "normalized, per_tensor", "srg", "scaled"])
def test_in_float32_too(name: str) -> None:
    agree(METHODS[name], "pairs", np.float32, 1e-3)


def alone(method: Any, *added: list[Any]) -> np.ndarray:
    """The sum of one batch at the first step."""
    mechanism, _ = begun(method)
    for blocks in added:
        mechanism.add(blocks)
    return mechanism.unit * np.concatenate(mechanism.vectors.totals)


@pytest.mark.parametrize("name", [name for name in METHODS if "," in name and "scaled" not in name])
def test_no_example_adds_more_than_the_sensitivity(name: str) -> None:
    mechanism, x = begun(METHODS[name])
    bound = mechanism.plan.sensitivity_at(0).contribution
    for i in range(EXAMPLES):
        for factor in (1.0, 1e-30, 1e30):
            mechanism.add([b.weighted(factor) for b in as_pairs(uses(x, np.array([i])))])
            added = np.linalg.norm(mechanism.unit * np.concatenate(mechanism.vectors.totals))
            mechanism.discard()
            assert added <= bound
            assert added > 0.9 * bound or factor < 1e30


@pytest.mark.parametrize("where", ["inputs", "gradients"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["standard, flat", "normalized, per_tensor"])
def test_an_example_that_is_not_finite_adds_nothing(name: str, value: float, where: str) -> None:
    x = [p.astype(np.float32) for p in START]
    method, everyone = METHODS[name], np.arange(EXAMPLES)
    pairs = as_pairs(uses(x, everyone))
    pairs[2] = pairs[2].map(np.copy)
    getattr(pairs[2], where)[0][3, 2, 1] = value
    others = as_pairs(uses(x, np.delete(everyone, 3)))
    np.testing.assert_allclose(alone(method, pairs), alone(method, others), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_user_that_is_not_finite_adds_nothing_and_touches_no_other(value: float) -> None:
    """Not by a bit, if the user left out is the largest: no bound depends on another user."""
    x = [p.astype(np.float32) for p in START]
    method, sizes = METHODS["standard, flat"], [1, 4, 2, 5]
    whole = as_pairs(uses(x, np.arange(EXAMPLES)))
    for user, (start, stop) in enumerate([(0, 1), (1, 5), (5, 7), (7, 12)]):
        spoilt = [block.map(np.copy) for block in whole]
        spoilt[2].inputs[0][start] = value
        spoilt[4].gradients[0][stop - 1] = value
        others = as_pairs(uses(x, np.delete(np.arange(EXAMPLES), np.s_[start:stop])))
        left = [size for u, size in enumerate(sizes) if u != user]
        got = alone(method, *of_units(spoilt, sizes))
        wanted = alone(method, *of_units(others, left))
        np.testing.assert_array_equal(got, wanted)


def test_empty_batches_add_nothing() -> None:
    x = [p.astype(np.float32) for p in START]
    pairs = as_pairs(uses(x, np.zeros(0, np.int64)))
    for name in ("standard, flat", "standard, per_tensor"):
        assert not alone(METHODS[name], pairs).any()
        assert not list(of_units(pairs, []))


def test_an_example_without_a_gradient_has_no_bit() -> None:
    """Zeroed out, it must change neither the sum nor the adaptive norm."""
    mechanism, x = begun(METHODS["adaptive clip"])
    found = uses(x, np.arange(EXAMPLES))
    zeroed = [(*use[:-1], np.zeros_like(use[-1])) for use in found]
    zeroed[0] = (found[0][0], np.zeros_like(found[0][1]), found[0][2], np.zeros_like(found[0][3]))
    zeroed[4] = (np.zeros_like(found[4][0]), found[4][1])  # of this matrix the inputs are the gradients
    mechanism.add(as_pairs(zeroed))
    assert not any(total.any() for total in mechanism.vectors.totals)
    assert mechanism._running is not None
    assert mechanism._running._twice == 0


def test_refuses_blocks_that_do_not_fit() -> None:
    x = [p.astype(np.float32) for p in START]
    found = uses(x, np.arange(3))
    pairs, rows = as_pairs(found), as_rows(found)
    wide = Linear((np.zeros((3, 2, 4), np.float32),), (np.zeros((3, 2, 5), np.float32),), (1.0,))
    double = pairs[4].map(lambda array: array.astype(np.float64))
    cases: list[tuple[int, Any, type[Exception], str]] = [
        (2, wide, ArgumentError, r"^blocks\[2\]\.shape=\(5, 4\): must have 15 coordinates, as the tensor$"),
        (2, pairs[2].map(lambda array: array[:2]), ArgumentError, r"^blocks\[2\]\.examples=2: must be 3, as of"),
        (4, double, ArgumentTypeError, r"^blocks\[4\]\.dtype=float64: must be float32, as of the first$"),
        (3, rows[3][:2], ArgumentError, r"^blocks\[3\]\.examples=2: must be 3, as of the first$"),
        (3, Rows(rows[3][0]), ArgumentError, r"must be \(B, d\), one row for each example$"),
        (3, rows[3].tolist(), ArgumentTypeError, r"of type list: must be an array of the active backend$"),
    ]
    for place, block, error, words in cases:
        with pytest.raises(error, match=words):
            alone(METHODS["standard, flat"], [*pairs[:place], block, *pairs[place + 1 :]])
    with pytest.raises(ArgumentError, match=r"^len\(blocks\)=4: must be 5, one block for each tensor$"):
        alone(METHODS["standard, flat"], pairs[:4])
