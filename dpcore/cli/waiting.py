"""A remark where a command computes for long: nobody should have to guess whether it still does anything."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from dpcore.cli.output import fitted

# With what starting takes, 0.3 to 0.4 seconds, within a second of the call.
_PATIENCE = 0.5


@contextmanager
def told_if_slow(words: str) -> Iterator[None]:
    """Say once, on standard error, what is being computed, if the block takes longer than half a second."""
    stream = sys.stderr

    def tell() -> None:
        # In one piece, and without rich, whose import the main thread may be in the middle of.
        stream.write(fitted(f"remark: still computing: {words}; Ctrl-C stops it", stream) + "\n")
        stream.flush()

    timer = threading.Timer(_PATIENCE, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # What has begun is written before the result, never into it.
        timer.join()


def tells_if_slow(words: Callable[[dict[str, Any]], str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command say what it computes if that takes long; `words` makes the sentence of its keywords."""

    def changed(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def told(*args: Any, **given: Any) -> Any:
            with told_if_slow(words(given)):
                return command(*args, **given)

        return told

    return changed
