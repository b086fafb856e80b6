"""From the options of the accounting commands to an event, built by the samplers that a run uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from dpcore.accounting import Adjacency, CyclicPoissonSampledGaussian, Event, Gaussian, PoissonSampledGaussian
from dpcore.errors import ArgumentError
from dpcore.sampling import (
    CyclicPoissonSampler,
    FixedOrderSampler,
    FixedSizeSampler,
    PoissonSampler,
    Sampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
)


@dataclass(frozen=True)
class Question:
    """A plan as the options give it; fields that are None were left out.

    Parameters
    ----------
    sampling : str
        One of `dpcore.cli.options.ACCOUNTED`.
    noise_multiplier, sample_rate, dataset_size, batch_size, steps, epochs, max_batch_size, groups
        As the options of these names.
    """

    sampling: str = "poisson"
    noise_multiplier: float | None = None
    sample_rate: float | None = None
    dataset_size: int | None = None
    batch_size: int | None = None
    steps: int | None = None
    epochs: float | None = None
    max_batch_size: int | None = None
    groups: int | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ArgumentError("steps, epochs: give one of --steps and --epochs, not both")
        if self.epochs is not None and self.epochs <= 0:
            raise ArgumentError(f"epochs={self.epochs!r}: must be greater than 0")
        if self.sample_rate is not None:
            if self.batch_size is not None:
                raise ArgumentError(
                    "sample_rate: give either --sample-rate, or --dataset-size with --batch-size, not both"
                )
            if not 0 < self.sample_rate <= 1:
                raise ArgumentError(f"sample_rate={self.sample_rate!r}: must be greater than 0 and at most 1")
            if self.sampling in ("fixed-order", "shuffled"):
                raise ArgumentError(
                    f"sample_rate: {_A_NAME[self.sampling]} has none; give --epochs, or --dataset-size with "
                    "--batch-size"
                )
            if self.sampling in ("fixed-size", "full-batch"):
                raise ArgumentError(f"sample_rate: is not for --sampling {self.sampling}; {_SIZES[self.sampling]}")
        for name, kind in {"max_batch_size": "truncated-poisson", "groups": "cyclic-poisson"}.items():
            if getattr(self, name) is not None and self.sampling != kind:
                option = name.replace("_", "-")
                raise ArgumentError(f"{name}={getattr(self, name)!r}: --{option} is only for --sampling {kind}")

    def with_(self, name: str, value: Any) -> Question:
        """Return the question with one setting more."""
        return replace(self, **{name: value})

    def after(self, steps: int) -> Question:
        """Return the same plan with so many steps."""
        if self.sampling in ("fixed-order", "shuffled") and self.dataset_size is None:
            # Without sizes a step is an epoch.
            return replace(self, epochs=float(steps), steps=None)
        return replace(self, steps=steps, epochs=None)

    def event(self) -> Event:
        """Return what is released.

        Raises `ArgumentError` where options are missing or contradict each other; the message says which to give.
        """
        if self.noise_multiplier is None:
            raise ArgumentError("noise_multiplier: give --noise-multiplier")
        if self.steps is None and self.epochs is None:
            raise ArgumentError("steps, epochs: give one of --steps and --epochs")
        sampler = self._sampler()
        if sampler is not None:
            return sampler.event(self.noise_multiplier, self._steps(sampler.steps_per_epoch))
        return self._without_sizes(self.noise_multiplier)

    @property
    def words(self) -> str:
        """The same for a person."""
        sampler = self._sampler()
        epoch = None if sampler is None else sampler.steps_per_epoch
        if self.sampling in ("fixed-order", "shuffled") and epoch is None:
            return f"{_WORDS[self.sampling]}, {math.ceil(self.epochs or 0):,} epochs"
        total = self._steps(self._epoch_of_rate() if epoch is None else epoch)
        if self.sampling in ("fixed-order", "shuffled"):
            used = getattr(sampler, "participations", int)(total)
            return f"{_WORDS[self.sampling]}, each example in {used:,} of {total:,} steps"
        rate = self.sample_rate if sampler is None else getattr(sampler, "sample_rate", None)
        said = _WORDS[self.sampling] if rate is None else f"{_WORDS[self.sampling]} at rate {rate:.6g}"
        if self.sampling == "truncated-poisson":
            said += f" cut off at {getattr(sampler, 'max_batch_size', None):,} examples"
        if self.sampling == "fixed-size":
            said += f" of {self.batch_size:,} of {self.dataset_size:,} examples"
        if self.groups is not None:
            said += f" in {self.groups:,} groups"
        return f"{said}, {total:,} steps"

    @property
    def steps_per_epoch(self) -> int | None:
        """The steps of one pass over the data; None where nothing tells them."""
        sampler = self._sampler()
        if sampler is not None:
            return sampler.steps_per_epoch
        return self._epoch_of_rate() if self.sample_rate is not None else None

    def steps_in_all(self) -> int:
        """Return the number of steps; of epochs, where an order is known by them alone."""
        sampler = self._sampler()
        if sampler is None and self.sampling in ("fixed-order", "shuffled"):
            return math.ceil(self.epochs or 0)
        return self._steps(self._epoch_of_rate() if sampler is None else sampler.steps_per_epoch)

    def _sampler(self) -> Sampler | None:
        """The sampler of the sizes; None where rates or epochs are given without them."""
        size, batch = self.dataset_size, self.batch_size
        given = size is not None and batch is not None
        if self.sampling == "poisson":
            if self.sample_rate is not None:
                return None if size is None else PoissonSampler(dataset_size=size, sample_rate=self.sample_rate)
            size, batch = self._sizes()
            return PoissonSampler(dataset_size=size, batch_size=batch)
        if self.sampling == "truncated-poisson":
            if size is None or (batch is None and self.sample_rate is None):
                raise ArgumentError(f"dataset_size: {_SIZES[self.sampling]}")
            return TruncatedPoissonSampler(
                dataset_size=size, batch_size=batch, sample_rate=self.sample_rate, max_batch_size=self.max_batch_size
            )
        if self.sampling == "fixed-size":
            size, batch = self._sizes()
            return FixedSizeSampler(dataset_size=size, batch_size=batch)
        if self.sampling == "cyclic-poisson":
            if self.groups is None:
                raise ArgumentError("groups: give --groups, the number of groups that take turns")
            if self.sample_rate is not None:
                return None
            size, batch = self._sizes()
            return CyclicPoissonSampler(dataset_size=size, batch_size=batch, groups=self.groups)
        if self.sampling in ("fixed-order", "shuffled") and given:
            kind = FixedOrderSampler if self.sampling == "fixed-order" else ShuffledSampler
            assert size is not None
            assert batch is not None
            return kind(dataset_size=size, batch_size=batch)
        return None

    def _without_sizes(self, multiplier: float) -> Event:
        if self.sampling == "poisson":
            assert self.sample_rate is not None
            # Taken as it is: the rounding of a run's rate to a multiple of 2^-32 is not asked for here.
            return PoissonSampledGaussian(self.sample_rate, multiplier, self._steps(self._epoch_of_rate()))
        if self.sampling == "cyclic-poisson":
            assert self.sample_rate is not None
            assert self.groups is not None
            steps = self._steps(self._epoch_of_rate())
            return CyclicPoissonSampledGaussian(self.sample_rate, self.groups, multiplier, 1.0, steps)
        if self.sampling == "full-batch":
            return Gaussian(multiplier, self._steps(1), Adjacency.ZERO_OUT)
        if self.epochs is None:
            name = _A_NAME[self.sampling]
            raise ArgumentError(f"steps: for {name} give --epochs instead, or add --dataset-size and --batch-size")
        return Gaussian(multiplier, math.ceil(self.epochs), Adjacency.ZERO_OUT)

    def _sizes(self) -> tuple[int, int]:
        if self.dataset_size is None or self.batch_size is None:
            raise ArgumentError(f"sample_rate: {_SIZES[self.sampling]}")
        return self.dataset_size, self.batch_size

    def _steps(self, steps_per_epoch: int) -> int:
        """The steps as given, or those of so many epochs, a last part of an epoch rounded up."""
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * steps_per_epoch)

    def _epoch_of_rate(self) -> int:
        return 1 if self.sample_rate is None else math.ceil(round((self.groups or 1) / self.sample_rate, 9))


_A_NAME = {"fixed-order": "a fixed order", "shuffled": "a shuffled order"}
_WORDS = {
    "poisson": "Poisson sampling",
    "truncated-poisson": "Poisson sampling",
    "fixed-size": "uniform subsets",
    "fixed-order": "a fixed order of batches",
    "shuffled": "a fresh order every epoch (no amplification)",
    "cyclic-poisson": "cyclic Poisson sampling",
    "full-batch": "the full batch",
}
_SIZES = {
    "poisson": "give --sample-rate, or --dataset-size with --batch-size",
    "truncated-poisson": "give --dataset-size, with --batch-size or --sample-rate",
    "fixed-size": "give --dataset-size and --batch-size",
    "cyclic-poisson": "give --sample-rate, or --dataset-size with --batch-size",
    "full-batch": "give --steps",
}


def ask(**given: Any) -> Question:
    """Return the question that the options put; raises ArgumentError where they contradict each other."""
    return Question(**given)
