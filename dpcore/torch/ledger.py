"""A torch run's account in a ledger."""

from __future__ import annotations

import atexit
import random  # noqa: TID251 - put back as it was
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError, DataError
from dpcore.ledger import Ledger
from dpcore.mechanism.account import LedgerAccount
from dpcore.torch.checksum import checksum
from dpcore.torch.data import batches
from dpcore.torch.data.data import Data
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.describe import digest_of, undescribed
from dpcore.torch.engine import Engine
from dpcore.torch.fingerprint import arithmetic, data_fingerprint, parameters_digest, run_digest
from dpcore.torch.watch import Watch, generators

NOT_FINGERPRINTED = (
    "The data set was not fingerprinted: no step of this run is ever replayed for free; make_private(data_id=...) "
    "gives it a name to be known by."
)
NOT_REPEATED = (
    "Reading the data twice gives different examples, by draws that the run's key does not decide: no step of this run "
    "is ever replayed for free."
)
DRAWN = (
    "The model or the loss draw by other means than torch, which the run's key does not decide: no step of this run is "
    "ever replayed for free."
)
NOT_DESCRIBED = (
    "What the {name} computes cannot be told for certain ({kind}): no step of this run is ever replayed for free."
)
PUBLIC_BATCHES = "The public batches are not known to the ledger: no step of this run is ever replayed for free."


def open_ledger(ledger: Any) -> Ledger:
    """Return the ledger, opened if it was given as a path.

    Raises `DataError` if there is no ledger at that path, or it cannot be used.
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
    caveat = _never_again(engine, source, data, loss)

    def digest() -> str:
        if caveat:
            return ""
        size, joins = engine.microbatch_size, source._collate
        return run_digest(mechanism.plan, engine, loss, data, size, joins, ledger.salt)

    def described() -> str:
        network, objective = (digest_of(one, states=one is not model, quick=True) for one in (model, loss))
        return network and objective and network + objective

    watch = engine.watch = loader.watch = Watch(model, arithmetic, described, source.tensors or ())

    def parameters() -> str:
        watch.note()  # what is compared with the checkpoint now is what the next step must find
        return parameters_digest(model)

    def row_digest() -> str:
        if caveat:
            return ""
        # Steps that are recorded run as separate operations, which may round otherwise.
        found = watch.digest()
        return found and f"{found} {engine.recorder is None}"

    account = LedgerAccount(
        ledger,
        mechanism,
        name=run_name or f"{type(model).__name__}, {mechanism.plan.method.name}",
        run_digest=digest,
        dataset=data,
        parameters_digest=parameters,
        row_digest=row_digest,
    )
    if caveat:
        account.caveats = (caveat,)
    mechanism.account = account
    # A process that ends in good order gives back what it reserved and did not release.
    atexit.register(_close, weakref.ref(account))
    return account


def _never_again(engine: Engine, source: Data, data: str, loss: Any) -> str:
    """Return why no step could be made a second time, or an empty string."""
    if not data:
        return NOT_FINGERPRINTED
    if engine.mechanism.plan.method.update.second_moment == "public":
        return PUBLIC_BATCHES
    for name, value in (("model", engine.gradient.model), ("loss", loss), ("collate_fn", source._collate)):
        kind = undescribed(value)
        if kind:
            return NOT_DESCRIBED.format(name=name, kind=kind)
    if not source.repeats():
        return NOT_REPEATED
    return "" if _gradient_repeats(engine, source) else DRAWN


def _gradient_repeats(engine: Engine, source: Data) -> bool:
    """Whether made-up examples have the same gradients twice, without a draw from Python's or NumPy's generators."""
    inputs, targets = batches.normalize(source.template())
    zeros = batches.tree_map(lambda t: t.new_zeros((2, *t.shape[1:])), targets)
    made = batches.synthetic(inputs, 2)
    state, legacy = random.getstate(), np.random.get_state()  # noqa: TID251, NPY002
    before = generators()
    try:
        first, second = (
            engine.gradient(engine.gradient.parameters(), (made, *zeros) if zeros else made, synthetic=True)
            for _ in range(2)
        )
        same = all(int(checksum(a)) == int(checksum(b)) for a, b in zip(first, second, strict=True))
        return same and generators() == before
    finally:
        random.setstate(state)
        np.random.set_state(legacy)  # noqa: TID251, NPY002


def _close(reference: weakref.ref[LedgerAccount]) -> None:
    account = reference()
    if account is None:
        return
    try:
        account.close()
    except DataError as error:  # moved or damaged since: the process ends with a sentence, and nothing is given back
        warnings.warn(f"the steps that were reserved stay counted: {error}", stacklevel=1)
