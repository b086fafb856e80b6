"""A run of several processes that pays from a ledger: the first process has the ledger, and answers for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dpcore.accounting.branches import Branch
from dpcore.errors import PrivacyError
from dpcore.mechanism.ledger_account import LedgerAccount
from dpcore.mechanism.peers import Peers, by_the_first

T = TypeVar("T")


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
        """See `LedgerAccount.before_draw`."""
        self._ask(lambda account: account.before_draw(step))

    def has_paid(self, step: int) -> bool:
        """See `LedgerAccount.has_paid`."""
        return bool(self._ask(lambda account: account.has_paid(step)))

    def before_release(self, step: int) -> None:
        """See `LedgerAccount.before_release`."""
        self._ask(lambda account: account.before_release(step))

    def begin(self) -> None:
        """See `LedgerAccount.begin`."""

        def begin(account: LedgerAccount) -> None:
            account.begin()

        self._ask(begin)

    def close(self) -> None:
        """See `LedgerAccount.close`; a signal's handler calls it in one process alone."""
        if self.account is not None:
            self.account.close()

    @property
    def saved(self) -> dict[str, Any] | None:
        """See `LedgerAccount.saved`."""
        return self._ask(lambda account: account.saved)

    def resume(self, saved: Mapping[str, Any] | None, row: int) -> tuple[str, int] | None:
        """See `LedgerAccount.resume`."""
        return self._ask(lambda account: account.resume(saved, row))

    def use_key(self, key_digest: str) -> None:
        """See `LedgerAccount.use_key`."""
        self._ask(lambda account: account.use_key(key_digest))

    @property
    def tree(self) -> Mapping[str, Branch]:
        """See `LedgerAccount.tree`."""
        return self._here().tree

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `LedgerAccount.caveats`."""
        return self._here().caveats

    def describe(self, delta: float) -> dict[str, Any]:
        """See `LedgerAccount.describe`."""
        return self._here().describe(delta)

    def _here(self) -> LedgerAccount:
        if self.account is None:
            raise PrivacyError(
                f"rank {self._peers.rank} has no ledger, and cannot tell what was spent: ask for epsilon and statement "
                "in rank 0, which keeps it"
            )
        return self.account
