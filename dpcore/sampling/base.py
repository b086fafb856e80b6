"""A sampler: the public rule that says which examples take part in which step.

A sampler has only public settings. The secret it draws from is an argument of `indices`, so that a sampler can be
printed, stored in a config and hashed into a statement. It is stateless: any step can be drawn at any time, in any
order, as resuming and sharding need.

The same object feeds training (`indices`) and accounting (`event`): the two cannot disagree.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeGuard

import numpy as np
import numpy.typing as npt

from dpcore.accounting import Adjacency, Event, Gaussian
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.sampling import draw
from dpcore.sampling.draw import Indices
from dpcore.spec import validate
from dpcore.stages.strategies import Strategy, sensitivity
from dpcore.stages.strategies.sensitivity import block_sensitivity


class Sampler:
    """Chooses indices, never data. The unit is one example; for `UserSampler` a user, whose examples come in a row.

    The defaults suit most samplers with a `dataset_size` and a `batch_size`: every step draws afresh, a unit is an
    example, and correlated noise is not covered.

    Attributes
    ----------
    dataset_size : int
        Number of examples; indices are in [0, dataset_size).
    max_batch_size : int or None
        The most examples that any step can have, whatever is drawn; None if only the data set bounds them.
    adjacency : Adjacency
        The adjacency its events are described under.
    keeps_order : bool
        Whether the batches of all steps are one arrangement, so that a resumed run must keep it. False if every step
        draws afresh, in secret: a branch of a run must then draw other batches than the run it left, since two releases
        about one draw cost more than two draws. True if an order is repeated: a branch under another order could meet
        an example once more than accounted.
    unit_of_privacy : str
        The difference of neighbors: "example" or "user".
    """

    if TYPE_CHECKING:  # properties here would become the defaults of the samplers' fields

        @property
        def dataset_size(self) -> int: ...  # noqa: D102
        @property
        def max_batch_size(self) -> int | None: ...  # noqa: D102
        @property
        def adjacency(self) -> Adjacency: ...  # noqa: D102

    keeps_order: bool = False
    unit_of_privacy: str = "example"

    @property
    def expected_batch_size(self: Any) -> float:
        """The one fixed, public denominator of every average, whatever a step's realized size."""
        return float(self.batch_size)

    @property
    def steps_per_epoch(self: Any) -> int:
        """Steps after which every example has been used once, or once in expectation: rounded up."""
        return int(math.ceil(round(self.dataset_size / self.batch_size, 9)))  # noqa: RUF046 (for mypy)

    @property
    def likely_batch_size(self) -> int:
        """The most examples of a step, for sums and their rounding; exceeded with probability < 1e-30."""
        return int(self.dataset_size if self.max_batch_size is None else self.max_batch_size)

    @property
    def example_count(self) -> int:
        """The number of examples, even if users are drawn; indices are in [0, example_count)."""
        return int(self.dataset_size)

    def indices(self, key: bytes, step: int) -> Indices:
        """Return the examples of a step, sorted, without repetition.

        Parameters
        ----------
        key : bytes
            The run's 32-byte sampling key, as secret as the noise. Samplers that draw nothing ignore it.
        step : int
            0 <= step < 2^32 - 1.

        Returns
        -------
        (m,) int64
            May be empty.
        """
        raise NotImplementedError

    def event(self, noise_multiplier: float, steps: int) -> Event:
        """Return the event of `steps` noisy sums over the batches of steps 0 .. steps - 1.

        Parameters
        ----------
        noise_multiplier : float
            Standard deviation of the noise on the sum over C, the bound on the norm of one example's clipped vector
            (C_eff of the clip), for every sampler. The event converts it to its own adjacency.
        steps : int
            Number of steps, 0 or more.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the public settings for a privacy statement, as JSON values."""
        raise NotImplementedError

    def units(self, key: bytes, step: int) -> npt.NDArray[np.int64] | None:
        """Return how many of a step's indices belong to each unit, in their order; None if each is a unit."""
        return None

    def unit_of(self, examples: Indices) -> Indices:
        """Return the number of the unit to which each of these examples belongs."""
        return examples

    def meetings(self, first: int, stop: int) -> int:
        """Return how often one example takes part in steps [first, stop) of a kept order, at most."""
        return stop - first

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Refuse correlated noise that the analysis of this sampler does not cover, with a `PrivacyError`."""
        raise PrivacyError(
            f"sampler={type(self).__name__}: correlated noise is accounted for by the steps at which an example takes "
            "part in an epoch; use sampling='fixed-order', 'shuffled' or 'random-allocation', or strategy=None with "
            "this sampler"
        )

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves rows [first, steps) of C times the sums; not used if bands are amplified."""
        self.check_strategy(strategy, steps)
        raise NotImplementedError

    @property
    def amplified_bands(self) -> int | None:
        """The most bands of correlated noise under which its sampling amplifies, by `banded_event`; None elsewhere."""
        return None

    def banded_event(
        self,
        noise_multiplier: float,
        steps: int,
        abandoned: int,
        branches: int,
        *,
        bands: int,
        column_norm: float,
        strategy: str,
    ) -> Event:
        """Return the event under banded noise, as in `CyclicPoissonSampler`; only used if bands are amplified."""
        raise NotImplementedError


