"""Events of Gaussian noise where nothing is sampled in secret."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpcore.accounting.events.base import Adjacency, Event


@dataclass(frozen=True)
class Gaussian(Event):
    """Gaussian noise on sums of which one example touches at most `count`; nothing is sampled in secret.

    The joint release is one Gaussian mechanism with mu = sqrt(count) / noise_multiplier: the `count` sums that an
    example touches are one vector that moves by at most sqrt(count) sensitivities. Later sums may depend on earlier
    releases.

    Sensitivity assumed: that of **one** sum under `adjacency`; C for add-remove and zero-out, 2C for replace-one,
    where C bounds the norm of an example's vector.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on a sum over the sensitivity of that sum; 0 means epsilon = infinity.
    count : int
        Number of sums one example takes part in, the largest over all examples.
    adjacency : Adjacency
        What the sensitivity refers to. A fixed order of batches is `zero-out`: removing an example would move the
        others.
    """

    noise_multiplier: float
    count: int = 1
    adjacency: Adjacency = Adjacency.ADD_REMOVE


@dataclass(frozen=True)
class MatrixGaussian(Event):
    """The whole run of a matrix mechanism: `steps` sums whose noise is correlated by a fixed matrix C.

    To release S + C^{-1} Z, with S the sums and Z independent Gaussian noise, is to release C S + Z: one Gaussian
    mechanism with mu = sensitivity / noise_multiplier, also when later sums depend on earlier releases (C is
    lower-triangular). Nothing is sampled in secret. A run that stops early is the event of its prefix: fewer steps, and
    the sensitivity of the leading block of C.

    Sensitivity assumed: one example moves **one** sum by at most a unit, which is the clip norm under zero-out and
    add-remove and twice that under replace-one; `sensitivity` says by how many units it then moves C S as a whole, over
    all the steps at which it takes part, which were fixed before the run. `noise_multiplier` is in the same unit.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of a coordinate of Z in that unit; 0 means epsilon = infinity.
    sensitivity : float
        Largest L2 norm of the change of C S in that unit, 0 or more: `dpcore.stages.strategies.sensitivity`.
    steps : int
        Number of sums, 0 or more.
    strategy : str
        Name or digest of C.
    adjacency : Adjacency
        What `sensitivity` and `noise_multiplier` refer to.

    References
    ----------
    Denisov, McMahan, Rush, Smith, Thakurta, "Improved Differential Privacy for SGD via Optimal Private Linear Operators
    on Adaptive Streams", 2022, Theorem 2.1.
    """

    noise_multiplier: float
    sensitivity: float
    steps: int
    strategy: str
    adjacency: Adjacency = Adjacency.ZERO_OUT

    @property
    def mu(self) -> float:
        """Return mu of the one Gaussian mechanism: 0 where nothing was moved, infinity without noise."""
        if self.steps == 0 or self.sensitivity == 0.0:
            return 0.0
        return self.sensitivity / self.noise_multiplier if self.noise_multiplier > 0.0 else math.inf
