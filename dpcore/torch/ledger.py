"""A torch run's account in a ledger, and the fingerprint by which it notices that its runs saw different data."""

from __future__ import annotations

import atexit
import hmac
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, TrainingWarning
from dpcore.ledger import Ledger
from dpcore.ledger.checks import different_data
from dpcore.mechanism.ledger_account import LedgerAccount
from dpcore.mechanism.peers import by_the_first
from dpcore.mechanism.shared_account import SharedAccount
from dpcore.torch.data.data import Data
from dpcore.torch.engine import Engine


def open_ledger(ledger: Any) -> Ledger:
    """Return the ledger, opened if it was given as a path."""
    if isinstance(ledger, Ledger):
        return ledger
    if isinstance(ledger, (str, Path)):
        return Ledger.open(Path(ledger))
    raise ArgumentTypeError(f"ledger={ledger!r}: must be a path or a dpcore.ledger.Ledger")


def attach(ledger: Ledger | None, engine: Engine, source: Data, *, data_id: str | None, run_name: str | None) -> None:
    """Give the engine's mechanism an account in the ledger; nothing is written before the first batch is drawn.

    Of several processes the first has the ledger; the others give None.
    """
    for name, value, wanted in (
        ("data_id", data_id, "a name that changes when the data do"),
        ("run_name", run_name, "what the ledger shall call the run"),
    ):
        if value is not None and not str(value).strip():
            raise ArgumentError(f"{name}={value!r}: must be {wanted}")
    mechanism = engine.mechanism

    def made() -> LedgerAccount:
        assert ledger is not None
        fingerprint = _fingerprint(source, ledger.salt, data_id)
        known = {run.dataset for run in ledger.runs() if run.dataset}
        if fingerprint and known and fingerprint not in known:  # told before it is paid for, as by the total later
            told = different_data(len(known) + 1)
            warnings.warn(
                f"ledger={str(ledger.path)!r}: {told} Other people need another ledger.", TrainingWarning, stacklevel=5
            )
        account = LedgerAccount(
            ledger,
            mechanism,
            name=run_name or f"{type(engine.gradient.model).__name__}, {mechanism.plan.method.name}",
            dataset=fingerprint,
        )
        # A process that ends in good order gives back what it reserved and did not release.
        atexit.register(_close, weakref.ref(account))
        return account

    account = by_the_first(mechanism.peers, made, sent=False)
    mechanism.account = account if mechanism.peers.world_size == 1 else SharedAccount(mechanism.peers, account)


def _fingerprint(data: Data, salt: bytes, data_id: str | None = None) -> str:
    """Return an HMAC of the data, or of the caller's name for them; empty for a dataset that nobody named.

    Keyed by the ledger's salt: the bare digest of private data would let anybody test a guess of them.
    """
    if data_id is not None:
        return hmac.new(salt, f"named {data.length} {data_id}".encode(), "sha256").hexdigest()
    if data.tensors is None:
        return ""
    total = hmac.new(salt, b"tensors", "sha256")
    for tensor in data.tensors:
        total.update(f"\0{tuple(tensor.shape)} {tensor.dtype}\0".encode())
        whole = tensor.detach().contiguous().cpu().reshape(-1)
        total.update(whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b"")
    return total.hexdigest()


def _close(reference: weakref.ref[LedgerAccount]) -> None:
    account = reference()
    if account is None:
        return
    try:
        account.close()
    except DataError as error:  # moved or damaged since: the process ends with a sentence, and nothing is given back
        warnings.warn(f"the steps that were reserved stay counted: {error}", stacklevel=1)
