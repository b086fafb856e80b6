"""A line on standard error if something takes long, so that nobody has to guess whether it still works."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def told_if_slow(text: Callable[[], str], patience: float) -> Iterator[None]:
    """Write a line once if the block takes longer than `patience` seconds; `text` makes it then."""
    stream = sys.stderr

    def tell() -> None:
        # In one piece, and without rich, whose import the main thread may be in the middle of.
        stream.write(text() + "\n")
        stream.flush()

    timer = threading.Timer(patience, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        # A line that has begun is written before the result, never into it.
        timer.join()
