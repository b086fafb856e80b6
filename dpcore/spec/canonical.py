"""Values as JSON that reads back the same everywhere: one spelling for each value, so that it can be hashed."""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dpcore.errors import ArgumentError, ArgumentTypeError

INFINITE = "inf"

# A statement is some ten thousand characters; a large comparison has hundreds of them.
MOST_BYTES: Final = 100_000_000


def plain(value: Any, where: str = "value") -> Any:
    """Return `value` as dicts, lists, strings, numbers, booleans and None; infinities become "inf" and "-inf".

    NumPy scalars and arrays become numbers and lists; any other object is refused, so that nothing arrives in a report
    by way of its ``repr``.
    """
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isnan(value):
            raise ArgumentError(f"{where}={value!r}: must be a number; NaN states nothing")
        if math.isinf(value):
            return INFINITE if value > 0 else f"-{INFINITE}"
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ArgumentTypeError(f"{where}: has the key {key!r}; keys must be strings")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ArgumentTypeError(
        f"{where}={value!r}: must be made of numbers, strings, lists and dicts, not {type(value).__name__}"
    )


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text, if every reader finds the same one.

    A byte order mark in front is skipped. Raises ValueError if the text is not JSON in UTF-8, is larger than
    `MOST_BYTES` or is nested too deeply; if it has NaN or an infinite number; and if an object names a key twice,
    because a person may read the first value while a program takes the last.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES:,} bytes")
    decoded = (text.decode("utf-8") if isinstance(text, bytes) else text).removeprefix("\ufeff")
    try:
        return json.loads(decoded, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_file(path: Path) -> Any:
    """Return the value of a JSON file; raises ValueError as `read_json` does, and OSError."""
    with path.open("rb") as file:
        return read_json(file.read(MOST_BYTES + 1))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in content if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is twice in one object")
    return content


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse(text)


def canonical_json(value: Any) -> str:
    """Return the one JSON spelling of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def digest(value: Any) -> str:
    """Return the SHA-256 of the canonical JSON of `value`, in hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()
