"""Values as a person types them: 1e-5, 60,000, 60k, 1/60000, 1%, DP-SGD."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from dpcore.spec.validate import nearest

# What a signed 64-bit integer holds; nothing that is counted here needs more.
_LARGEST = 2**63 - 1
_DIGITS = re.compile(r"[+-]?(\d+(_\d+)*|\d{1,3}(,\d{3})+)")
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


def multiplier(value: Any) -> float:
    """Return a noise multiplier: 0, or a number whose square is one, too."""
    result = real(value)
    if result and not 1e-100 <= abs(result) <= 1e100:
        raise typer.BadParameter(f"{value!r} is out of range; write 0, or a number between 1e-100 and 1e100")
    return result


def count(value: Any) -> int:
    """Return an integer of at least 0: 60000, 60_000, 60,000, 60k and 6e4 are the same."""
    result = whole(value)
    if result < 0:
        raise typer.BadParameter(f"{value!r} is not a whole number of 0 or more")
    return result


def whole(value: Any) -> int:
    """Return any integer, negative ones too."""
    digits = str(value).strip()
    # By way of a float, 9007199254740993 would become another number.
    result = int(re.sub("[,_]", "", digits)) if _DIGITS.fullmatch(digits) else real(value)
    if result != int(result):
        raise typer.BadParameter(f"{value!r} is not a whole number")
    if abs(result) > _LARGEST:
        raise typer.BadParameter(f"{value!r} is too large; write a whole number of at most {_LARGEST:,}")
    return int(result)


def reals(value: Any) -> tuple[float, ...]:
    """Return numbers separated by commas or spaces, or the list of a configuration file."""
    if isinstance(value, (list, tuple)):
        return tuple(real(item) for item in value)
    parts = _between_commas(value, "number")
    return tuple(real(number) for part in parts for number in part.split())


def one_of(options: Callable[[], Iterable[str]] | Iterable[str]) -> Callable[[Any], str]:
    """Return a parser for one of `options` (or of what calling it gives) in any case, with - or _."""

    def parse(value: Any) -> str:
        known = {_key(option): option for option in (options() if callable(options) else options)}
        if _key(str(value)) in known:
            return known[_key(str(value))]
        near = nearest(_key(str(value)), known)
        hint = f"did you mean {known[near]}? " if near else ""
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
        found = tuple(map(parse_one, value if isinstance(value, (list, tuple)) else _between_commas(value, "name")))
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
    pairs = [part.rpartition("=") for part in _between_commas(value, "norm")]
    if not all(pattern.strip() for pattern, _, _ in pairs):
        raise typer.BadParameter(f"{value!r} has a norm without a pattern; write such as 'conv*=0.5,*=1'")
    return {pattern.strip(): real(norm) for pattern, _, norm in pairs}


def _between_commas(value: Any, what: str) -> list[str]:
    """Return the parts between commas, and refuse an empty one: something may have been forgotten there."""
    parts = [part.strip() for part in str(value).strip().strip("[]()").split(",")]
    if not any(parts):
        raise typer.BadParameter(f"{value!r} holds no {what}; write {what}s with commas between them")
    if not all(parts):
        raise typer.BadParameter(f"{value!r} lacks a {what} at one of its commas; write {what}s with one comma between")
    return parts


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
