"""Batches in an order that counts as known: a fixed one, a fresh one every epoch, a public list."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dpcore.accounting import Adjacency, Gaussian
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.sampling import draw
from dpcore.sampling.base import Blocks, Epochs, LibrarySampler, Patterns
from dpcore.sampling.draw import Indices
from dpcore.spec import validate


@dataclass(frozen=True, kw_only=True)
class FixedOrderSampler(Patterns, Epochs):
    """Cycles through one partition of the data set; step t takes batch t mod steps_per_epoch.

    The order is shuffled once, before the run, and never again. The shuffle is for training only: the privacy analysis
    takes the batches as known to the adversary, so nothing is lost if they are published. batch_size = dataset_size is
    full batch.

    Parameters
    ----------
    dataset_size, batch_size : int
        1 <= batch_size <= dataset_size.
    shuffle : bool
        Whether the order is drawn from the sampling key (the row kept for it) or is that of the data set.
    drop_last : bool
        Whether the examples of a last, shorter batch are left out of the whole run, or form a batch of their own that
        keeps its place. Averages are over `batch_size` either way.
    """

    shuffle: bool = True
    drop_last: bool = False
    kind = "fixed order"
    note = "the same batches in the same order in every epoch; no amplification by sampling is claimed"
    stated = ("steps_per_epoch", "shuffle", "drop_last")

    def patterns(self, steps: int) -> list[Indices]:
        """Return the steps at which the examples of each batch take part: j, j + steps_per_epoch, ... below `steps`.

        Returns
        -------
        list of (k,) int64
            One for each batch that occurs in steps 0 .. steps - 1; disjoint.
        """
        epoch, steps = self.steps_per_epoch, validate.integer(steps=steps, minimum=0)
        return [np.arange(first, steps, epoch, dtype=np.int64) for first in range(min(epoch, steps))]

    def _batch(self, key: bytes, step: int) -> Indices:
        first = step % self.steps_per_epoch * self.batch_size
        last = min(first + self.batch_size, self.dataset_size)
        if self.shuffle:
            return np.sort(draw.permutation(key, self.dataset_size)[first:last])
        return np.arange(first, last, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ShuffledSampler(Blocks, Epochs):
    """Every epoch goes through the data set once, in a fresh uniformly random order.

    The order of most training loops. **No amplification is claimed**: the orders count as known to the adversary, and
    an example then takes part once in every epoch, at steps that no data decide. So an epoch costs as much as one
    release, whatever the batch size, and nothing is lost if the orders are published.

    Parameters
    ----------
    dataset_size, batch_size : int
        1 <= batch_size <= dataset_size.
    drop_last : bool
        Whether the examples of an epoch's last, shorter batch are left out of that epoch (other ones in each), or form
        a batch of their own. Averages are over `batch_size` either way.

    Notes
    -----
    The order of epoch e is drawn by row e of the sampling stream, which no step of this sampler uses. A branch of a run
    keeps the orders (`keeps_order`): a fresh one amid an epoch could meet an example again. Under correlated noise the
    sensitivity is that of any one step from each epoch (`blocks`): the last step of one may be next to the first of the
    next.
    """

    drop_last: bool = False
    kind = "shuffled"
    note = (
        "a fresh order in every epoch, which the analysis takes as known: each example counts once an epoch; no "
        "amplification by sampling or shuffling is claimed"
    )
    stated = ("steps_per_epoch", "drop_last")

    def _batch(self, key: bytes, step: int) -> Indices:
        epoch, place = divmod(step, self.steps_per_epoch)
        first = place * self.batch_size
        return np.sort(draw.permutation(key, self.dataset_size, epoch)[first : first + self.batch_size])


@dataclass(frozen=True, init=False, eq=False)
class FixedBatches(Patterns, LibrarySampler):
    """Cycles through the given batches; step t takes batch t mod len(batches).

    Parameters
    ----------
    batches : iterable of (m,) integer arrays
        Example indices, 0 or more, no index twice in one batch; batches may be empty and may overlap. Copied.
    dataset_size : int, optional
        Number of examples; by default the largest index plus one.
    batch_size : float, optional
        The fixed denominator of averages; by default the size of the largest batch.

    Notes
    -----
    The batches must not depend on the data: they are public, and so is every choice made by whoever listed them.
    """

    batches: tuple[Indices, ...]
    dataset_size: int
    batch_size: float
    kind = "fixed batches"
    note = "a public list of batches, cycled through; no amplification by sampling is claimed"
    stated = ("steps_per_epoch", "batches_sha256")
    adjacency = Adjacency.ZERO_OUT
    keeps_order = True  # the batches are given
    secret = False

    def __init__(
        self, batches: Iterable[npt.ArrayLike], *, dataset_size: int | None = None, batch_size: float | None = None
    ) -> None:
        if isinstance(batches, (str, bytes)) or not hasattr(batches, "__iter__"):
            raise ArgumentTypeError(f"batches={batches!r}: must be a list of index arrays, one for each step")
        fixed = tuple(_batch(number, batch) for number, batch in enumerate(batches))
        if not any(batch.size for batch in fixed):
            raise ArgumentError("batches: must have at least one batch with at least one index")
        end = 1 + max(int(batch[-1]) for batch in fixed if batch.size)
        size = end if dataset_size is None else validate.integer(dataset_size=dataset_size, minimum=1)
        if end > size:
            raise ArgumentError(f"batches: index {end - 1} is outside of dataset_size={size}")
        largest = float(max(batch.size for batch in fixed))
        object.__setattr__(self, "batches", fixed)
        object.__setattr__(self, "dataset_size", size)
        object.__setattr__(
            self, "batch_size", largest if batch_size is None else validate.positive(batch_size=batch_size)
        )

    @property
    def max_batch_size(self) -> int:
        """The size of the largest batch, whatever the denominator."""
        return max(int(batch.size) for batch in self.batches)

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches: one pass through the list, whatever each example's share in it."""
        return len(self.batches)

    def participations(self, steps: int) -> int:
        """Return how often the most used example takes part in steps 0 .. steps - 1."""
        rounds, rest = divmod(validate.integer(steps=steps, minimum=0), len(self.batches))
        whole = self._uses(len(self.batches))
        return int((rounds * whole + self._uses(rest)).max())

    def patterns(self, steps: int) -> list[Indices]:
        """Return the steps below `steps` at which one and the same example takes part, once for each such pattern."""
        steps, cycle = validate.integer(steps=steps, minimum=0), len(self.batches)
        shown = self.batches[:steps]
        if not any(batch.size for batch in shown):
            return []
        example = np.concatenate(shown)
        place = np.repeat(np.arange(len(shown)), [batch.size for batch in shown])
        by_example = np.argsort(example, kind="stable")  # keeps the places of one example ascending
        cuts = np.flatnonzero(np.diff(example[by_example])) + 1
        distinct = {tuple(places.tolist()) for places in np.split(place[by_example], cuts)}
        starts = np.arange(0, steps, cycle, dtype=np.int64)
        rounds = [np.add.outer(starts, np.array(places, np.int64)).ravel() for places in sorted(distinct)]
        return [pattern[pattern < steps] for pattern in rounds]

    def _uses(self, count: int) -> npt.NDArray[np.int64]:
        """Return how often each example occurs in the first `count` batches, (dataset_size,)."""
        used = np.concatenate([np.empty(0, np.int64), *self.batches[:count]])
        return np.bincount(used, minlength=self.dataset_size).astype(np.int64)

    def _batch(self, key: bytes, step: int) -> Indices:
        return self.batches[step % len(self.batches)]  # read-only

    def event(self, noise_multiplier: float, steps: int) -> Gaussian:
        """Return the event of `steps` steps: Gaussian, with one release for each use of the most used example."""
        return Gaussian(noise_multiplier, self.participations(steps), Adjacency.ZERO_OUT)

    @property
    def batches_sha256(self) -> str:
        """Digest of the batches, by which a resumed run cannot have others."""
        digest = hashlib.sha256()
        for batch in self.batches:
            digest.update(np.array([batch.size, *batch], dtype="<i8").tobytes())
        return digest.hexdigest()


def _batch(number: int, batch: npt.ArrayLike) -> Indices:
    try:
        array = np.asarray(batch)
    except ValueError:  # sequences of different lengths
        raise ArgumentError(f"batches[{number}]: must be one-dimensional, not lists of different lengths") from None
    if array.ndim != 1:
        raise ArgumentError(f"batches[{number}]: must be one-dimensional, not of shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise ArgumentTypeError(f"batches[{number}]: must be integer indices, not {array.dtype}")
    ordered = np.sort(array.astype(np.int64))
    if ordered.size and ordered[0] < 0:
        raise ArgumentError(f"batches[{number}]: index {ordered[0]} must be 0 or greater")
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise ArgumentError(f"batches[{number}]: index {twice[0]} occurs twice; an example counts once in a batch")
    ordered.flags.writeable = False
    return ordered
