"""Making a ledger's file: a new one, or what an export holds."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpcore.errors import ArgumentTypeError, DataError
from dpcore.ledger.book import now
from dpcore.ledger.checks import follow
from dpcore.ledger.entries import START, Entry, seal, write
from dpcore.ledger.places import check_place, check_writable
from dpcore.ledger.privacy_filter import PrivacyFilter
from dpcore.ledger.state import FORMAT, State
from dpcore.ledger.storage import Storage, exists
from dpcore.spec import validate
from dpcore.spec.version import __version__

AnyPath = str | os.PathLike[str]
Budget = tuple[float, float] | None


def create(
    path: AnyPath, budget: Budget, order: float | None, name: str, composition: str, accept: bool
) -> tuple[Storage, str | None]:
    """Make a file, and return it with the file system that its owner has just accepted; see `Ledger.create`."""
    target = resolved(path)
    budget = checked(budget)
    chosen = PrivacyFilter.of(composition, order, budget)
    limit = None if budget is None else chosen.limit(*budget)
    late = chosen.kind == "rdp" and order is None  # fixed with the first row
    if target.exists():
        raise exists(target)
    place = check_place(target, accept)
    check_writable(target)
    body = write(
        {
            "entry": 0,
            "kind": "create",
            "time": now(),
            "format": FORMAT,
            "ledger": secrets.token_hex(8),
            "name": str(name),
            "composition": chosen.kind,
            "order": None if late else chosen.order,
            "budget": None if budget is None else list(budget),
            "limit": None if late else limit,
            "software": __version__,
        }
    )
    return Storage.create(target, [Entry(0, body, seal(START, body))]), place


def restore(path: AnyPath, exported: Mapping[str, Any], accept: bool) -> tuple[Storage, str | None]:
    """Make a file from an export; see `Ledger.restore`."""
    target = resolved(path)
    place = check_place(target, accept)
    check_writable(target)
    state, last, entries = State(), START, []
    try:
        pairs = list(zip(exported["entries"], exported["seals"], strict=True))
    except (KeyError, TypeError, ValueError) as cause:
        raise DataError("exported: must be what `Ledger.export` returned, entries and as many seals") from cause
    for number, (content, sealed) in enumerate(pairs):
        entry = Entry(number, write(content), sealed)
        problem = follow(state, last, entry)
        if problem:
            raise DataError(f"exported: {problem}; what cannot be relied on is not restored")
        last = entry.seal
        entries.append(entry)
    if not entries:
        raise DataError("exported: holds no entry")
    return Storage.create(target, entries), place


def checked(budget: Any) -> Budget:
    """Return a budget as two floats."""
    if budget is None:
        return None
    try:
        epsilon, delta = budget
    except (TypeError, ValueError) as cause:
        raise ArgumentTypeError(f"budget={budget!r}: must be (epsilon, delta), such as (3.0, 1e-5)") from cause
    epsilon = validate.positive(budget_epsilon=epsilon)
    return epsilon, validate.open_unit(budget_delta=delta)


def resolved(path: AnyPath) -> Path:
    """Return the path of the file itself, behind all links."""
    try:
        return Path(os.path.realpath(Path(path)))
    except TypeError as cause:
        raise ArgumentTypeError(f"path={path!r}: must be a path") from cause
