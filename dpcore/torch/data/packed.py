"""Rows into which several texts were packed: what is protected is the row, and not a text in it.

A run clips and accounts rows. A person's texts may lie in several rows, beside those of others, and one that was cut
lies in two. So such rows are refused, unless the caller says whose each row is.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Subset

from dpcore.errors import ArgumentError
from dpcore.sampling import Sampler

MARKS = frozenset({"seq_lengths", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"})
"""Columns of packed rows: as TRL writes them (`seq_lengths`), and as kernels of attention read them."""
PACKED = (
    "Several texts were packed into each row: rows are protected, under the user that the caller names for each, and a "
    "person whose texts lie in rows of several users is protected less."
)
"""For the statement."""


def caveats_of(data: Any, sampler: Sampler) -> tuple[str, ...]:
    """Return the sentences on packed rows for the statement.

    Only the names of columns are read: rows that were packed and bear no mark are not recognized.

    Raises
    ------
    ArgumentError
        If rows are packed and the sampler does not say whose they are.
    """
    found = MARKS & columns(data)
    if not found:
        return ()
    if sampler.unit_of_privacy == "example":
        raise ArgumentError(
            f"data with the column {min(found)!r}: has rows of several packed texts, so that the unit of privacy would "
            "be a row and not a text; leave each text its own row (packing=False), or pack rows of one person each and "
            "name the person by sampling=dpcore.sampling.UserSampler(...)"
        )
    return (PACKED,)


def columns(data: Any) -> set[str]:
    """Return the names of a data set's columns, as far as they are known without reading more than example 0."""
    while isinstance(data, Subset):
        data = data.dataset
    if isinstance(data, list) and data:
        data = data[0]
    names = data if isinstance(data, Mapping) else getattr(data, "column_names", None)
    return {name for name in names or () if isinstance(name, str)}
