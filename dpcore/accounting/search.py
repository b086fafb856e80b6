"""Searches for the setting at which epsilon meets its target.

An accountant's epsilon costs milliseconds, and is nearly a power of the noise, the rate and the number of steps. So
both searches draw straight lines in the logarithms, keep the answer between a value that meets the target and one that
does not, and halve that range where a line does not shrink it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_CLOSEST = 1e-12  # relative: a range this narrow holds a jump
_CLAMP = 50.0


def least_meeting(
    epsilon: Callable[[float], float], target: float, start: float, limits: tuple[float, float], tolerance: float
) -> tuple[float, bool]:
    """Return the least value with epsilon <= target, and whether it is that.

    `epsilon` must not grow with the value; it may be 0 or infinity. The result has epsilon between (1 - tolerance)
    target and target, or lies within 1e-12 of a value whose epsilon is above the target. With False, a limit ended the
    search: it is the largest value (if its epsilon is above the target) or the smallest (if its epsilon is below it).
    """
    tolerance = min(tolerance, 1.0)  # a target below what an accountant resolves: any epsilon at or below it will do
    aim = math.log(target) + math.log1p(-0.5 * tolerance)

    def excess(x: float) -> float:
        value = epsilon(math.exp(x))
        return max(-_CLAMP, min(_CLAMP, math.log(value) - aim)) if value > 0.0 else -_CLAMP

    smallest, largest = math.log(limits[0]), math.log(limits[1])
    x = min(max(math.log(start), smallest), largest)
    y, stretch = excess(x), 1.0
    up = epsilon(math.exp(x)) > target
    here, there = (x, y), (x, y)
    while (epsilon(math.exp(there[0])) > target) == up:
        end = largest if up else smallest
        if there[0] == end:
            return limits[1] if up else limits[0], False
        here = there
        step = stretch * min(math.log(4.0), 1.1 * abs(here[1]) + 1e-3)
        x = min(here[0] + step, largest) if up else max(here[0] - step, smallest)
        there, stretch = (x, excess(x)), 1.5 * stretch
    low, high = (here, there) if up else (there, here)
    return math.exp(_narrow(excess, lambda x: epsilon(math.exp(x)) > target, low, high, 0.5 * tolerance)), True


def _narrow(
    excess: Callable[[float], float],
    above: Callable[[float], bool],
    low: tuple[float, float],
    high: tuple[float, float],
    close: float,
) -> float:
    """Return the upper end of the range once its excess is at least -close, or once the range has closed.

    Points are (x, excess); `low` is above the target and `high` is not. Secants by the Illinois rule (the height of an
    end that stays twice is halved, so that both ends move), and every fourth time the middle.
    """
    (a, height_a), (b, height_b) = low, high
    reached, stayed, count = height_b, "", 0
    while reached < -close and b - a > _CLOSEST:
        count += 1
        x = b - height_b * (b - a) / (height_b - height_a) if count % 4 else 0.5 * (a + b)
        if not a < x < b:
            x = 0.5 * (a + b)
        y = excess(x)
        if above(x):
            height_b *= 0.5 if stayed == "high" else 1.0
            a, height_a, stayed = x, y, "high"
        else:
            height_a *= 0.5 if stayed == "low" else 1.0
            b, height_b, reached, stayed = x, y, y, "low"
    return b


def greatest_meeting(epsilon: Callable[[int], float], target: float, start: int, largest: int) -> tuple[int, bool]:
    """Return the greatest integer n in 0..largest with epsilon(n) <= target, and whether epsilon(n + 1) > target.

    `epsilon`, of an integer from 1 on, must not fall with it; it may be 0 or infinity. The second is False if n is
    `largest`.
    """
    low, high, stride = 0, min(max(start, 1), largest), 1.1
    if epsilon(high) <= target:
        while epsilon(high) <= target:
            if high == largest:
                return largest, False
            low, high, stride = high, min(max(high + 1, math.ceil(high * stride)), largest), stride * stride
    else:
        while low == 0 and high > 1:
            trial = max(1, min(high - 1, math.floor(high / stride)))
            if epsilon(trial) <= target:
                low = trial
            else:
                high, stride = trial, stride * stride
    count = 0
    while high - low > 1:
        count += 1
        trial = (low + high) // 2 if count % 3 == 0 else _between(epsilon, target, low, high)
        trial = min(max(trial, low + 1), high - 1)
        if epsilon(trial) <= target:
            low = trial
        else:
            high = trial
    return low, True


def _between(epsilon: Callable[[int], float], target: float, low: int, high: int) -> int:
    """Return where the straight line between both ends, in logarithms, meets the target, rounded down."""
    below, above = epsilon(low), epsilon(high)
    if not 0.0 < below < above < math.inf:
        return (low + high) // 2
    share = math.log(target / below) / math.log(above / below)
    return math.floor(math.exp(math.log(low) + share * math.log(high / low)))
