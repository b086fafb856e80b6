"""From the options of ``epsilon`` and ``calibrate`` to an event, built by the samplers that ``train`` uses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpcore.accounting import Adjacency, Event, Gaussian, PoissonSampledGaussian
from dpcore.errors import ArgumentError
from dpcore.sampling import FixedOrderSampler, PoissonSampler


@dataclass(frozen=True)
class Question:
    """What is released, but for the noise multiplier.

    Parameters
    ----------
    make_event : callable
        noise multiplier -> event.
    words : str
        The same for a person.
    """

    make_event: Callable[[float], Event]
    words: str


def ask(
    sampling: str,
    sample_rate: float | None,
    dataset_size: int | None,
    batch_size: int | None,
    steps: int | None,
    epochs: float | None,
) -> Question:
    """Return the question that the options put.

    Raises
    ------
    ArgumentError
        Where options are missing or contradict each other; the message says which to give.
    """
    if (steps is None) == (epochs is None):
        both = ", not both" if steps is not None else ""
        raise ArgumentError(f"steps, epochs: give one of --steps and --epochs{both}")
    if epochs is not None and epochs <= 0:
        raise ArgumentError(f"epochs={epochs!r}: must be greater than 0")
    if sampling == "fixed-order":
        return _fixed_order(sample_rate, dataset_size, batch_size, steps, epochs)
    if sample_rate is not None:
        if dataset_size is not None or batch_size is not None:
            raise ArgumentError("sample_rate: give either --sample-rate, or --dataset-size with --batch-size, not both")
        if not 0 < sample_rate <= 1:
            raise ArgumentError(f"sample_rate={sample_rate!r}: must be greater than 0 and at most 1")
        # Taken as it is: the rounding of a run's rate to a multiple of 2^-32 is not asked for here.
        total = planned_steps(steps, epochs, math.ceil(round(1 / sample_rate, 9)))
        return Question(
            lambda multiplier: PoissonSampledGaussian(sample_rate, multiplier, total),
            f"Poisson sampling at rate {sample_rate:.6g}, {total:,} steps",
        )
    if dataset_size is None or batch_size is None:
        raise ArgumentError("sample_rate: give --sample-rate, or --dataset-size with --batch-size")
    poisson = PoissonSampler(dataset_size=dataset_size, batch_size=batch_size)
    total = planned_steps(steps, epochs, poisson.steps_per_epoch)
    words = f"Poisson sampling at rate {poisson.sample_rate:.6g}, {total:,} steps"
    return Question(lambda multiplier: poisson.event(multiplier, total), words)


def planned_steps(steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    """Return the number of steps: as given, or that of so many epochs, a last part of an epoch rounded up."""
    return steps if steps is not None else math.ceil((epochs or 0) * steps_per_epoch)


def _fixed_order(
    sample_rate: float | None, dataset_size: int | None, batch_size: int | None, steps: int | None, epochs: float | None
) -> Question:
    """The same order every epoch: one example takes part once in each, so its steps are one Gaussian mechanism."""
    if sample_rate is not None:
        raise ArgumentError("sample_rate: a fixed order has none; give --epochs, or --dataset-size with --batch-size")
    if dataset_size is not None and batch_size is not None:
        order = FixedOrderSampler(dataset_size=dataset_size, batch_size=batch_size)
        total = planned_steps(steps, epochs, order.steps_per_epoch)
        words = f"a fixed order of batches, each example in {order.participations(total):,} of {total:,} steps"
        return Question(lambda multiplier: order.event(multiplier, total), words)
    if epochs is None:
        raise ArgumentError("steps: for a fixed order give --epochs instead, or add --dataset-size and --batch-size")
    taken = math.ceil(epochs)
    words = f"a fixed order of batches, {taken:,} epochs"
    return Question(lambda multiplier: Gaussian(multiplier, taken, Adjacency.ZERO_OUT), words)
