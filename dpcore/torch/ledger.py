"""A torch run's account in a ledger."""

from __future__ import annotations

import atexit
import warnings
import weakref
from pathlib import Path
from typing import Any

from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.ledger import Ledger
from dpcore.ledger_account import LedgerAccount
from dpcore.torch.data import Data
from dpcore.torch.engine import Engine
from dpcore.torch.fingerprint import arithmetic, data_fingerprint, parameters_digest, run_digest
from dpcore.torch.loader import PrivateLoader
from dpcore.torch.watch import Watch

NOT_FINGERPRINTED = (
    "The data set was not fingerprinted: no step of this run is ever replayed for free; make_private(data_id=...) "
    "gives it a name to be known by."
)
NOT_REPEATED = (
    "Reading the data twice gives different examples, by draws that the run's key does not decide: no step of this run "
    "is ever replayed for free."
)
PUBLIC_BATCHES = "The public batches are not known to the ledger: no step of this run is ever replayed for free."


def open_ledger(ledger: Any) -> Ledger:
    """Return the ledger, opened if it was given as a path.

    Raises
    ------
    DataError
        If there is no ledger at that path, or it cannot be used.
    """
    if isinstance(ledger, Ledger):
        return ledger
    if isinstance(ledger, (str, Path)):
        return Ledger.open(Path(ledger))
    raise ArgumentTypeError(f"ledger={ledger!r}: must be a path or a dpcore.ledger.Ledger")


def attach(
    ledger: Ledger,
    engine: Engine,
    loader: PrivateLoader,
    source: Data,
    loss: Any,
    *,
    data_id: str | None,
    run_name: str | None,
) -> LedgerAccount:
    """Give the engine's mechanism an account in the ledger; nothing is written before the first batch is drawn."""
    for name, value, wanted in (
        ("data_id", data_id, "a name that changes when the data do"),
        ("run_name", run_name, "what the ledger shall call the run"),
    ):
        if value is not None and not str(value).strip():
            raise ArgumentError(f"{name}={value!r}: must be {wanted}")
    mechanism, model = engine.mechanism, engine.gradient.model
    data = data_fingerprint(source, ledger.salt, data_id)
    caveat = _never_again(engine, source, data)

    def digest() -> str:
        return "" if caveat else run_digest(mechanism.plan, engine, loss, data, engine.microbatch_size)

    watch = engine.watch = loader.watch = Watch(model, arithmetic, source.tensors or ())

    def row_digest() -> str:
        # Steps that are recorded run as separate operations, which may round otherwise.
        found = watch.digest()
        return found and f"{found} {engine.recorder is None}"

    account = LedgerAccount(
        ledger,
        mechanism,
        name=run_name or f"{type(model).__name__}, {mechanism.plan.method.name}",
        run_digest=digest,
        dataset=data,
        parameters_digest=lambda: parameters_digest(model),
        row_digest=row_digest,
    )
    if caveat:
        account.caveats = (caveat,)
    mechanism.account = account
    # A process that ends in good order gives back what it reserved and did not release.
    atexit.register(_close, weakref.ref(account))
    return account


def _never_again(engine: Engine, source: Data, data: str) -> str:
    """Return why no step could be made a second time, or an empty string."""
    if not data:
        return NOT_FINGERPRINTED
    if engine.mechanism.plan.method.update.second_moment == "public":
        return PUBLIC_BATCHES
    return "" if source.repeats() else NOT_REPEATED


def _close(reference: weakref.ref[LedgerAccount]) -> None:
    account = reference()
    if account is None:
        return
    try:
        account.close()
    except DataError as error:  # moved or damaged since: the process ends with a sentence, and nothing is given back
        warnings.warn(f"the steps that were reserved stay counted: {error}", stacklevel=1)
