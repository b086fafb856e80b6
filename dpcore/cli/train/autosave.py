"""When a run that a ledger pays for saves a checkpoint: a crash costs the steps since the last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from dpcore.ledger.blocks import largest

SECONDS: Final = 60.0
"""At the latest after so long."""
SHARE: Final = 0.01
"""Or after this share of the plan's steps: a crash then costs half of it on average."""
TIME: Final = 0.1
"""Saves between evaluations take at most this share of the time; only a run of seconds is held back by it."""


class Autosave:
    """Saves when it is due, in a run of so many planned steps; the clock is in seconds."""

    def __init__(self, save: Callable[[], None], steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._save, self._every, self._clock = save, every(steps), clock
        self._step, self._at, self._took = 0, clock(), 0.0

    def begin(self, step: int) -> None:
        """Count from a step whose state is saved already."""
        self._step, self._at = step, self._clock()

    def after(self, step: int) -> None:
        """Save after a step if that is due."""
        passed = self._clock() - self._at
        if (step - self._step >= self._every or passed >= SECONDS) and self._took <= TIME * passed:
            self.now(step)

    def now(self, step: int) -> None:
        """Save in any case."""
        begun = self._clock()
        self._save()
        self._step, self._at = step, self._clock()
        self._took = self._at - begun


def every(steps: int) -> int:
    """Return after how many steps of a plan a checkpoint is due."""
    return max(1, int(SHARE * steps))


def cost(steps: int) -> str:
    """Say what a crash would cost a run of so many steps."""
    return (
        f"a checkpoint is saved every {every(steps):,} of {steps:,} steps or {SECONDS:.0f} seconds, whichever comes "
        f"first (less often where that would take over {TIME:.0%} of the time); a crash or kill -9 costs the steps "
        f"since then and up to {largest(steps):,} reserved ahead, which stay charged; Ctrl-C, SIGTERM and the budget's "
        "end cost none"
    )
