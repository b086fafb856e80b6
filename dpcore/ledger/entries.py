"""Entries: the lines of a ledger, each sealed with all before it.

The seal of entry n is SHA-256(seal of entry n-1, body of entry n). Whoever changes, removes or reorders an entry breaks
every later seal. (Cutting off the last entries, or writing all of them anew, breaks none: against that, keep the last
seal somewhere else; statements hold one.)
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from dpcore.errors import ArgumentError

START = "0" * 64


class Entry(NamedTuple):
    """One entry as it is stored; its body is canonical JSON, which holds the number too."""

    number: int
    body: str
    seal: str


def write(content: Mapping[str, Any]) -> str:
    """Return the one JSON spelling of an entry's content."""
    try:
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    except (TypeError, ValueError) as cause:
        raise ArgumentError(
            f"description: must be made of finite numbers, strings, lists and dicts ({cause})"
        ) from cause


def seal(previous: str, body: str) -> str:
    """Return the seal of an entry that follows the one sealed by `previous`."""
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()


def number_out(value: float) -> float | str:
    """Return a charge as JSON has it: infinity becomes "inf"."""
    return "inf" if math.isinf(value) else value


def number_in(value: Any) -> float:
    """Return the charge that `number_out` wrote, or raise `ValueError`."""
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"has the charge {value!r}")
    return float(value)
