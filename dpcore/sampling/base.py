"""What a sampler is: the public rule that says which examples take part in which step.

A sampler holds public settings only. The secret it draws from is an argument of `indices`, so that a sampler can be
printed, stored in a config and hashed into a statement. It is stateless: any step can be asked for at any time, in any
order, which is all that resuming, replaying and sharding need.

The same object feeds training (`indices`) and accounting (`event`): the two cannot disagree.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dpcore.accounting import Adjacency, Event

Indices = npt.NDArray[np.int64]


class Sampler(Protocol):
    """Chooses indices, never data.

    What the sensitivity of correlated noise rests on is known to samplers of three kinds. Where batches are fixed
    before the run, ``patterns(steps)`` lists the steps at which one and the same example takes part. Where an example
    takes part at most once in each of several blocks of steps, ``blocks(steps)`` lists the blocks
    (`ShuffledSampler`). `CyclicPoissonSampler` has ``banded_event``. Others are refused for correlated noise.

    The samplers of `dpcore.sampling` also take ``start`` and ``stop`` in `indices`, for processes that hold a part of
    the data each. The unit is one example; for `UserSampler` it is a user, whose examples `indices` gives in a row.
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
    def keeps_order(self) -> bool:
        """Whether the batches of all steps are one arrangement, so that a resumed run must keep it.

        False where every step draws anew: a branch of a run must then draw other batches than the run it left, for two
        releases about one draw cost more than two draws. True where an order is repeated: a branch under another order
        could meet an example once more than accounted.
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


def largest_batch(sampler: Sampler) -> int:
    """Return how many examples a step has at most, or with a probability of all but 1e-30 where coins are drawn.

    Where there is no `max_batch_size`, a sampler may have a ``likely_batch_size`` of that meaning.
    """
    most = sampler.max_batch_size
    return int(getattr(sampler, "likely_batch_size", sampler.dataset_size)) if most is None else most
