"""Validators named by the rule, fed by keyword, so that every message reads ``argument=value: what would be right``.

Each returns its value, so that a constructor can check and convert in one line.
"""

import dataclasses
import difflib
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, ClassVar

from dpcore.errors import ArgumentError, ArgumentTypeError


def _single(values: dict[str, Any]) -> tuple[str, Any]:
    ((name, value),) = values.items()
    return name, value


def _too_large(name: str) -> str:
    """Return a sentence without the value, whose digits would fill the screen and may be more than Python prints."""
    return f"{name}: must be at most {sys.float_info.max:.4g} in size, the largest number of float64"


def number(**values: Any) -> float:
    """Return the value as a finite float."""
    name, value = _single(values)
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise ArgumentTypeError(f"{name}={value!r}: must be a real number")
    try:
        result = float(value)
    except OverflowError as cause:
        raise ArgumentError(_too_large(name)) from cause
    except (TypeError, ValueError) as cause:
        raise ArgumentTypeError(f"{name}={value!r}: must be a single real number") from cause
    if not math.isfinite(result):
        raise ArgumentError(f"{name}={value!r}: must be finite")
    return result


def _bounded(accepts: Callable[[float], bool], words: str) -> Callable[..., float]:
    def check(**values: Any) -> float:
        name, value = _single(values)
        result = number(**values)
        if not accepts(result):
            raise ArgumentError(f"{name}={value!r}: must {words}")
        return result

    check.__doc__ = f"Return the value as a finite float; it must {words}."
    return check


positive = _bounded(lambda value: value > 0, "be greater than 0")
non_negative = _bounded(lambda value: value >= 0, "be 0 or greater")
open_unit = _bounded(lambda value: 0 < value < 1, "lie strictly between 0 and 1")
fraction = _bounded(lambda value: 0 < value <= 1, "be greater than 0 and at most 1")
# Of vectors: their squares are numbers of float64, too.
norm = _bounded(lambda value: 1e-100 <= value <= 1e100, "lie between 1e-100 and 1e100")
# Relative to the sensitivity. All accountants are right within it, halved or multiplied by large counts as well.
noise = _bounded(lambda value: value == 0 or 1e-9 <= value <= 1e9, "be 0, which is not private, or from 1e-9 to 1e9")
decay = _bounded(lambda value: 0 <= value < 1, "be at least 0 and less than 1")  # of a momentum or moment
unit_interval = _bounded(lambda value: 0 <= value <= 1, "lie between 0 and 1")


def unit_intervals(**values: Any) -> float | tuple[float, ...]:
    """Return a number, or a tuple of numbers, one a step, each between 0 and 1."""
    name, value = _single(values)
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0 or not hasattr(value, "__len__"):
        return unit_interval(**values)
    if not len(value):
        raise ArgumentError(f"{name}={value!r}: must have one number a step")
    return tuple(unit_interval(**{name: each}) for each in value)


def plain(stage: Any) -> None:
    """Turn the NumPy scalars among the fields of a frozen dataclass into Python's numbers, in its `__post_init__`.

    NumPy's float64 would widen, or refuse to enter, the float32 arrays that it meets later.
    """
    for field in dataclasses.fields(stage):
        value = getattr(stage, field.name)
        own = tuple(map(_plain, value)) if type(value) is tuple else _plain(value)
        object.__setattr__(stage, field.name, own)


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def sequence(of: str = "numbers", /, **values: Any) -> Any:
    """Return the value as it is if it has a length and an order and is no text."""
    name, value = _single(values)
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        raise ArgumentTypeError(f"{name}={value!r}: must be a sequence of {of}")
    return value


def function(**values: Any) -> Any:
    """Return the value if it can be called."""
    name, value = _single(values)
    if not callable(value):
        raise ArgumentTypeError(f"{name}={value!r}: must be a function")
    return value


def integer(minimum: int | None = None, **values: Any) -> int:
    """Return the value as an int, at least `minimum` if one is given."""
    name, value = _single(values)
    if isinstance(value, bool):
        raise ArgumentTypeError(f"{name}={value!r}: must be an integer")
    try:
        result = operator.index(value)
    except TypeError as cause:
        raise ArgumentTypeError(f"{name}={value!r}: must be an integer") from cause
    try:
        float(result)
    except OverflowError as cause:
        raise ArgumentError(_too_large(name)) from cause
    if minimum is not None and result < minimum:
        raise ArgumentError(f"{name}={value!r}: must be an integer of at least {minimum}")
    return result


def choice(options: Iterable[str], **values: Any) -> str:
    """Return the value if it is one of `options`; otherwise name the nearest one."""
    name, value = _single(values)
    known = list(options)
    if isinstance(value, str) and value in known:
        return value
    near = nearest(str(value), known)
    hint = f"did you mean {near!r}? " if near else ""
    raise ArgumentError(f"{name}={value!r}: {hint}must be one of {', '.join(map(repr, known))}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the probable intention: the only name that begins so, or a name of nearly the same letters."""
    names = list(known)
    begun = [other for other in names if name and other.startswith(name)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return close[0] if close else None


Rules = Mapping[str, Callable[..., Any]]


class Checked:
    """A frozen dataclass whose fields are checked and converted when it is built, each by its validator in `rules`.

    A field that is None stays None if that is its default.
    """

    rules: ClassVar[Rules] = {}

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            if item.name in self.rules and not (value is None and item.default is None):
                object.__setattr__(self, item.name, self.rules[item.name](**{item.name: value}))
