"""The findings of a check, and the comparison of values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

OK: Final = "ok"
FAILED: Final = "failed"
TRUSTED: Final = "trusted"
REMARK: Final = "remark"

# Between two machines: rounding of sums and of special functions.
SAME = 1e-9


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str  #: the name of the check
    status: str  #: OK, FAILED, TRUSTED (nothing in the statement can confirm it) or REMARK (true, and needs attention)
    words: str  #: one clause for a person


def difference(stated: Any, derived: Any, tolerance: float = SAME, where: str = "") -> str | None:
    """Return the place at which two plain values differ, in words; None if they are equal up to rounding."""
    if isinstance(stated, Mapping) and isinstance(derived, Mapping):
        for name in (*derived, *stated):
            if (name in stated) != (name in derived):
                return f"{_join(where, name)} is {'stated' if name in stated else 'not stated'}"
            problem = difference(stated[name], derived[name], tolerance, _join(where, name))
            if problem is not None:
                return problem
        return None
    if isinstance(stated, (list, tuple)) and isinstance(derived, (list, tuple)) and len(stated) == len(derived):
        pairs = enumerate(zip(stated, derived, strict=True))
        return next((d for i, (s, o) in pairs if (d := difference(s, o, tolerance, f"{where}[{i}]")) is not None), None)
    if same(stated, derived, tolerance):
        return None
    return f"{where or 'it'} is stated as {short(stated)} and follows as {short(derived)}"


def same(stated: Any, derived: Any, tolerance: float = SAME) -> bool:
    """Whether two leaves are equal: numbers up to rounding, True only to True."""
    numbers = [value for value in (stated, derived) if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if len(numbers) == 2:
        return math.isclose(numbers[0], numbers[1], rel_tol=tolerance, abs_tol=1e-300)
    return type(stated) is type(derived) and bool(stated == derived)


def short(value: Any) -> str:
    """Return a value for a message, shortened if it is long."""
    text = f"{value:.10g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _join(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)


def is_digest(text: Any) -> bool:
    """Whether a value is a SHA-256 in hexadecimal."""
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
