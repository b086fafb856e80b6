"""No warning and no log while private examples are read: Pillow's of some images, transformers' of long texts.

Either would tell of an example, and in a run also when it was drawn.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence() -> Iterator[None]:
    """Show no warning and log nothing meanwhile, in all threads.

    The filters of warnings stay: once they change, Python repeats what it has shown, of all code.
    """
    shown, level = warnings.showwarning, logging.root.manager.disable
    warnings.showwarning = lambda *_, **__: None
    logging.disable()
    try:
        yield
    finally:
        warnings.showwarning = shown
        logging.disable(level)
