"""The shared output of the accounting commands: accountant, interval and remarks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.cli.accounting.event_options import EventOptions
from dpcore.cli.accounting.opacus import OpacusHistory
from dpcore.cli.options import flag, option, takes
from dpcore.cli.output import remark, told_if_slow
from dpcore.cli.values import one_of
from dpcore.errors import PrivacyError
from dpcore.spec.canonical import plain
from dpcore.statement.text import counted, format_epsilon

_Bound = Callable[[Event, float, str], float]

Accountant = Annotated[
    str | None,
    option(
        one_of(accounting.available_accountants), "NAME", "The accountant; the tightest that covers it if not given."
    ),
]
AllAccountants = Annotated[bool, flag("--all", "Also show what every other accountant says.")]


def accounts(where: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take the options of a plan, and say what it computes if that takes long.

    `where` says what makes one bound into many, as ", at every point of the curve".
    """

    def changed(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def told(*args: Any, **given: Any) -> Any:
            steps = given.get("steps")
            whose = "a plan" if steps is None else counted(steps, "step")
            whose = "what Opacus recorded" if given.get("opacus") else whose
            with told_if_slow(f"certified bounds on the privacy loss of {whose}{where}"):
                return command(*args, **given)

        return takes(EventOptions)(told)

    return changed


def tightest(bound: _Bound, event: Event, at: float, asked: str | None) -> str:
    """Return the accountant asked for, or the one with the smallest bound: each gives an upper one.

    The bound is `accounting.epsilon` at a delta, or `accounting.delta` at an epsilon. PrivacyError where none covers
    it.
    """
    if asked is not None:
        return asked
    names = accounting.accountants_for(event)
    if not names:
        raise PrivacyError(f"event={type(event).__name__}: no accountant of this version covers it")
    return min(names, key=lambda name: bound(event, at, name))


def sentence(accountant: str, plan: EventOptions | OpacusHistory, event: Event) -> str:
    """Return what was asked, in words."""
    noise = "" if plan.noise_multiplier is None else f", noise multiplier {plan.noise_multiplier:g}"
    return f"{accountant} accountant, {event.adjacency} adjacency, {plan.words}{noise}"


# Above it a delta is remarked on also where the number of examples is not known: few data sets have fewer than 1,000.
_LARGE_DELTA = 1e-3


def remark_on_delta(delta: float, plan: EventOptions | OpacusHistory, event: Event) -> str | None:
    """Remark on standard error where delta is not below 1/n, or is large and n unknown; return the sentence."""
    size = plan.dataset_size if plan.dataset_size is not None else accounting.known_dataset_size(event)
    sentence = accounting.delta_remark(delta, size)
    if sentence is not None:
        # With the digits in which the answer gives it; a value that was found has many more.
        sentence = accounting.delta_remark(min(float(format_epsilon(delta)), 0.9999), size)
    elif size is None:
        sentence = large_delta(delta)
    remark(sentence)
    return sentence


def large_delta(delta: float) -> str | None:
    """Return a sentence where a delta is large for any data set, whatever its size."""
    if delta <= _LARGE_DELTA:
        return None
    return (
        f"delta={format_epsilon(delta)}: ought to lie well below 1/n, and is below it for fewer than "
        f"{math.ceil(1.0 / delta):,} examples only"
    )


def described(event: Event) -> dict[str, Any]:
    """Return what every answer says of its event in JSON."""
    return {"adjacency": str(event.adjacency), "event": plain(event.to_dict())}
