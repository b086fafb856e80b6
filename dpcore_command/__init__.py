"""The start of the command ``dpcore``: Ctrl-C is heard before dpcore and NumPy are imported, which may take seconds.

It stands beside the library, since whatever lies in a package is imported after the package itself.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Run the command line and return its exit status."""
    signal.signal(signal.SIGINT, _leave)
    from dpcore.cli import main as run  # which has a handler of its own

    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _leave(_number: int, _frame: FrameType | None) -> None:
    # Not by an exception: an import may catch it, or pass it on as another one.
    sys.stderr.write("dpcore: stopped by Ctrl-C; nothing was begun\n")
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)
