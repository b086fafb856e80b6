"""What an accountant is, and the table of those that exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dpcore import validate
from dpcore.accounting.events import Event, FixedSizeSampledGaussian
from dpcore.accounting.gaussian import GaussianAccountant
from dpcore.accounting.rdp import RdpAccountant
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError


class Accountant(Protocol):
    """Interprets events: a small immutable object that gives the same answer to the same event every time."""

    @property
    def name(self) -> str:
        """The name under which it is asked for."""

    @property
    def floor(self) -> str:
        """One clause: why it may be unable to certify a very small epsilon."""

    def supports(self, event: Event) -> bool:
        """Whether it gives a valid (finite or infinite) epsilon for the event."""

    def epsilon(self, event: Event, delta: float) -> float:
        """Return an epsilon such that the event is (epsilon, delta)-differentially private; may be infinity."""

    def delta(self, event: Event, epsilon: float) -> float:
        """Return a delta such that the event is (epsilon, delta)-differentially private; at most 1."""


# The order is the order of preference in a statement.
ACCOUNTANTS: dict[str, Accountant] = {"rdp": RdpAccountant(), "gaussian": GaussianAccountant()}

# Names that the plan of the library knows and this version does not have, with what to use instead.
_NOT_YET = {"pld": "PLD accounting has not landed in this version; use accountant='rdp'"}


def find(accountant: str | Accountant, orders: Sequence[float] | None = None) -> Accountant:
    """Return the accountant of that name, or the object itself; `orders` are for "rdp" only."""
    if isinstance(accountant, str):
        if accountant in _NOT_YET:
            raise ArgumentError(f"accountant={accountant!r}: {_NOT_YET[accountant]}")
        chosen = ACCOUNTANTS[validate.choice(ACCOUNTANTS, accountant=accountant)]
    elif all(hasattr(accountant, part) for part in ("name", "supports", "epsilon", "delta")):
        chosen = accountant
    else:
        raise ArgumentTypeError(
            f"accountant={accountant!r}: must be a name, one of {', '.join(map(repr, ACCOUNTANTS))}"
        )
    if orders is None:
        return chosen
    if accountant != "rdp":
        raise ArgumentError(f"orders: only accountant='rdp' takes orders, not {chosen.name!r}")
    return RdpAccountant(orders=tuple(orders))


def covering(event: Event) -> tuple[str, ...]:
    """Return the names of the accountants that support the event."""
    if not isinstance(event, Event):
        raise ArgumentTypeError(f"event={event!r}: must be an event of dpcore.accounting")
    return tuple(name for name, accountant in ACCOUNTANTS.items() if accountant.supports(event))


def demand_support(accountant: Accountant, event: Event) -> None:
    """Raise `PrivacyError` unless the accountant supports the event."""
    names = covering(event)
    if accountant.supports(event):
        return
    kind = type(event).__name__
    if names:
        others = " or ".join(f"accountant={name!r}" for name in names)
        raise PrivacyError(f"accountant={accountant.name!r}: does not cover the event {kind}; use {others}")
    if isinstance(event, FixedSizeSampledGaussian):
        raise PrivacyError(
            f"event={kind}: no accountant of this version covers sampling of a fixed size without replacement; "
            "use Poisson sampling (dpcore.sampling.PoissonSampler) or a fixed order (dpcore.sampling.FixedOrderSampler)"
        )
    raise PrivacyError(f"event={kind}: no accountant of this version covers it or one of its parts")
