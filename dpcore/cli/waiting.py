"""A remark where a command computes for long: nobody should have to guess whether it still does anything."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from dpcore.cli.output import fitted
from dpcore.spec import waiting

# With what starting takes, 0.3 to 0.4 seconds, within a second of the call.
_PATIENCE = 0.5


def told_if_slow(words: str) -> AbstractContextManager[None]:
    """Say once, on standard error, what is being computed, if the block takes longer than half a second."""
    stream = sys.stderr
    return waiting.told_if_slow(lambda: fitted(f"remark: still computing: {words}; Ctrl-C stops it", stream), _PATIENCE)


def tells_if_slow(words: Callable[[dict[str, Any]], str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command say what it computes if that takes long; `words` makes the sentence of its keywords."""

    def changed(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def told(*args: Any, **given: Any) -> Any:
            with told_if_slow(words(given)):
                return command(*args, **given)

        return told

    return changed
