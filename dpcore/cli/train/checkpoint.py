"""The checkpoint of a run that a ledger pays for: one file, replaced whole, and as secret as the data.

It holds the run's keys: whoever has it can subtract the noise. So it is readable by its owner only, and does not lie in
the run folder, whose files are all public (`RunFolder.checkpoint`). A crash costs the steps since the last one.
"""

from __future__ import annotations

import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from dpcore.errors import DataError
from dpcore.ledger.allowance import largest

PARTS = {"settings", "evaluations", "model", "optimizer", "ledger"}
SECONDS: Final = 60.0
"""At the latest after so long."""
SHARE: Final = 0.01
"""Or after this share of the plan's steps: a crash then costs half of it on average."""
TIME: Final = 0.1
"""Saves between evaluations take at most this share of the time; only a run of seconds is held back by it."""


class Autosave:
    """Saves when it is due, in a run of `steps` planned steps from step `begun` on; the clock is in seconds."""

    def __init__(
        self, save: Callable[[], None], steps: int, begun: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._save, self._every, self._clock = save, every(steps), clock
        self._step, self._at, self._took = begun, clock(), 0.0

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


def read(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of `dpcore train`; DataError where it is damaged or something else."""
    try:
        # torch.load does not look at the checksums: a flipped bit of a key would be read as another key.
        with zipfile.ZipFile(path) as archive:
            whole = archive.testzip() is None
        content = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except OSError as cause:
        raise DataError(f"checkpoint {path}: cannot be read ({cause.strerror})") from cause
    except Exception as cause:  # torch has many kinds
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy") from cause
    if not isinstance(content, dict) or set(content) != PARTS:
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy")
    return content
