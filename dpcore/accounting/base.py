"""The protocol of an accountant, and the table of all accountants."""

from typing import Protocol

from dpcore.accounting.events import Event, check_event
from dpcore.accounting.gaussian import GaussianAccountant
from dpcore.accounting.pld import PldAccountant
from dpcore.accounting.renyi import RdpAccountant
from dpcore.accounting.selection import SelectionAccountant
from dpcore.errors import ArgumentTypeError, PrivacyError
from dpcore.spec import validate


class Accountant(Protocol):
    """Interprets events: a small immutable object that gives the same answer to the same event every time."""

    @property
    def name(self) -> str:
        """The name by which it is chosen."""

    @property
    def floor(self) -> str:
        """One clause: why it may be unable to certify a very small epsilon."""

    def supports(self, event: Event) -> bool:
        """Whether it gives a valid (finite or infinite) epsilon for the event."""

    def epsilon(self, event: Event, delta: float) -> float:
        """Return an epsilon such that the event is (epsilon, delta)-differentially private; may be infinity."""

    def delta(self, event: Event, epsilon: float) -> float:
        """Return a delta such that the event is (epsilon, delta)-differentially private; at most 1."""


# The order is the order of preference, and of a statement: the first that covers an event is the default for it.
ACCOUNTANTS: dict[str, Accountant] = {
    "pld": PldAccountant(),
    "selection": SelectionAccountant(),
    "rdp": RdpAccountant(),
    "gaussian": GaussianAccountant(),
}


def find(accountant: str | Accountant | None, event: Event) -> Accountant:
    """Return the accountant of that name, or the object itself; None is the default for the event."""
    if accountant is None:
        # If none covers the event, the first of all, which will report it.
        accountant = (*accountants_for(event), *ACCOUNTANTS)[0]
    if isinstance(accountant, str):
        return ACCOUNTANTS[validate.choice(ACCOUNTANTS, accountant=accountant)]
    if all(hasattr(accountant, part) for part in ("name", "floor", "supports", "epsilon", "delta")):
        return accountant
    raise ArgumentTypeError(f"accountant={accountant!r}: must be a name, one of {', '.join(map(repr, ACCOUNTANTS))}")


def accountants_for(event: Event) -> tuple[str, ...]:
    """Return the names of the accountants that cover the event, the default first; empty if none does."""
    check_event(event=event)
    return tuple(name for name, accountant in ACCOUNTANTS.items() if accountant.supports(event))


def demand_support(accountant: Accountant, event: Event) -> None:
    """Raise `PrivacyError` unless the accountant supports the event."""
    if accountant.supports(check_event(event=event)):
        return
    names, kind = accountants_for(event), type(event).__name__
    if names:
        others = " or ".join(f"accountant={name!r}" for name in names)
        raise PrivacyError(f"accountant={accountant.name!r}: does not cover the event {kind}; use {others}")
    raise PrivacyError(f"event={kind}: no accountant of this version covers it or one of its parts")
