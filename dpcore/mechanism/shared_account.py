"""A run of several processes that pays from a ledger: the first process has the ledger, and answers for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from dpcore.accounting.branches import Branch
from dpcore.errors import PrivacyError
from dpcore.mechanism.ledger_account import LedgerAccount
from dpcore.mechanism.peers import Peers, by_the_first

T = TypeVar("T")


class Account(Protocol):
    """Who pays for a mechanism's releases."""

    def before_draw(self, step: int) -> None:
        """Reserve the row, or raise `PrivacyError`: nothing is drawn then."""

    def has_paid(self, step: int) -> bool:
        """Whether the row is reserved already."""

    def before_release(self, step: int) -> None:
        """Reserve the row, if it was given back since the draw, and never give it back again."""

    def begin(self) -> Any:
        """Begin the run in the ledger, if it was not."""

    def close(self) -> None:
        """Give back what was reserved and not granted to a release."""

    def resume(self, saved: Mapping[str, Any] | None, row: int) -> tuple[str, int] | None:
        """Go on from a checkpoint; see `LedgerAccount.resume`."""

    def use_key(self, key_digest: str) -> None:
        """Write down the digest of the branch's key."""

    def describe(self, delta: float) -> dict[str, Any]:
        """Return what the statement says of the ledger."""

    @property
    def saved(self) -> dict[str, Any] | None:
        """What a checkpoint must hold so that the ledger knows it again."""

    @property
    def tree(self) -> Mapping[str, Branch]:
        """The branches of the run that the ledger knows."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """What the statement must say."""


class SharedAccount:
    """The first process's account, and in the others its answers; `account` is None there.

    No process draws or releases before the first has written the row down. All must ask, in one order, but for what
    the ledger says in total: that the first is asked alone.
    """

    def __init__(self, peers: Peers, account: LedgerAccount | None) -> None:
        self._peers, self.account = peers, account

    def _ask(self, work: Callable[[LedgerAccount], T]) -> T | None:
        def answer() -> T:
            assert self.account is not None
            return work(self.account)

        return by_the_first(self._peers, answer)

    def before_draw(self, step: int) -> None:
        """See `Account.before_draw`."""
        self._ask(lambda account: account.before_draw(step))

    def has_paid(self, step: int) -> bool:
        """See `Account.has_paid`."""
        return bool(self._ask(lambda account: account.has_paid(step)))

    def before_release(self, step: int) -> None:
        """See `Account.before_release`."""
        self._ask(lambda account: account.before_release(step))

    def begin(self) -> None:
        """See `Account.begin`."""

        def begin(account: LedgerAccount) -> None:
            account.begin()

        self._ask(begin)

    def close(self) -> None:
        """See `Account.close`; a signal's handler calls it in one process alone."""
        if self.account is not None:
            self.account.close()

    @property
    def saved(self) -> dict[str, Any] | None:
        """See `Account.saved`."""
        return self._ask(lambda account: account.saved)

    def resume(self, saved: Mapping[str, Any] | None, row: int) -> tuple[str, int] | None:
        """See `Account.resume`."""
        return self._ask(lambda account: account.resume(saved, row))

    def use_key(self, key_digest: str) -> None:
        """See `Account.use_key`."""
        self._ask(lambda account: account.use_key(key_digest))

    @property
    def tree(self) -> Mapping[str, Branch]:
        """See `Account.tree`."""
        return self._here().tree

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `Account.caveats`."""
        return self._here().caveats

    def describe(self, delta: float) -> dict[str, Any]:
        """See `Account.describe`."""
        return self._here().describe(delta)

    def _here(self) -> LedgerAccount:
        if self.account is None:
            self._elsewhere()
        return self.account

    def _elsewhere(self) -> NoReturn:
        raise PrivacyError(
            f"rank {self._peers.rank} has no ledger, and cannot tell what was spent: ask for epsilon and statement in "
            "rank 0, which keeps it"
        )
