"""Texts as Hugging Face keeps them: Parquet files as they are downloaded, or what `Dataset.save_to_disk` wrote.

Read by pyarrow and not by ``datasets``, which would leave a copy of the data in its cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from dpcore.cli.datasets.files import listed, reading
from dpcore.errors import ArgumentError, DataError
from dpcore.spec.extras import needs


class _Kept(NamedTuple):
    folder: str  # of the configuration, within that of several
    columns: dict[str, type]
    held_out: str


KEPT: Final = {
    "sst-2": _Kept("sst2", {"sentence": str, "label": int}, "validation"),
    "qnli": _Kept("qnli", {"question": str, "sentence": str, "label": int}, "validation"),
    "qqp": _Kept("qqp", {"question1": str, "question2": str, "label": int}, "validation"),
    "mnli": _Kept("mnli", {"premise": str, "hypothesis": str, "label": int}, "validation_matched"),
    "e2e": _Kept("default", {"meaning_representation": str, "human_reference": str}, "test"),
    "dart": _Kept("default", {"tripleset": list, "annotations": object}, "validation"),
}
"""The data sets of `dpcore.cli.datasets.text` that are there; classes are numbered as in their own files."""


def files_of(name: str, folder: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the files to train on and those held out; None if there are none of these formats.

    DataError if one part alone is there.
    """
    if name not in KEPT:
        return None
    splits = ("train", KEPT[name].held_out)
    for place in (folder / KEPT[name].folder, folder / "data", folder):
        parts = [sorted(place.glob(f"{split}-*.parquet")) or sorted(place.glob(f"{split}/*.arrow")) for split in splits]
        if all(parts):
            return parts[0], parts[1]
        if any(parts):
            missing = splits[parts.index([])]
            raise DataError(
                f"data_dir={str(place)!r}: has no {missing}-*.parquet or {missing}/*.arrow; it has {listed(place)}"
            )
    return None


def rows_of(name: str, files: list[Path], classes: int = 0) -> list[tuple[Any, ...]]:
    """Return the values of the columns of `KEPT` in each row, file after file.

    The last column is of numbers below `classes`, unless that is 0. DataError for a file that is no table, lacks a
    column, or has a row without a text or with another class.
    """
    columns, rows = KEPT[name].columns, list[tuple[Any, ...]]()
    for path in files:
        found = _rows(path, list(columns))
        for number, row in enumerate(found, 1):
            for value, (column, kind) in zip(row, columns.items(), strict=True):
                if value is None or not isinstance(value, kind):
                    raise DataError(f"{path}: row {number} has no {column} of type {kind.__name__}")
            if classes and row[-1] not in range(classes):
                raise DataError(f"{path}: row {number} has a label that is none of 0 to {classes - 1}")
        rows += found
    return rows


def _rows(path: Path, columns: list[str]) -> list[tuple[Any, ...]]:
    try:
        import pyarrow as pa
        from pyarrow import ipc, parquet
    except ImportError as cause:
        raise ArgumentError(needs(f"a {path.suffix} file", "pyarrow")) from cause
    with reading(path, dict.fromkeys((pa.ArrowException, UnicodeDecodeError), "is damaged; fetch the file again")):
        if path.suffix == ".parquet":
            table = parquet.read_table(path, use_threads=False)
        else:
            with pa.memory_map(str(path)) as source:
                table = ipc.open_stream(source).read_all()
        if missing := [column for column in columns if column not in table.column_names]:
            raise DataError(f"{path}: has no column {' or '.join(missing)}; must have {', '.join(columns)}")
        return [*zip(*(table[column].to_pylist() for column in columns), strict=True)]
