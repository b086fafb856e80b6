"""Strategies in files: their kind, their numbers, and nothing that runs."""

import os
import zipfile
from pathlib import Path
from typing import Any, Final

import numpy as np

from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.spec.whole_file import whole_file
from dpcore.stages.strategies.base import Strategy
from dpcore.stages.strategies.kinds import (
    BLT,
    Banded,
    BandedInverseToeplitz,
    BandedToeplitz,
    Dense,
    NamedStrategy,
    from_matrix,
)
from dpcore.stages.strategies.streaming import InBlocks

ENDINGS: Final = (".npz", ".npy", ".txt")
"""Of files with a strategy."""

_FIELDS: dict[type, tuple[str, ...]] = {
    Dense: ("entries",), Banded: ("bands",), BandedToeplitz: ("series",),
    BandedInverseToeplitz: ("series", "steps"), BLT: ("scales", "decays", "steps"),
}  # fmt: skip


def save(path: str | os.PathLike[str], strategy: Strategy) -> None:
    """Write a strategy that is made of numbers into a file that `load` reads (NumPy's .npz).

    The file has the matrix, not the way it is streamed (`in_blocks`).

    Raises
    ------
    ArgumentError
        For a strategy that its name defines, such as a tree.
    DataError
        If the file cannot be written.
    """
    if isinstance(strategy, InBlocks):
        strategy = strategy.strategy
    fields = _FIELDS.get(type(strategy))
    if fields is None:
        raise ArgumentError(f"strategy={strategy.describe()['kind']!r}: has no numbers to save; its name defines it")
    arrays: dict[str, Any] = {name: np.asarray(getattr(strategy, name)) for name in fields}
    target = Path(path)
    try:
        with whole_file(target) as file:
            np.savez(file, allow_pickle=False, kind=np.array(type(strategy).__name__), **arrays)
    except OSError as cause:
        raise DataError(f"strategy {target}: cannot be written ({cause.strerror})") from cause


def load(path: str | os.PathLike[str]) -> Strategy:
    """Return the strategy in a file: one that `save` wrote, or a (T, T) matrix (.npy, or text with a row a line).

    Raises
    ------
    DataError
        If the file cannot be read, or has no strategy.
    """
    given = Path(path)
    try:
        if zipfile.is_zipfile(given):
            with given.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                content = {name: archive[name] for name in archive.files}
            kinds = {kind.__name__: kind for kind in _FIELDS}
            kind = kinds[str(content.pop("kind"))]
            values: dict[str, Any] = {name: content[name] for name in _FIELDS[kind]}
            if kind not in (Dense, Banded):  # made of numbers, not of arrays
                values = {name: value.tolist() for name, value in values.items()}
                values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
            strategy: Strategy = kind(**values)
            return strategy
        if given.suffix == ".npy":
            return from_matrix(np.load(given, allow_pickle=False))
        return from_matrix([[float(word) for word in line.split()] for line in given.read_text().splitlines()])
    except OSError as cause:
        raise DataError(f"strategy {given}: cannot be read ({cause.strerror or cause})") from cause
    except DpcoreError as cause:
        raise DataError(f"strategy {given}: {cause}") from cause
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as cause:
        raise DataError(
            f"strategy {given}: is damaged, or has no strategy of a kind known here (.npz, .npy or text)"
        ) from cause


def named_or_saved(text: str, bands: int | None) -> Strategy | NamedStrategy:
    """Return the strategy of a name, or the one in a file, which has no open number of bands."""
    if Path(text).suffix.lower() not in ENDINGS:
        return NamedStrategy(text, bands)
    if bands is not None:
        raise ArgumentError(f"bands={bands!r}: must be left out, since {text} has its strategy's")
    return load(text)
