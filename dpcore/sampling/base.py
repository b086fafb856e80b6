"""The protocol of a sampler: the public rule that says which examples take part in which step.

A sampler holds public settings only. The secret it draws from is an argument of `indices`, so that a sampler can be
printed, stored in a config and hashed into a statement. It is stateless: any step can be asked for at any time, in any
order, which is all that resuming and sharding need.

The same object feeds training (`indices`) and accounting (`event`): the two cannot disagree.
"""

from __future__ import annotations

import math
from typing import Any, Final, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt

from dpcore.accounting import Adjacency, Event
from dpcore.errors import ArgumentTypeError, PrivacyError
from dpcore.stages.strategies import Strategy

Indices = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Chooses indices, never data. The unit is one example; for `UserSampler` a user, whose examples come in a row.

    `BaseSampler` has most of the members.
    """

    @property
    def dataset_size(self) -> int:
        """Number of examples; indices lie in [0, dataset_size)."""

    @property
    def expected_batch_size(self) -> float:
        """The one fixed, public denominator of every average, whatever a step's realized size."""

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every example has been used once, or once in expectation (rounded up)."""

    @property
    def max_batch_size(self) -> int | None:
        """The most examples that any step can have, whatever is drawn; None where only the data set bounds them."""

    @property
    def likely_batch_size(self) -> int:
        """The most examples of a step, of which sums and their rounding are made; exceeded with probability < 1e-30."""

    @property
    def keeps_order(self) -> bool:
        """Whether the batches of all steps are one arrangement, so that a resumed run must keep it.

        False where every step draws anew, in secret: a branch of a run must then draw other batches than the run it
        left, for two releases about one draw cost more than two draws. True where an order is repeated: a branch under
        another order could meet an example once more than accounted.
        """

    @property
    def adjacency(self) -> Adjacency:
        """The adjacency its events are described under."""

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

    def event(self, noise_multiplier: float, steps: int) -> Event:
        """Return the event of `steps` noisy sums over the batches of steps 0 .. steps - 1.

        Parameters
        ----------
        noise_multiplier : float
            Standard deviation of the noise on the sum over C, where C bounds the norm of one example's clipped vector
            (C_eff of the clip), for every sampler alike. The event converts it to its own adjacency.
        steps : int
            Number of steps, 0 or more.
        """

    def describe(self) -> dict[str, Any]:
        """Return the public settings for a privacy statement, as JSON values."""

    @property
    def unit_of_privacy(self) -> str:
        """What neighbors differ in: "example" or "user"."""

    @property
    def example_count(self) -> int:
        """The number of examples, also where users are drawn; indices lie in [0, example_count)."""

    def units(self, key: bytes, step: int) -> npt.NDArray[np.int64] | None:
        """Return how many of a step's indices belong to each unit, in their order; None where each is one."""

    def unit_of(self, examples: Indices) -> Indices:
        """Return the number of the unit to which each of these examples belongs."""

    def meetings(self, first: int, stop: int) -> int:
        """Return how often one example takes part in steps [first, stop) of a kept order, at most."""

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Refuse correlated noise that the analysis of this sampler does not cover.

        Raises
        ------
        PrivacyError
            Where it does not; by default always.
        """

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Return how far one example moves rows [first, steps) of C times the sums; not where bands are amplified."""

    @property
    def amplified_bands(self) -> int | None:
        """The most bands of correlated noise under which its sampling amplifies, by `banded_event`; None elsewhere."""

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
        """Return the event under banded noise, as `CyclicPoissonSampler` does; only where bands are amplified."""


class BaseSampler:
    """What holds for most samplers of a `dataset_size` and a `batch_size`.

    Every step draws anew, a unit is an example, and correlated noise is not covered.
    """

    keeps_order: bool = False
    unit_of_privacy: str = "example"

    @property
    def expected_batch_size(self: Any) -> float:
        """The fixed denominator: the batch size as given."""
        return float(self.batch_size)

    @property
    def steps_per_epoch(self: Any) -> int:
        """dataset_size / batch_size, rounded up: so many steps use every example once, in expectation."""
        return int(math.ceil(round(self.dataset_size / self.batch_size, 9)))  # noqa: RUF046 (for mypy)

    @property
    def likely_batch_size(self: Any) -> int:
        """The largest batch; without a maximum the whole data set."""
        return int(self.dataset_size if self.max_batch_size is None else self.max_batch_size)

    @property
    def example_count(self: Any) -> int:
        """The size of the data set."""
        return int(self.dataset_size)

    def units(self, key: bytes, step: int) -> npt.NDArray[np.int64] | None:
        """Return None: each index is a unit."""
        return None

    def unit_of(self, examples: Indices) -> Indices:
        """Return the examples."""
        return examples

    def meetings(self, first: int, stop: int) -> int:
        """Return the number of steps."""
        return stop - first

    @property
    def amplified_bands(self) -> int | None:
        """None."""
        return None

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Refuse every strategy."""
        raise PrivacyError(
            f"sampler={type(self).__name__}: correlated noise is accounted for by the steps at which an example takes "
            "part, which must be fixed; use FixedOrderSampler (sampling='fixed-order'), or strategy=None with this "
            "sampler"
        )

    def moved(self, strategy: Strategy, steps: int, first: int = 0) -> float:
        """Refuse every strategy."""
        self.check_strategy(strategy, steps)
        raise NotImplementedError

    def banded_event(self, *given: Any, **named: Any) -> Event:
        """Nothing is amplified, and nobody asks."""
        raise NotImplementedError


_MEMBERS: Final = tuple(name for name in vars(Sampler) if not name.startswith("_"))


def is_sampler(value: Any) -> TypeGuard[Sampler]:
    """Whether an object has what a sampler has."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in _MEMBERS)


def check_sampler(**values: Any) -> Sampler:
    """Return the value if it is a sampler; raise ArgumentTypeError otherwise."""
    ((name, value),) = values.items()
    if not is_sampler(value):
        raise ArgumentTypeError(f"{name}={value!r}: must be a sampler from dpcore.sampling, or have all members of one")
    return value
