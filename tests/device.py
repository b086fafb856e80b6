"""Where kernels run in this session: which tests ask for a device, and how long one may take on it."""

import faulthandler
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

TESTS = Path(__file__).resolve().parent
# The port's folders: what they hold is to be true on the machine that trains, its NumPy and torch included.
PORT = (TESTS / "agreement", TESTS / "spec", TESTS / "unit" / "backends")
# It compiles for a named target, and runs nothing.
STATIC = TESTS / "unit" / "backends" / "test_compile.py"
# The slowest tests compile a few dozen kernels, of seconds each.
SECONDS, GRACE = 900, 120


def has_gpu(wanted: bool) -> bool:
    """Return whether torch finds a CUDA device; without a driver's file, only where somebody `wanted` one."""
    if not wanted and not any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "nvgpu", "nvmap")):
        return False  # spares every CPU run the import of torch
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def is_of_the_port(item: pytest.Item) -> bool:
    """Return whether a GPU run repeats a test: by its folder, or since its parameter `backend` is "triton"."""
    path = item.path.resolve()
    if path != STATIC and any(folder in path.parents for folder in PORT):
        return True
    call = getattr(item, "callspec", None)
    return call is not None and call.params.get("backend") == "triton"


def mark(items: list[pytest.Item], missing: str | None) -> None:
    """Give each test of the port the marker `gpu`, and skip those that need a device where something is `missing`."""
    for item in items:
        if is_of_the_port(item) or item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.gpu)
        if missing is not None and item.get_closest_marker("cuda") is not None:
            item.add_marker(pytest.mark.skip(reason=missing))


class TooLong(BaseException):
    """A test's time is over. Hypothesis takes an `Exception` for a reason to try smaller examples."""


@contextmanager
def limited(seconds: float, grace: float, report: int) -> Iterator[None]:
    """Fail what takes longer than `seconds`. What then hangs outside Python ends the process, `grace` seconds later.

    Where every thread was by then is written to the file descriptor `report`.
    """

    def expired(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"took more than {seconds:g} seconds on the device")

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(seconds + grace, exit=True, file=report)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def kept_stderr() -> int:
    """Return a descriptor of standard error that pytest's capture leaves alone."""
    return os.dup(2)
