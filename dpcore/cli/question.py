"""From the options of ``epsilon`` and ``calibrate`` to an event, the way a plan would build it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpcore.accounting import Adjacency, Event, Gaussian, PoissonSampledGaussian
from dpcore.errors import ArgumentError


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
        raise ArgumentError(
            "steps, epochs: give one of --steps and --epochs" + (", not both" if steps is not None else "")
        )
    if sampling == "fixed-order":
        return _fixed_order(sample_rate, dataset_size, batch_size, steps, epochs)
    rate = _rate(sample_rate, dataset_size, batch_size)
    total = steps if steps is not None else _steps(epochs, rate)
    words = f"Poisson sampling at rate {rate:.6g}, {total:,} steps"
    return Question(lambda multiplier: PoissonSampledGaussian(rate, multiplier, total), words)


def _rate(sample_rate: float | None, dataset_size: int | None, batch_size: int | None) -> float:
    if sample_rate is not None:
        if dataset_size is not None or batch_size is not None:
            raise ArgumentError("sample_rate: give either --sample-rate, or --dataset-size with --batch-size, not both")
        if not 0 < sample_rate <= 1:
            raise ArgumentError(f"sample_rate={sample_rate!r}: must be greater than 0 and at most 1")
        return sample_rate
    if dataset_size is None or batch_size is None:
        raise ArgumentError("sample_rate: give --sample-rate, or --dataset-size with --batch-size")
    _fits(dataset_size, batch_size)
    return batch_size / dataset_size


def _fits(dataset_size: int, batch_size: int) -> None:
    if dataset_size < 1:
        raise ArgumentError(f"dataset_size={dataset_size}: must be at least 1")
    if not 1 <= batch_size <= dataset_size:
        raise ArgumentError(f"batch_size={batch_size}: must be at least 1 and at most dataset_size={dataset_size}")


def _steps(epochs: float | None, rate: float) -> int:
    if epochs is None or epochs <= 0:
        raise ArgumentError(f"epochs={epochs!r}: must be greater than 0")
    # The tolerance keeps 10 epochs at rate 256/60000 from gaining a step by rounding.
    return math.ceil(epochs / rate * (1 - 1e-12))


def _fixed_order(
    sample_rate: float | None, dataset_size: int | None, batch_size: int | None, steps: int | None, epochs: float | None
) -> Question:
    """The same order every epoch: one example takes part once in each, so its steps are one Gaussian mechanism."""
    if epochs is not None:
        if epochs <= 0:
            raise ArgumentError(f"epochs={epochs!r}: must be greater than 0")
        taken = math.ceil(epochs)
    elif sample_rate is not None:
        raise ArgumentError(
            "sample_rate: fixed-order sampling has none; give --epochs, or --dataset-size and --batch-size"
        )
    elif dataset_size is None or batch_size is None:
        raise ArgumentError(
            "epochs: for fixed-order sampling give --epochs, or --steps with --dataset-size and --batch-size"
        )
    else:
        _fits(dataset_size, batch_size)
        taken = math.ceil((steps or 0) / math.ceil(dataset_size / batch_size))
    words = f"a fixed order of batches, {taken:,} epochs"
    return Question(lambda multiplier: Gaussian(multiplier, taken, Adjacency.ZERO_OUT), words)
