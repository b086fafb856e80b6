"""Events of Gaussian noise on sums over secretly sampled examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dpcore.accounting.events.base import Adjacency, Event
from dpcore.errors import ArgumentError
from dpcore.spec import validate

_MOST_EXAMPLES = 1 << 53
_MOST_BATCHES = 1 << 24


@dataclass(frozen=True)
class PoissonSampledGaussian(Event):
    """`steps` sums, each over a fresh secret Poisson sample, each with independent Gaussian noise.

    The adjacency is add-remove.

    Sensitivity assumed: C, the bound on the norm of one example's vector. Each example enters a step with probability
    exactly `sample_rate`, independently of all others and of all other steps; a full batch is never cut off.

    Parameters
    ----------
    sample_rate : float
        Probability that an example enters a step, 0 < sample_rate <= 1.
    noise_multiplier : float
        Standard deviation of the noise on the sum over C; 0 means epsilon = infinity.
    steps : int
        Number of steps, 0 or more.
    """

    sample_rate: float
    noise_multiplier: float
    steps: int
    adjacency = Adjacency.ADD_REMOVE


@dataclass(frozen=True)
class FixedSizeSampledGaussian(Event):
    """`steps` sums, each over a fresh secret uniform subset of exactly `batch_size` examples. Replace-one adjacency.

    Sensitivity assumed: 2C (one example's vector is exchanged for another's), so `noise_multiplier` is the standard
    deviation of the noise on the sum over 2C, half of the multiplier relative to the clip norm C.

    Parameters
    ----------
    dataset_size, batch_size : int
        Number of examples, and how many of them each step draws without replacement.
    noise_multiplier : float
        Standard deviation of the noise on the sum over 2C; 0 means epsilon = infinity.
    steps : int
        Number of steps, 0 or more.
    """

    dataset_size: int
    batch_size: int
    noise_multiplier: float
    steps: int
    adjacency = Adjacency.REPLACE_ONE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be at most dataset_size={self.dataset_size}")


@dataclass(frozen=True)
class TruncatedPoissonSampledGaussian(Event):
    """`steps` sums, each over a fresh secret Poisson sample that is cut down to at most `max_batch_size` examples.

    Where more examples land in a step, a uniformly random subset of exactly `max_batch_size` of them is kept. The step
    is then a mixture (`dpcore.accounting.phases`): in some steps an example is in with another probability than the
    rate.

    Sensitivity assumed: C, the bound on the norm of one example's vector, under either adjacency. Under add-remove a
    full batch exchanges one example for another, which the accounting counts as 2C.

    Parameters
    ----------
    dataset_size : int
        Number of examples that toss a coin, the one in question included.
    sample_rate : float
        Probability that an example lands in a step before the cut, 0 < sample_rate <= 1.
    max_batch_size : int
        Hard maximum of examples in a step.
    noise_multiplier : float
        Standard deviation of the noise on the sum over C; 0 means epsilon = infinity.
    steps : int
        Number of steps, 0 or more.
    adjacency : Adjacency
        Zero-out (the default: an example without a contribution still tosses its coin and takes its place) or
        add-remove.

    References
    ----------
    Zero-out: derived in `dpcore.accounting.phases`. Add-remove: dp-accounting 0.6, and arXiv 2508.15089.
    """

    dataset_size: int
    sample_rate: float
    max_batch_size: int
    noise_multiplier: float
    steps: int
    adjacency: Adjacency = Adjacency.ZERO_OUT

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset_size > _MOST_EXAMPLES:
            raise ArgumentError("dataset_size: must be at most 2^53, beyond which float64 holds no exact counts")
        if self.adjacency is Adjacency.REPLACE_ONE:
            raise ArgumentError("adjacency='replace-one': must be 'zero-out' or 'add-remove' for truncated sampling")


@dataclass(frozen=True)
class CyclicPoissonSampledGaussian(Event):
    """`steps` sums under banded noise; the examples of group t mod `groups` may enter step t, by secret Poisson coins.

    Every example belongs to one of `groups` fixed groups. The noise is C^{-1} Z with a lower-triangular C of at most
    `groups` bands. An example's possible steps are then at least `groups` apart, the columns of C at those steps have
    no row in common, and each of them is one Gaussian mechanism on its own rows, entered with probability
    `sample_rate`: the run is as private as ceil(steps / groups) steps of `PoissonSampledGaussian` whose sensitivity is
    the largest column norm of C.

    Sensitivity assumed: one example moves one sum by at most C (the clip norm), under zero-out; the groups stay as they
    are.

    Parameters
    ----------
    sample_rate : float
        Probability that an example of the step's group enters it, 0 < sample_rate <= 1.
    groups : int
        Number of groups, at least the number of bands of the strategy.
    noise_multiplier : float
        Standard deviation of a coordinate of Z over the clip norm; 0 means epsilon = infinity.
    sensitivity : float
        Largest column norm of the strategy.
    steps : int
        Number of steps, 0 or more.
    strategy : str
        Name or digest of the strategy.

    References
    ----------
    Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: A unified approach to private training", 2023
    (amplification of banded strategies under cyclic Poisson sampling).
    """

    sample_rate: float
    groups: int
    noise_multiplier: float
    sensitivity: float
    steps: int
    strategy: str = "identity"
    adjacency = Adjacency.ZERO_OUT
    rules: ClassVar[validate.Rules] = {**Event.rules, "sensitivity": validate.positive}

    @property
    def participations(self) -> int:
        """The most steps that one example may enter."""
        return -(-self.steps // self.groups)


@dataclass(frozen=True)
class RandomAllocationGaussian(Event):
    """Epochs in each of which every example enters one of `batches` sums, drawn in secret, with Gaussian noise on each.

    Also known as balls in bins. The adjacency is add-remove: examples are drawn independently, so one more or less
    leaves the batches of the others as they are. An epoch that ends early counts as a whole one.

    Sensitivity assumed: C, the bound on the norm of one example's vector. Each example enters each of the sums of an
    epoch with probability exactly 1 / batches, exactly one of them, independently of all others and of all other
    epochs; a full batch is never cut off.

    Parameters
    ----------
    batches : int
        Sums of an epoch, 1 or more.
    noise_multiplier : float
        Standard deviation of the noise on a sum over C; 0 means epsilon = infinity.
    epochs : int
        Number of epochs, 0 or more.

    References
    ----------
    Chua et al., "Balls-and-Bins Sampling for DP-SGD", 2024. Feldman, Shenfeld, "Privacy amplification by random
    allocation", 2025.
    """

    batches: int
    noise_multiplier: float
    epochs: int
    adjacency = Adjacency.ADD_REMOVE

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batches > _MOST_BATCHES:
            raise ArgumentError(f"batches={self.batches}: must be at most 2^24, beyond which nothing is certified")
