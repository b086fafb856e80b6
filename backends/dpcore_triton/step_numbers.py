"""The numbers that change from step to step, in one piece of memory: rows, places, scales, coefficients, settings.

A step's launch has no other arguments that change, as long as the tensors stay. So a launch that is recorded once is
the launch of every later step: it reads that step's numbers from this memory. If the row were an argument of a recorded
launch, it would be drawn again in every replay, and noise that is added to two sums hides neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from dpcore.spec.grid import step_of
from dpcore.spec.ops import Correlation, FilterCoefficients, NoiseRow, RingCoefficients, UpdateSettings
from dpcore_triton.correlate import correlation_taps
from dpcore_triton.filter import taps_of
from dpcore_triton.update import update_numbers

# Places, in units of 4 bytes: rows and bits of the noise and of the square's noise, a ring's place, and 0; then numbers
# of 8 bytes: those of `WIDE`, 2^bits, 2^-bits and the taps of the correlation; then float32 numbers: the taps of the
# filters and the numbers of each group of settings.
WIDE = tl.constexpr(6)
FIRST_WIDE = tl.constexpr(3)
"""Step of the grid / batch size; 1 / step of the square's grid, and this step."""


def step_numbers(
    noise: NoiseRow,
    squared: NoiseRow,
    batch_size: float,
    unit: float,
    correlation: Correlation | None,
    filters: Sequence[FilterCoefficients],
    rule: str,
    groups: Sequence[UpdateSettings],
    step_number: int,
) -> NDArray[np.int32]:
    """Return the bits of a step's numbers; `groups` are the settings in use."""
    place = correlation.place if isinstance(correlation, RingCoefficients) else 0
    integers = np.array([noise.row, squared.row, noise.bits, squared.bits, place, 0], dtype=np.uint32)
    square_step = step_of(squared.scale, squared.bits)
    wide = [
        unit / batch_size, 1 / square_step if square_step else 0.0, square_step, 2.0**noise.bits, 2.0**-noise.bits,
        *correlation_taps(correlation),
    ]  # fmt: skip
    narrow = [
        *chain.from_iterable(map(taps_of, filters)),
        *chain.from_iterable(update_numbers(rule, settings, step_number) for settings in groups),
    ]
    parts = integers, np.array(wide, dtype=np.float64), np.array(narrow, dtype=np.float32)
    return np.concatenate([part.view(np.int32) for part in parts])
