"""What a test of a refusal is: a call, and the error that it must raise, with words of its message."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[BaseException], words: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
    """Assert that the call raises the error, with a message in which the regular expression `words` is found."""
    __tracebackhide__ = True
    with pytest.raises(error, match=words):
        call(*given, **named)
