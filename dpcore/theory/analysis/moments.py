"""Second moments from which a noise variance was subtracted."""

import numpy as np
from numpy.typing import ArrayLike

from dpcore.errors import ArgumentError


def negative_share(second_moments: ArrayLike) -> float:
    """Return the share, in [0, 1], of coordinates at which a debiased second moment is below zero.

    `second_moments`, from released quantities, are less the noise's variance; not empty, without NaN. If there is only
    noise, about half of the coordinates are negative; a large share means that the correction has nothing to work
    with.

    References
    ----------
    On the choice of private adaptive optimizers, section 4 (its diagnostics: algorithms.md, section 5).
    """
    values = np.asarray(second_moments)
    if not values.size:
        raise ArgumentError("second_moments: is empty; must have at least one coordinate")
    if np.isnan(values).any():
        raise ArgumentError("second_moments: has NaN; must be real numbers")
    return float(np.count_nonzero(values < 0) / values.size)
