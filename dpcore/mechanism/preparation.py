"""The inputs of a step: each tensor's numbers of the update, and its vectors side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.vectors import RunVectors
from dpcore.plan.noise_variance import noise_variances
from dpcore.plan.plan import Plan
from dpcore.spec.check import dtype_name
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import Slot, UpdateSettings
from dpcore.stages.method import Method


def check_release(plan: Plan, row: int, public: Sequence[Any] | None) -> None:
    """Refuse a step beyond the plan, a public gradient that is not wanted, and one that is missing."""
    if row >= plan.steps:
        raise PrivacyError(f"step={row + 1}: the plan, and its guarantee, end at step {plan.steps}")
    if (public is not None) != (plan.method.update.second_moment == "public"):
        raise ArgumentError(
            "public: must be a gradient of public data for second_moment='public', and None for any other"
        )


def check_rate(rate: float, dtype: str) -> None:
    """Refuse a learning rate beyond the parameters' dtype: after the first step no parameter would be finite."""
    largest = float(np.finfo(dtype).max)
    if not rate <= largest:
        raise ArgumentError(f"lr={rate:g}: must be at most {largest:.4g}, the largest {dtype}, and far lower to train")


def variances_in_squares(plan: Plan) -> NDArray[np.float64]:
    """Return the variance of the noise in each coordinate before squaring, by step."""
    method = plan.method
    seed = plan.noise_standard_deviation() / plan.batch_size
    filtered = method.filter if method.update.second_moment == "filtered" else None
    return seed**2 * noise_variances(filtered, method.noise.strategy, plan.steps)


def correction(method: Method, beta2: float, steps: int) -> float:
    """Return what the second moment after `steps` steps is divided by: Adam's sum of weights, 1 for AdaGrad's sum.

    A delayed moment has one input a cycle; one without inputs is 0.
    """
    query, inputs = method.preconditioning, steps
    if query is not None and method.update.second_moment == "delayed":
        inputs = query.averages(steps)
    return 1 - beta2**inputs if inputs and "adam" in method.update.rule else 1.0


def numbers_of(
    plan: Plan,
    row: int,
    settings: Sequence[UpdateSettings] | None,
    parameters: Sequence[Any],
    variances: NDArray[np.float64] | None,
) -> list[UpdateSettings]:
    """Return each tensor's numbers of a step: schedule, bias of the second moment, denominators."""
    method = plan.method
    chosen = [method.update.settings()] * len(parameters) if settings is None else settings
    factor = 1.0 if method.schedule is None else method.schedule.factor(row, plan.steps)
    unscaled = getattr(method.update, "unscaled_lr_factor", None)
    if unscaled is not None and method.preconditioning is not None and not plan.scaled(row):
        factor *= unscaled
    known: dict[UpdateSettings, UpdateSettings] = {}
    objects = {id(numbers): numbers for numbers in chosen}  # most tensors share theirs
    for numbers in objects.values():
        if numbers not in known:
            scheduled = numbers._replace(learning_rate=factor * numbers.learning_rate)
            check_rate(scheduled.learning_rate, dtype_name(parameters[0]))
            known[numbers] = method.update.prepared(scheduled, row, variances)
    prepared = {place: known[numbers] for place, numbers in objects.items()}
    return [prepared[id(numbers)] for numbers in chosen]


def slots_of(
    vectors: RunVectors,
    own: Layout,
    pieces: Sequence[Piece],
    totals: Sequence[Any],
    parameters: Sequence[Any],
    public: Sequence[Any] | None,
    scaled: bool,
) -> list[Slot[Any]]:
    """Return the vectors of each piece that this process owns as a backend takes them; `totals` are its sums."""
    none = [None] * len(pieces)

    def parts(of: Sequence[Any] | None) -> Sequence[Any]:
        return none if of is None else [_part(of[tensor], start, stop) for tensor, start, stop in pieces]

    squares = none if public is None else [part**2 for part in parts(public)]
    # Column by column, in the order of a slot's fields: one by one they take three times as long.
    columns = (
        parts(parameters), totals, [entry.first for entry in own.entries], vectors.filter_state, vectors.moments,
        parts(vectors.displacements), vectors.noise_state, parts(vectors.scales if scaled else None), squares,
    )  # fmt: skip
    return list(map(Slot._make, zip(*columns, strict=True)))


def _part(vector: Any, start: int, stop: int) -> Any:
    """Return some neighboring coordinates of an array, flat; if these are all of a flat array, the array itself."""
    flat = vector if len(vector.shape) == 1 else vector.reshape(-1)
    return flat if start == 0 and stop == flat.shape[0] else flat[start:stop]
