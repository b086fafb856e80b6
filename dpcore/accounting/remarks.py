"""Remarks on a delta that is too large for the data set."""

from __future__ import annotations

from dpcore.accounting.events import Composed, Event, SelfComposed
from dpcore.spec import validate


def delta_remark(delta: float, dataset_size: int | None) -> str | None:
    """Return one sentence if delta is at least 1/n, else None.

    Publishing one random example in full is (0, 1/n)-differentially private: such a delta allows it.

    Parameters
    ----------
    delta : float
        0 < delta < 1.
    dataset_size : int or None
        n, the number of examples (or of users, where they are what is protected); None where it is not known, and
        nothing is said then.
    """
    delta = validate.open_unit(delta=delta)
    if dataset_size is None:
        return None
    size = validate.integer(dataset_size=dataset_size, minimum=1)
    if delta * size < 1.0:
        return None
    return (
        f"delta={delta!r}: is at least 1/n for n = {size} examples, so that publishing one random example in full "
        f"would be within it; take one well below {1.0 / size:.3g}"
    )


def known_dataset_size(event: Event) -> int | None:
    """Return the largest number of examples that a part of the event names, None if no part does."""
    if isinstance(event, Composed):
        sizes = [known_dataset_size(part) for part in event.events]
        return max((size for size in sizes if size is not None), default=None)
    if isinstance(event, SelfComposed):
        return known_dataset_size(event.repeated)
    return getattr(event, "dataset_size", None)