_MEMBERS: Final = (
    "dataset_size", "max_batch_size", "adjacency", *(name for name in vars(Sampler) if not name.startswith("_"))
)  # fmt: skip


def is_sampler(value: Any) -> TypeGuard[Sampler]:
    """Whether an object has a sampler's members."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _MEMBERS)


def check_sampler(**values: Any) -> Sampler:
    """Return the value if it is a sampler; raise ArgumentTypeError otherwise."""
    ((name, value),) = values.items()
    if not is_sampler(value):
        raise ArgumentTypeError(f"{name}={value!r}: must be a sampler from dpcore.sampling, or have all members of one")
    return value


# Shared by the library's samplers: descriptions, and when an example takes part.


def _flag(**values: Any) -> bool:
    (value,) = values.values()
    return bool(value)


class LibrarySampler(validate.Checked, Sampler):
    """A sampler that draws a whole batch, and is described by its settings."""

    kind: ClassVar[str]
    """The name in descriptions, with spaces; with hyphens it is that of `dpcore.sampling.sampler`."""
    note: ClassVar[str]
    secret: ClassVar[bool] = True
    stated: ClassVar[tuple[str, ...]] = ()
    """Fields of a description in addition to sizes and adjacency."""

    dataset_size: int
    batch_size: float
    adjacency: Adjacency
    rules: ClassVar[validate.Rules] = {
        "dataset_size": partial(validate.integer, 1),
        "batch_size": validate.positive,
        "groups": partial(validate.integer, 1),
        "shuffle": _flag,
        "drop_last": _flag,
    }

    def indices(self, key: bytes, step: int) -> Indices:
        """Return the examples of a step, sorted, (m,) int64."""
        return self._batch(key, draw.check_step(step))

    def _batch(self, key: bytes, step: int) -> Indices:
        """Return all examples of a step, sorted."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return the public settings."""
        return {
            "sampler": self.kind,
            "dataset_size": self.dataset_size,
            "expected_batch_size": self.batch_size,
            **{name: getattr(self, name) for name in self.stated},
            "adjacency": self.adjacency.value,
            "secret": self.secret,
            "note": self.note,
        }

    def _check_batch_size(self) -> None:
        if self.batch_size > self.dataset_size:
            raise ArgumentError(f"batch_size={self.batch_size:.10g}: must be at most dataset_size={self.dataset_size}")


@dataclass(frozen=True, kw_only=True)
class WholeBatches(LibrarySampler):
    """Batches of exactly `batch_size` of `dataset_size` examples, both public."""

    dataset_size: int
    batch_size: int
    rules: ClassVar[validate.Rules] = {**LibrarySampler.rules, "batch_size": partial(validate.integer, 1)}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_batch_size()

    @property
    def max_batch_size(self) -> int:
        """The batch size."""
        return self.batch_size


class Patterns:
    """The steps of every example are known before the run: every strategy is covered."""

    def patterns(self, steps: int) -> list[Indices]:
        """Return the steps, ascending and below `steps`, at which one and the same example takes part, int64.

        Every pattern that some example shows, once. Examples that are never used show none.
        """
        raise NotImplementedError

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Every strategy is covered."""

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves C times the sums, at the steps of its batch."""
        return sensitivity(strategy, self.patterns(steps), steps, first)

    def meetings(self, first: int, stop: int) -> int:
        """Return how often the most used example takes part in steps [first, stop)."""
        return max((int((steps >= first).sum()) for steps in self.patterns(stop)), default=0)


