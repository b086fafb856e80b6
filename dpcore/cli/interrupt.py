"""Ctrl-C and SIGTERM during training: finish the step, write down what was spent, then stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(KeyboardInterrupt):
    """A run was stopped in the middle of a step; the message says where what was spent is stated."""


class Interruption:
    """Which signal has asked the run to stop, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """The signal as a person calls it."""
        return NAMES[self.signal] if self.signal is not None else ""

    @property
    def status(self) -> int:
        """The exit status that shells expect: 128 plus the signal's number."""
        return 128 + self.signal if self.signal is not None else 0


@contextmanager
def deferred() -> Iterator[Interruption]:
    """Note the signals while the block runs, instead of stopping midway.

    A second signal of the same kind stops at once, by KeyboardInterrupt: a step can be long, and its row of noise is
    counted as spent either way.
    """
    interruption = Interruption()

    def note(number: int, _frame: FrameType | None) -> None:
        if interruption:
            raise KeyboardInterrupt
        interruption.signal = signal.Signals(number)

    try:
        former = {number: signal.signal(number, note) for number in NAMES}
    except ValueError:
        # Only the main thread may set handlers; elsewhere the caller decides about signals.
        yield interruption
        return
    try:
        yield interruption
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
