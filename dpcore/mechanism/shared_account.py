"""A run of several processes that pays from a ledger: the first process has the ledger, and answers for all."""

from collections.abc import Callable
from typing import Any

from dpcore.errors import PrivacyError
from dpcore.mechanism.ledger_account import LedgerAccount
from dpcore.mechanism.peers import Peers, by_the_first


def _asked(name: str) -> Callable[..., Any]:
    """Return a method that calls one of the first process's account; all must ask, and all get what it returns."""

    def ask(self: "SharedAccount", *arguments: Any) -> Any:
        return by_the_first(self.peers, lambda: getattr(self.account, name)(*arguments))

    return ask


def _here(name: str) -> Any:
    """Return a property of the first process's account, which is not sent; PrivacyError in the others."""

    def held(self: "SharedAccount") -> Any:
        if self.account is None:
            raise PrivacyError(
                f"rank {self.peers.rank} has no ledger, and cannot tell what was spent: ask for epsilon and statement "
                "in rank 0, which keeps it"
            )
        return getattr(self.account, name)

    return property(held)


class SharedAccount:
    """The first process's account, and in the others its answers; `account` is None there. See `LedgerAccount`.

    No process draws or releases before the first has written the row down. All must ask, in one order, but for what
    the ledger says in total: that the first is asked alone.
    """

    def __init__(self, peers: Peers, account: LedgerAccount | None) -> None:
        self.peers, self.account = peers, account

    before_draw = _asked("before_draw")
    has_paid = _asked("has_paid")
    before_release = _asked("before_release")
    resume = _asked("resume")
    use_key = _asked("use_key")
    tree, caveats, describe = _here("tree"), _here("caveats"), _here("describe")

    def begin(self) -> None:
        """Begin the run in the ledger; its entry there is the first process's."""

        def begun() -> None:
            assert self.account is not None
            self.account.begin()

        by_the_first(self.peers, begun)

    @property
    def saved(self) -> Any:
        """What a checkpoint must hold; all must ask."""
        return by_the_first(self.peers, lambda: None if self.account is None else self.account.saved)

    def close(self) -> None:
        """Give back what was not granted; a signal's handler calls it in one process alone."""
        if self.account is not None:
            self.account.close()
