"""Values as a person types them: 1e-5, 60,000, 60k, 1/60000, 1%, DP-SGD."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_POWER = re.compile(r"(\d+)(?:\^|\*\*)\(?([+-]?\d+)\)?")
_SUFFIXES = {"k": 1e3, "m": 1e6, "%": 1e-2}


def real(value: Any) -> float:
    """Return a finite number from what was typed, or from a number of a configuration file."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        result = float(value)
    else:
        try:
            result = _parse(str(value).strip().lower())
        except (ValueError, OverflowError, ZeroDivisionError):
            raise typer.BadParameter(
                f"{value!r} is not a number; write one like 0.1, 1e-5, 60k, 1/60000 or 1%"
            ) from None
    if not math.isfinite(result):
        raise typer.BadParameter(f"{value!r} is not finite; write an ordinary number")
    if result == 0.0 and re.search("[1-9]", str(value).lower().partition("e")[0]):
        raise typer.BadParameter(f"{value!r} is too small to be told from 0; write an ordinary number")
    return result


def count(value: Any) -> int:
    """Return an integer of at least 0: 60000, 60_000, 60,000, 60k and 6e4 are the same."""
    result = real(value)
    if result != int(result) or result < 0:
        raise typer.BadParameter(f"{value!r} is not a whole number of 0 or more")
    return int(result)


def whole(value: Any) -> int:
    """Return any integer, negative ones too."""
    result = real(value)
    if result != int(result):
        raise typer.BadParameter(f"{value!r} is not a whole number")
    return int(result)


def reals(value: Any) -> tuple[float, ...]:
    """Return numbers separated by commas or spaces, or the list of a configuration file."""
    if isinstance(value, (list, tuple)):
        return tuple(real(item) for item in value)
    parts = [part for part in re.split(r"[,\s]+", str(value).strip().strip("[]()")) if part]
    if not parts:
        raise typer.BadParameter(f"{value!r} holds no number; write numbers with commas between them")
    return tuple(real(part) for part in parts)


def one_of(options: Callable[[], Iterable[str]] | Iterable[str]) -> Callable[[Any], str]:
    """Return a parser for one of `options` (or of what calling it gives) in any case, with - or _."""

    def parse(value: Any) -> str:
        known = {_key(option): option for option in (options() if callable(options) else options)}
        if _key(str(value)) in known:
            return known[_key(str(value))]
        key = _key(str(value))
        begun = [name for name in known if key and name.startswith(key)]
        near = begun[:1] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"did you mean {known[near[0]]}? " if near else ""
        raise typer.BadParameter(f"{value!r} is unknown; {hint}known: {', '.join(known.values())}")

    return parse


def name_or_file(options: Iterable[str], endings: tuple[str, ...]) -> Callable[[Any], str]:
    """Return a parser for one of `options`, or for a file that has one of the endings."""
    parse_one = one_of(options)

    def parse(value: Any) -> str:
        return str(value) if Path(str(value)).suffix.lower() in endings else parse_one(value)

    return parse


def names(options: Callable[[], Iterable[str]] | Iterable[str]) -> Callable[[Any], tuple[str, ...]]:
    """Return a parser for several of `options`, separated by commas, or the list of a configuration file."""
    parse_one = one_of(options)

    def parse(value: Any) -> tuple[str, ...]:
        parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
        found = tuple(parse_one(part) for part in parts if str(part).strip())
        if not found:
            raise typer.BadParameter(f"{value!r} holds no name; write names with commas between them")
        return found

    return parse


def group_norms(value: Any) -> str | dict[str, float]:
    """Return a name of clipping groups, or norms by pattern from ``conv*=0.5,linear*=1`` or a table."""
    if isinstance(value, Mapping):
        return {str(pattern): real(norm) for pattern, norm in value.items()}
    if "=" not in str(value):
        return one_of(("flat", "per_layer", "per_tensor"))(value)
    pairs = [part.rpartition("=") for part in str(value).split(",") if part.strip()]
    return {pattern.strip(): real(norm) for pattern, _, norm in pairs}


def _key(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


def _parse(text: str) -> float:
    if "/" in text:
        upper, lower = text.split("/")
        return _parse(upper.strip()) / _parse(lower.strip())
    power = _POWER.fullmatch(text)
    if power:
        return float(power[1]) ** int(power[2])
    for suffix, factor in _SUFFIXES.items():
        if text.endswith(suffix) and text != suffix:
            return _parse(text[: -len(suffix)].strip()) * factor
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return float(text)
