"""What changes from step to step: rows, places, scales, coefficients and settings, side by side in one piece of memory.

All else that a step's launch takes stays the same while the tensors do. So a launch that is recorded once is the launch
of every later step: it reads that step's numbers where these were put. A row that were an argument of a recorded launch
would be drawn again in every replay, and noise that is added to two sums hides neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from dpcore.spec.ops import FilterCoefficients, RingCoefficients, UpdateSettings
from dpcore_triton.filter import taps_of
from dpcore_triton.ring import ring_taps
from dpcore_triton.update import update_numbers

# Places, in units of 4 bytes: three integers; the scales (8 bytes each); then float32 numbers: the taps of the noise,
# of the filters, of the ring (its normalizer and weights), and the numbers of each group of settings.
SCALES = tl.constexpr(4)
FIRST_TAP = tl.constexpr(10)


def step_numbers(
    rows: tuple[int, int],
    scales: tuple[float, float],
    batch_size: float,
    recurrence: FilterCoefficients | None,
    ring: RingCoefficients | None,
    filters: Sequence[FilterCoefficients],
    rule: str,
    groups: Sequence[UpdateSettings],
    step_number: int,
) -> NDArray[np.int32]:
    """Return the bits of a step's numbers.

    `rows` and `scales` are the noise's and that of the square's; `groups` the settings that are in use.
    """
    integers = np.array([*rows, 0 if ring is None else ring.place, 0], dtype=np.uint32)
    wide = np.array([*scales, 1 / batch_size], dtype=np.float64)
    narrow = [
        *(() if recurrence is None else taps_of(recurrence)),
        *chain.from_iterable(map(taps_of, filters)),
        *((1.0,) if ring is None else ring_taps(ring)),
        *chain.from_iterable(update_numbers(rule, settings, step_number) for settings in groups),
    ]
    return np.concatenate([part.view(np.int32) for part in (integers, wide, np.array(narrow, dtype=np.float32))])
