"""What the tests of the ledger share: plain plans."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcore.accounting import Adjacency, Composed, Event, Gaussian, PoissonSampledGaussian
from dpcore.accounting.branches import Rows, count
from dpcore.ledger import Ledger, LedgerRun
from dpcore.ledger.state import START, Entry, seal, write
from dpcore.ledger.storage import Storage
from dpcore.sampling import PoissonSampler

_keys = itertools.count()


class Coins(PoissonSampler):
    """A caller's own, which draws anew at every step: abandoned steps are steps like the others."""

    def describe(self) -> dict[str, Any]:
        return {"sampler": "coins", "adjacency": "add-remove"}


def poisson(steps: int, abandoned: Sequence[Rows] = (), sigma: float = 1.0) -> Event:
    """Every step draws anew: abandoned ones are steps like the others."""
    return PoissonSampledGaussian(0.01, sigma, steps + count(abandoned))


def full(steps: int, abandoned: Sequence[Rows] = (), sigma: float = 20.0) -> Event:
    """Full batches: exactly Gaussian."""
    return Gaussian(sigma, steps + count(abandoned), Adjacency.ZERO_OUT)


def ordered(steps: int, abandoned: Sequence[Rows] = ()) -> Event:
    """An epoch of ten steps in a fixed order; an abandoned step may meet anybody."""
    run = Gaussian(10.0, -(-steps // 10), Adjacency.ZERO_OUT)
    return Composed((run, Gaussian(10.0, count(abandoned), Adjacency.ZERO_OUT))) if abandoned else run


def begin(ledger: Ledger, event_after: Any = poisson, **changes: Any) -> LedgerRun:
    """Begin a run with a key of its own."""
    values: dict[str, Any] = {
        "name": "a run",
        "adjacency": changes.get("adjacency") or event_after(1, ()).adjacency,
        "steps": 1000,
        "event_after": event_after,
        "description": {"lr": 0.5},
        "key_digest": f"key {next(_keys)}",
    }
    return ledger.begin(**{**values, **changes})


def released(run: LedgerRun, rows: int, first: int = 0) -> None:
    """Reserve rows one after the other, up to `rows`."""
    for row in range(first, rows):
        run.reserve(row)


def restored(path: Path, exported: dict[str, Any]) -> Ledger:
    """A ledger of what `Ledger.export` returned."""
    pairs = enumerate(zip(exported["entries"], exported["seals"], strict=True))
    Storage.create(path, [Entry(number, write(content), sealed) for number, (content, sealed) in pairs])
    return Ledger.open(path)


def resealed(exported: dict[str, Any], path: Path) -> Ledger:
    """A ledger of these entries, all of them sealed anew."""
    last, seals = START, []
    for content in exported["entries"]:
        last = seal(last, write(content))
        seals.append(last)
    return restored(path, {**exported, "seals": seals})


def new(folder: Path, **options: Any) -> Ledger:
    """A fresh ledger."""
    return Ledger.create(folder / "people.ledger", **options)
