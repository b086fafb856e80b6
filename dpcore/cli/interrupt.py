"""Ctrl-C and SIGTERM: at once if no private step is under way, else after the step, with its cost written down."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Stopped(BaseException):
    """A signal stopped the command; shells expect `status`. Not a KeyboardInterrupt, which typer swallows."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Interruption:
    """The signal that stops the run, if any."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def name(self) -> str:
        """The signal's name for a person."""
        return NAMES[self.signal] if self.signal is not None else ""

    @property
    def status(self) -> int:
        """The exit status that shells expect: 128 plus the signal's number."""
        return 128 + self.signal if self.signal is not None else 0


@contextmanager
def immediate() -> Iterator[None]:
    """Stop at once while the block runs: no private step is under way."""

    def stop(number: int, _frame: FrameType | None) -> None:
        name = NAMES[signal.Signals(number)]
        raise Stopped(f"stopped by {name}; no private step was under way", 128 + number)

    with _handled(stop):
        yield


@contextmanager
def deferred() -> Iterator[Interruption]:
    """Note the signals while the block runs, instead of stopping midway.

    A second signal stops at once: a step can be long, and its row of noise is counted as spent either way.
    """
    interruption = Interruption()

    def note(number: int, _frame: FrameType | None) -> None:
        if interruption:
            raise Stopped("stopped at once, in the middle of a step", 128 + number)
        interruption.signal = signal.Signals(number)

    with _handled(note):
        yield interruption


@contextmanager
def _handled(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    try:
        former = {number: signal.signal(number, handler) for number in NAMES}
    except ValueError:
        # Only the main thread may set handlers; elsewhere the caller decides about signals.
        yield
        return
    try:
        yield
    finally:
        for number, handler_before in former.items():
            signal.signal(number, handler_before)
