"""The options of the accounting commands, and the event that they describe."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from dpcore import sampling
from dpcore.accounting import Adjacency, CyclicPoissonSampledGaussian, Event, Gaussian, PoissonSampledGaussian
from dpcore.cli.options import ACCOUNTED, option
from dpcore.cli.values import count, multiplier, name_or_file, one_of, real
from dpcore.errors import ArgumentError
from dpcore.methods import memf
from dpcore.plan.plan import Plan
from dpcore.sampling import Sampler
from dpcore.stages.strategies import NAMES, NamedStrategy, load
from dpcore.stages.strategies.saved import ENDINGS
from dpcore.statement.text import counted

_Real: TypeAlias = float | None
_Count: TypeAlias = int | None


@dataclass(frozen=True)
class EventOptions:
    """A plan as the options give it: each field is an option of this name. None means: not given."""

    # fmt: off
    noise_multiplier: Annotated[_Real, option(multiplier, "SIGMA",
        "Standard deviation of the noise on the sum over the clip norm.")] = None
    sample_rate: Annotated[_Real, option(real, "RATE",
        "Probability that an example enters a step, such as 0.01 or 256/60000.")] = None
    dataset_size: Annotated[_Count, option(count, "N",
        "Number of examples; with --batch-size instead of a rate.")] = None
    batch_size: Annotated[_Count, option(count, "N", "Expected number of examples in a batch.")] = None
    steps: Annotated[_Count, option(count, "N", "Number of optimizer steps.")] = None
    epochs: Annotated[_Real, option(real, "N", "Passes over the data, instead of --steps.")] = None
    sampling: Annotated[str, option(one_of(ACCOUNTED), "NAME",
        f"How batches are drawn: {', '.join(ACCOUNTED)}.")] = "poisson"
    max_batch_size: Annotated[_Count, option(count, "N",
        "Of truncated-poisson; by default passed once in a million steps.")] = None
    groups: Annotated[_Count, option(count, "N", "Of cyclic-poisson: groups that take turns.")] = None
    strategy: Annotated[str | None, option(name_or_file(NAMES, ENDINGS), "NAME",
        f"Correlates the noise: {', '.join(NAMES)}, or a file ({', '.join(ENDINGS)}).")] = None
    # fmt: on

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
            if self.sampling in _A_NAME:
                raise ArgumentError(
                    f"sample_rate: {_A_NAME[self.sampling]} has none; give --epochs, or --dataset-size with "
                    "--batch-size"
                )
            if self.sampling in ("fixed-size", "full-batch", "random-allocation"):
                raise ArgumentError(f"sample_rate: is not for --sampling {self.sampling}; {_SIZES[self.sampling]}")
        for name, kind in {"max_batch_size": "truncated-poisson", "groups": "cyclic-poisson"}.items():
            if getattr(self, name) is not None and self.sampling != kind:
                option = name.replace("_", "-")
                raise ArgumentError(f"{name}={getattr(self, name)!r}: --{option} is only for --sampling {kind}")

    def with_(self, name: str, value: Any) -> EventOptions:
        """Return the plan with one setting more; `name` is that of the option, without the dashes before it."""
        return replace(self, **{name.replace("-", "_"): value})

    def after(self, steps: int) -> EventOptions:
        """Return the same plan with so many steps."""
        if self.sampling in _A_NAME and self.dataset_size is None:
            # Without sizes a step is an epoch.
            return replace(self, epochs=float(steps), steps=None)
        return replace(self, steps=steps, epochs=None)

    def event(self) -> Event:
        """Return what is released; ArgumentError says which option is missing, or contradicts another."""
        if self.noise_multiplier is None:
            raise ArgumentError("noise_multiplier: give --noise-multiplier")
        if self.steps is None and self.epochs is None:
            raise ArgumentError("steps, epochs: give one of --steps and --epochs")
        sampler = self.sampler()
        if self.strategy is not None:
            if sampler is None:
                raise ArgumentError(f"strategy={self.strategy!r}: needs --dataset-size and --batch-size")
            named: Any = sampler  # frozen: it can be looked up
            unit: Any = _correlated(self.strategy, named, self._steps(sampler.steps_per_epoch))
            event: Event = replace(unit, noise_multiplier=self.noise_multiplier)
            return event
        if sampler is not None:
            return sampler.event(self.noise_multiplier, self._steps(sampler.steps_per_epoch))
        return self._without_sizes(self.noise_multiplier)

    @property
    def words(self) -> str:
        """The same for a person."""
        return self._sampled if self.strategy is None else f"{self._sampled}, noise correlated by {self.strategy}"

    @property
    def _sampled(self) -> str:
        sampler = self.sampler()
        epoch = None if sampler is None else sampler.steps_per_epoch
        if self.sampling in _A_NAME and epoch is None:
            return f"{_WORDS[self.sampling]}, {counted(math.ceil(self.epochs or 0), 'epoch')}"
        total = self._steps(self._epoch_of_rate() if epoch is None else epoch)
        if self.sampling in _A_NAME:
            used = getattr(sampler, "participations", int)(total)
            return f"{_WORDS[self.sampling]}, each example in {used:,} of {counted(total, 'step')}"
        rate = self.sample_rate if sampler is None else getattr(sampler, "sample_rate", None)
        said = _WORDS[self.sampling] if rate is None else f"{_WORDS[self.sampling]} at rate {rate:.6g}"
        if self.sampling == "truncated-poisson":
            said += f" cut off at {getattr(sampler, 'max_batch_size', None):,} examples"
        if self.sampling == "fixed-size":
            said += f" of {self.batch_size:,} of {self.dataset_size:,} examples"
        if self.groups is not None:
            said += f" in {counted(self.groups, 'group')}"
        return f"{said}, {counted(total, 'step')}"

    @property
    def steps_per_epoch(self) -> int | None:
        """The steps of one pass over the data; None where nothing tells them."""
        sampler = self.sampler()
        if sampler is not None:
            return sampler.steps_per_epoch
        return self._epoch_of_rate() if self.sample_rate is not None else None

    def steps_in_all(self) -> int:
        """Return the number of steps; of epochs, where an order is known by them alone."""
        sampler = self.sampler()
        if sampler is None and self.sampling in _A_NAME:
            return math.ceil(self.epochs or 0)
        return self._steps(self._epoch_of_rate() if sampler is None else sampler.steps_per_epoch)

    def sampler(self) -> Sampler | None:
        """Return the sampler of the sizes; None where rates or epochs are given without them."""
        size, batch, rate = self.dataset_size, self.batch_size, self.sample_rate
        if self.sampling == "cyclic-poisson" and self.groups is None:
            raise ArgumentError("groups: give --groups, the number of groups that take turns")
        if self.sampling == "full-batch" or (self.sampling in _A_NAME and None in (size, batch)):
            return None
        if rate is not None and (self.sampling == "cyclic-poisson" or (self.sampling == "poisson" and size is None)):
            return None
        if size is None or (batch is None and rate is None):
            name = "dataset_size" if self.sampling == "truncated-poisson" else "sample_rate"
            raise ArgumentError(f"{name}: {_SIZES[self.sampling]}")
        return sampling.sampler(
            self.sampling,
            dataset_size=size,
            batch_size=batch,
            sample_rate=rate,
            max_batch_size=self.max_batch_size,
            groups=self.groups,
        )

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

    def _steps(self, steps_per_epoch: int) -> int:
        """The steps as given, or those of so many epochs, a last part of an epoch rounded up."""
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * steps_per_epoch)

    def _epoch_of_rate(self) -> int:
        return 1 if self.sample_rate is None else math.ceil(round((self.groups or 1) / self.sample_rate, 9))


@lru_cache(maxsize=4)
def _correlated(strategy: str, sampler: Any, steps: int) -> Event:
    """Return the event of a run with correlated noise, at noise multiplier 1."""
    chosen = load(strategy) if Path(strategy).suffix.lower() in ENDINGS else NamedStrategy(strategy)
    return Plan(memf(lr=1.0, strategy=chosen, noise_multiplier=1.0), sampler, steps).event


_A_NAME = {"fixed-order": "a fixed order", "shuffled": "a shuffled order"}
_WORDS = {"poisson": "Poisson sampling", "truncated-poisson": "Poisson sampling", "fixed-size": "uniform subsets",
    "fixed-order": "a fixed order of batches", "shuffled": "a fresh order every epoch (no amplification)",
    "cyclic-poisson": "cyclic Poisson sampling", "random-allocation": "one random batch of every epoch",
    "full-batch": "the full batch"}  # fmt: skip
_SIZES = {
    "poisson": "give --sample-rate, or --dataset-size with --batch-size",
    "truncated-poisson": "give --dataset-size, with --batch-size or --sample-rate",
    "fixed-size": "give --dataset-size and --batch-size",
    "cyclic-poisson": "give --sample-rate, or --dataset-size with --batch-size",
    "random-allocation": "give --dataset-size and --batch-size",
    "full-batch": "give --steps",
}
