"""The protocol of an account: it pays for a run's releases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dpcore.accounting.branches import Branch


class Account(Protocol):
    """Pays for a run's releases: a ledger's run."""

    def before_draw(self, step: int) -> None:
        """Make sure that step `step` is paid for, before its batch is drawn.

        Raises
        ------
        PrivacyError
            If the budget does not allow it; nothing was drawn or released then.
        """

    def before_release(self, step: int) -> None:
        """Make sure that step `step` is paid for, and stays so: it is about to leave."""

    def resume(self, saved: Mapping[str, Any] | None, row: int) -> tuple[str, int] | None:
        """Begin a branch at the checkpoint of `saved`: its name, and the number to derive its keys from.

        None where the account does not know the checkpoint.
        """

    def use_key(self, key_digest: str) -> None:
        """Take note of that branch's key by its digest."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the statement."""

    @property
    def saved(self) -> dict[str, Any] | None:
        """What a saved state must hold to be known again; None where the account has not begun and cannot."""

    @property
    def tree(self) -> Mapping[str, Branch]:
        """The run's branches that the account knows of."""

    def describe(self, delta: float) -> dict[str, Any]:
        """Return what the statement says of the account, as JSON values."""
