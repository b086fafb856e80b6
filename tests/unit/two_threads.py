"""One piece of work in two threads at once, with switches as often as the interpreter can."""

import sys
import threading
from collections.abc import Callable


def in_two_threads(work: Callable[[], None]) -> None:
    """Run `work` in two threads, and return when both have ended."""
    threads = [threading.Thread(target=work) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads)
