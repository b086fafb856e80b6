"""What a step works with: each tensor's numbers of the update, and its vectors side by side."""

from __future__ import annotations

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


def check_release(plan: Plan, row: int, public: Sequence[Any] | None) -> None:
    """Refuse a step beyond the plan, and a public gradient that is given or left out where it must not be."""
    if row >= plan.steps:
        raise PrivacyError(f"step={row + 1}: the plan, and its guarantee, end at step {plan.steps}")
    if (public is not None) != (plan.method.update.second_moment == "public"):
        raise ArgumentError(
            "public: must be a gradient of public data for second_moment='public', and None for any other"
        )


def check_rate(rate: float, dtype: str) -> None:
    """Refuse a learning rate that the parameters' dtype cannot hold: the first step would leave no number."""
    largest = float(np.finfo(dtype).max)
    if not rate <= largest:
        raise ArgumentError(f"lr={rate:g}: must be at most {largest:.4g}, the largest {dtype}, and far lower to train")


def variances_in_squares(plan: Plan) -> NDArray[np.float64]:
    """Return the variance of the noise in each coordinate of what is squared, by step."""
    method = plan.method
    seed = plan.noise_standard_deviation() / plan.batch_size
    filtered = method.filter if method.update.second_moment == "filtered" else None
    return seed**2 * noise_variances(filtered, method.noise.strategy, plan.steps)


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
    known: dict[UpdateSettings, UpdateSettings] = {}
    for numbers in chosen:
        if numbers not in known:
            scheduled = numbers._replace(learning_rate=factor * numbers.learning_rate)
            check_rate(scheduled.learning_rate, dtype_name(parameters[0]))
            known[numbers] = method.update.prepared(scheduled, row, variances)
    return [known[numbers] for numbers in chosen]


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
    slots = []
    for i, (entry, (tensor, start, stop)) in enumerate(zip(own.entries, pieces, strict=True)):

        def part(of: Sequence[Any] | None, tensor: int = tensor, start: int = start, stop: int = stop) -> Any:
            return None if of is None else of[tensor].reshape(-1)[start:stop]

        slots.append(
            Slot(
                parameter=part(parameters),
                total=totals[i],
                first=entry.first,
                filter_state=vectors.filter_state[i],
                moments=vectors.moments[i],
                displacement=part(vectors.displacements),
                noise_state=vectors.noise_state[i],
                scale=part(vectors.scales) if scaled else None,
                square=None if public is None else part(public) ** 2,
            )
        )
    return slots
