"""A torch run's account in a ledger."""

from __future__ import annotations

import atexit
import warnings
import weakref
from pathlib import Path
from typing import Any

from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.ledger import Ledger
from dpcore.mechanism.ledger_account import LedgerAccount
from dpcore.torch.data.data import Data
from dpcore.torch.data.fingerprint import data_fingerprint
from dpcore.torch.engine import Engine


def open_ledger(ledger: Any) -> Ledger:
    """Return the ledger, opened if it was given as a path."""
    if isinstance(ledger, Ledger):
        return ledger
    if isinstance(ledger, (str, Path)):
        return Ledger.open(Path(ledger))
    raise ArgumentTypeError(f"ledger={ledger!r}: must be a path or a dpcore.ledger.Ledger")


def attach(ledger: Ledger, engine: Engine, source: Data, *, data_id: str | None, run_name: str | None) -> LedgerAccount:
    """Give the engine's mechanism an account in the ledger; nothing is written before the first batch is drawn."""
    for name, value, wanted in (
        ("data_id", data_id, "a name that changes when the data do"),
        ("run_name", run_name, "what the ledger shall call the run"),
    ):
        if value is not None and not str(value).strip():
            raise ArgumentError(f"{name}={value!r}: must be {wanted}")
    mechanism = engine.mechanism
    account = LedgerAccount(
        ledger,
        mechanism,
        name=run_name or f"{type(engine.gradient.model).__name__}, {mechanism.plan.method.name}",
        dataset=data_fingerprint(source, ledger.salt, data_id),
    )
    mechanism.account = account
    # A process that ends in good order gives back what it reserved and did not release.
    atexit.register(_close, weakref.ref(account))
    return account


def _close(reference: weakref.ref[LedgerAccount]) -> None:
    account = reference()
    if account is None:
        return
    try:
        account.close()
    except DataError as error:  # moved or damaged since: the process ends with a sentence, and nothing is given back
        warnings.warn(f"the steps that were reserved stay counted: {error}", stacklevel=1)
