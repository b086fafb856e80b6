"""How the tests of the command line's parts see that something is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[Exception], words: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    """See that a call raises this error, and says this."""
    with pytest.raises(error, match=words):
        call(*given, **named)
