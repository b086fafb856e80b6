"""Numbers and texts as a person reads them: bounds are rounded to the safe side."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context

# So begins the note of a statement that counts steps before they are taken.
WRITTEN_BEFORE = "Written before"


def format_epsilon(value: float, digits: int = 4) -> str:
    """Return epsilon rounded *up*, so that the text never states less than was spent; "infinite" if it is."""
    return _rounded(value, digits, ROUND_CEILING)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if math.isinf(value):
        return "infinite"
    # Through repr: the double nearest to 2.7 is above it, and 2.701 would confuse.
    rounded = Context(prec=digits, rounding=rounding).create_decimal(repr(float(value))).normalize()
    return f"{rounded:f}" if 1e-4 <= value < 1e9 or value == 0 else f"{rounded:e}".lower()


def format_delta(value: float) -> str:
    """Return delta to six digits, rounded up as epsilon is."""
    return format_epsilon(value, 6)


def format_lower(value: float, digits: int = 4) -> str:
    """Return a lower bound rounded *down*, as `format_epsilon` rounds up."""
    return _rounded(value, digits, ROUND_FLOOR)


def visible(text: str) -> str:
    """Return a text in which invisible characters are escapes: a statement may have been written to mislead a terminal.

    Control characters, changes of the direction of writing, halves of characters and ends of lines become escapes.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def format_number(value: float) -> str:
    """Return a number the way a person types it: 1e-05 becomes 1e-5, 60000 stays 60000."""
    if isinstance(value, int):
        return str(value)
    text = f"{value:.6g}"
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else text


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: 1 run, 1,438 runs; `many` is the plural if it is not the noun with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