class Blocks:
    """An example takes part once in each epoch, at an unknown step: a bound over all covers every strategy."""

    steps_per_epoch: Any

    def blocks(self, steps: int) -> list[Indices]:
        """Return the steps of each epoch below `steps`, (k,) int64: an example takes part in at most one of each."""
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, min(first + epoch, steps), dtype=np.int64) for first in range(0, steps, epoch)]

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Every strategy is covered."""

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves C times the sums, at most, at any one step of each epoch."""
        return block_sensitivity(strategy, self.blocks(steps), steps, first)

    def meetings(self, first: int, stop: int) -> int:
        """Return how many epochs reach into steps [first, stop)."""
        epoch: int = self.steps_per_epoch
        return -(-stop // epoch) - first // epoch if first < stop else 0


class Epochs(WholeBatches):
    """An order of all examples, cut into batches. `drop_last` says whether the rest of an epoch is left out.

    The adjacency is zero-out: removing an example would move the others to other batches.
    """

    drop_last: bool
    adjacency = Adjacency.ZERO_OUT
    keeps_order = True  # within an epoch the batches are one arrangement
    secret = False

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches of an epoch."""
        whole = self.dataset_size // self.batch_size
        return whole if self.drop_last else -(-self.dataset_size // self.batch_size)

    def participations(self, steps: int) -> int:
        """Return how often an example takes part in `steps` steps, at most: once in each epoch that they begin."""
        return -(-validate.integer(steps=steps, minimum=0) // self.steps_per_epoch)

    def event(self, noise_multiplier: float, steps: int) -> Gaussian:
        """Return the event of `steps` steps: Gaussian, with one release for each time an example takes part."""
        return Gaussian(noise_multiplier, self.participations(steps), Adjacency.ZERO_OUT)


# One process's share of every step's batch.


@dataclass(frozen=True)
class Shard:
    """The share of process `rank` of `world_size` in the batches of a sampler; made by `shard`.

    Not a sampler: it has no event. The accounting is for the batch of all shares together, so the clipped sums of all
    processes must be added up before **one** draw of noise is added.

    Attributes
    ----------
    sampler : Sampler
        Sampler of the whole batches.
    rank, world_size : int
        0 <= rank < world_size.
    """

    sampler: Sampler
    rank: int
    world_size: int

    def indices(self, key: bytes, step: int) -> Indices:
        """Return this process's part of ``sampler.indices(key, step)``; in the order of ranks the parts join to it.

        `key` is the run's sampling key, the same in every process.
        """
        batch = self.sampler.indices(key, step)
        units = self.sampler.units(key, step)
        if units is None:
            first, last = self._range(batch.size)
        else:  # a unit's vectors are summed before they are clipped, and so stay together
            first, last = (int(units[:end].sum()) for end in self._range(units.size))
        return batch[first:last]

    def first(self, key: bytes, step: int) -> int:
        """Return the place of this process's first example in the whole batch."""
        units = self.sampler.units(key, step)
        if units is None:
            return self._range(self.sampler.indices(key, step).size)[0]
        return int(units[: self._range(units.size)[0]].sum())

    def units(self, key: bytes, step: int) -> npt.NDArray[np.int64] | None:
        """Return how many of `indices` belong to each unit, or None if every example is a unit."""
        units = self.sampler.units(key, step)
        return None if units is None else units[slice(*self._range(units.size))]

    def _range(self, count: int) -> tuple[int, int]:
        return self.rank * count // self.world_size, (self.rank + 1) * count // self.world_size


def shard(sampler: Sampler, rank: int, world_size: int) -> Shard:
    """Return one process's share of every step's batch.

    All processes use the same sampler and key, and each takes a slice: without a message between them the shares are
    disjoint, join to the whole batch, and differ in size by at most one example (or user).

    Parameters
    ----------
    sampler : Sampler
        Any of `dpcore.sampling`.
    rank, world_size : int
        Which process, of how many: 0 <= rank < world_size.
    """
    check_sampler(sampler=sampler)
    world = validate.integer(world_size=world_size, minimum=1)
    own = validate.integer(rank=rank, minimum=0)
    if own >= world:
        raise ArgumentError(f"rank={rank}: must be less than world_size={world}")
    return Shard(sampler, own, world)
