"""Cyclic Poisson sampling: the groups of a public partition take turns, and within a group coins decide.

It joins amplification by sampling with correlated noise. With C of at most `groups` bands, the steps p, p + groups, ...
at which one example may take part have columns of C without a common row. To release S + C^{-1} Z is to release
C S + Z, where a coin of the example at step p moves only the rows p .. p + bands - 1: every coin is a Gaussian
mechanism on rows of its own, of sensitivity ||C[:, p]||, entered with the coin's probability. Together they are
ceil(steps / groups) Poisson-subsampled Gaussian mechanisms at the largest column norm.

Branches
--------
A run that goes back to a checkpoint at step t and on from there draws fresh noise rows and **fresh coins** from t on;
the rows and coins before t are those of the run it left, and the groups stay (they are public, and no secret of the run
decides them). Put the rows of all branches in one tree. A coin at step p of a branch moves the rows after it, fewer
than `groups` steps on, in every branch that they belong to.

- Coins whose rows are all in one branch: each is one subsampled mechanism as above. Those on the way to the present
  parameters are counted by the run's own event. Of the others there is at most one for each abandoned step, as many as
  that, all of one group: `abandoned` steps of a cycle of one group.
- Coins at p < t whose rows reach beyond t, into k branches more: one coin, and a vector of squared norm at most
  (1 + k) ||C[:, p]||^2. Two releases about one coin cost more than two about two coins, so no sampling is claimed for
  them. A point of branching is within reach of at most one such coin of an example, since its possible steps are
  `groups` apart, and 1 + k <= 2 k. So all of them are at most one Gaussian mechanism with
  mu^2 = 2 branches (largest norm / sigma)^2, where `branches` counts those left behind with rows of their own.

With independent noise (one band) no row is beyond t, and the second kind does not occur.

References
----------
Choquette-Choo et al., "(Amplified) Banded Matrix Factorization: A unified approach to private training", 2023, Theorem
4. The branches are ours.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from dpcore.accounting import Adjacency, Composed, CyclicPoissonSampledGaussian, Event, Gaussian
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.sampling import draw
from dpcore.sampling.base import LibrarySampler
from dpcore.sampling.draw import Indices
from dpcore.sampling.poisson import WORDS
from dpcore.spec import validate
from dpcore.spec.stream import derive_key
from dpcore.stages.strategies import Strategy
from dpcore.stages.strategies.sensitivity import bands

# Known to everybody: the partition is a public setting, and outlives the run's keys.
_PUBLIC_KEY = derive_key(bytes(32), "dpcore public partition")


@dataclass(frozen=True, kw_only=True)
class CyclicPoissonSampler(LibrarySampler):
    """Step t draws Poisson coins among the examples of group t mod `groups`; the groups are fixed and public.

    With independent noise or a banded strategy of at most `groups` bands.

    Parameters
    ----------
    dataset_size : int
        Number of examples. Treated as public.
    batch_size : float
        Expected batch size, at most dataset_size / groups; the fixed denominator of averages. The coins' rate is
        batch_size groups / dataset_size, rounded down to a multiple of 2^-32 (`sample_rate`), the same for every
        example. Groups differ in size by at most one example, and so the true expectation of a step by one rate.
    groups : int
        Number of groups, at most `dataset_size`. 1 is Poisson sampling.
    shuffle : bool
        Whether the partition is drawn at random (from a public key: the same for every run of this size) or follows
        the order of the data set, group g being the g-th slice.

    Notes
    -----
    Guarantee: example number p of the step's group, in ascending order, is in step t if and only if
    word(t, p) < sample_rate 2^32.
    """

    dataset_size: int
    batch_size: float
    groups: int
    shuffle: bool = True

    kind = "cyclic poisson"
    note = (
        "the groups of a fixed, public partition take turns; each example of the step's group enters it independently "
        "with the given probability"
    )
    stated = ("sample_rate", "groups", "shuffle")
    adjacency = Adjacency.ZERO_OUT  # removing an example would change the groups

    def __post_init__(self) -> None:
        super().__post_init__()
        size, groups, batch_size = self.dataset_size, self.groups, self.batch_size
        if groups > size:
            raise ArgumentError(f"groups={groups!r}: must be at most dataset_size={size}, an example for each group")
        if Fraction(batch_size) * groups > size:
            raise ArgumentError(
                f"batch_size={batch_size:.10g}: must be at most {size / groups:g}, the examples of one of "
                f"{groups} groups; take fewer groups or smaller batches"
            )
        if self._threshold == 0:
            raise ArgumentError(
                f"batch_size={batch_size!r}: its rate among the {size} examples must be at least 2^-32, the smallest "
                "rate of a coin"
            )

    @property
    def _threshold(self) -> int:
        return math.floor(Fraction(self.batch_size) * self.groups / self.dataset_size * WORDS)

    @property
    def sample_rate(self) -> float:
        """Probability that an example of the step's group is in the step: a multiple of 2^-32."""
        return self._threshold / WORDS

    @property
    def max_batch_size(self) -> int:
        """The size of the largest group."""
        return -(-self.dataset_size // self.groups)

    @property
    def amplified_bands(self) -> int:
        """As many as there are groups."""
        return self.groups

    def check_strategy(self, strategy: Strategy, steps: int) -> None:
        """Refuse strategies of more bands than groups."""
        width = bands(strategy, steps)
        if width > self.groups:
            raise PrivacyError(
                f"sampler={type(self).__name__}: its amplification holds for strategies of at most as many bands as "
                f"groups, {self.groups}, and {strategy.describe()['kind']} has {width} (a banded inverse makes no "
                "banded matrix); use dpcore.strategies.BandedToeplitz or Banded with fewer bands, more groups, or "
                "dpcore.sampling.FixedOrderSampler"
            )

    def group(self, number: int) -> Indices:
        """Return the examples of a group, 0 <= number < groups, sorted, (m,) int64. Public."""
        number = validate.integer(number=number, minimum=0)
        if number >= self.groups:
            raise ArgumentError(f"number={number}: must be less than groups={self.groups}")
        first, last = (i * self.dataset_size // self.groups for i in (number, number + 1))
        if not self.shuffle:
            return np.arange(first, last, dtype=np.int64)
        return np.sort(draw.permutation(_PUBLIC_KEY, self.dataset_size)[first:last])

    def _batch(self, key: bytes, step: int) -> Indices:
        members = self.group(step % self.groups)
        return members[draw.coins(draw.row_words(key, step), self._threshold, 0, members.size)]

    def event(self, noise_multiplier: float, steps: int) -> CyclicPoissonSampledGaussian:
        """Return the event of `steps` steps with independent noise."""
        return CyclicPoissonSampledGaussian(self.sample_rate, self.groups, noise_multiplier, 1.0, steps)

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
        """Return the event of `steps` steps under banded noise, and of `abandoned` others that were given up.

        Parameters
        ----------
        noise_multiplier : float
            Standard deviation of a coordinate of Z over the clip norm.
        steps, abandoned : int
            Steps on the way to the present parameters, and all others that were released.
        branches : int
            Number of branches of those others.
        bands : int
            Bands of the strategy C, at most `groups`; 1 for independent noise.
        column_norm : float
            Largest column norm of C.
        strategy : str
            Name of C.

        Raises
        ------
        ArgumentError
            If there are more bands than groups.
        """
        if bands > self.groups:
            raise ArgumentError(f"bands={bands}: must be at most groups={self.groups}")
        own = CyclicPoissonSampledGaussian(
            self.sample_rate, self.groups, noise_multiplier, column_norm, steps, strategy
        )  # fmt: skip
        if not abandoned:
            return own
        others = CyclicPoissonSampledGaussian(self.sample_rate, 1, noise_multiplier, column_norm, abandoned, strategy)
        if bands == 1:
            return Composed((own, others))
        # Coins that two branches share: see the module.
        return Composed((own, others, Gaussian(noise_multiplier / column_norm, 2 * branches, Adjacency.ZERO_OUT)))
