"""Turns: which thread may add to a run's sum, and step.

A row of noise must meet one sum, and the sum the examples that were drawn for the row. So calls come one at a time, no
call comes inside of another (from a signal's handler), no two threads add to one sum, none steps on a batch whose step
another has taken, and a process that was forked from the one that built the run draws nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dpcore.errors import PrivacyError


class Turns:
    """Whose turn it is.

    Every call that computes takes one, so this is where each enters `place`: a context in which the backend's new
    arrays go where the run's are.
    """

    def __init__(self, place: Callable[[], AbstractContextManager[None]]) -> None:
        self._place = place
        self._process, self._adding = os.getpid(), 0
        self._renew()

    def _renew(self) -> None:
        self._locked_in, self._busy = os.getpid(), False
        self._lock, self._drawn = threading.RLock(), threading.local()

    @property
    def lock(self) -> Any:
        """Held by the thread that is in a call, or that makes several calls one: a `threading.RLock`."""
        if os.getpid() != self._locked_in:  # a fork: the parent's threads are gone, and so must be their lock
            self._renew()
        return self._lock

    @contextmanager
    def alone(self, what: str, *, draws: bool = True) -> Iterator[None]:
        """Let no other thread into the call `what`, and no handler of a signal that interrupts it.

        `draws` is whether it has to do with noise, which two processes must not share. Raises `PrivacyError` in a
        forked process, and inside of another call.
        """
        if draws and os.getpid() != self._process:
            raise PrivacyError(
                f"{what}: this process was forked from the one that built the run, and both would draw the same noise: "
                "build the run here, or load its state here, which forks the keys"
            )
        with self.lock:
            if self._busy:
                raise PrivacyError(f"{what}: called while a step is under way, as by a signal's handler; call it after")
            try:
                self._busy = True
                with self._place():
                    yield
            finally:
                self._busy = False

    def drew(self, step: int | None) -> None:
        """Note that this thread has the batch of a step; None where it has none any more."""
        self._drawn.step = step

    def check(self, step: int) -> None:
        """Refuse to mix the sums or the batches of two threads in a step."""
        if self._adding not in (0, threading.get_ident()):
            raise PrivacyError("another thread is summing this step: let one thread take each step, or hold `lock`")
        if getattr(self._drawn, "step", None) not in (None, step):
            raise PrivacyError("another thread took the step that this batch was drawn for: draw the next one")

    def adding(self) -> None:
        """Note that the sum is this thread's."""
        self._adding = threading.get_ident()

    def dropped(self) -> None:
        """Note that there is no sum."""
        self._adding = 0

    def anew(self) -> None:
        """Begin again in this process, which has keys of its own now: nobody has a batch."""
        self._process, self._drawn = os.getpid(), threading.local()
