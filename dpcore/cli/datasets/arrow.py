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
    classes: int = 0  # the numbers of the last column


KEPT: Final = {
    "sst-2": _Kept("sst2", {"sentence": str, "label": int}, "validation", 2),
    "qnli": _Kept("qnli", {"question": str, "sentence": str, "label": int}, "validation", 2),
    "qqp": _Kept("qqp", {"question1": str, "question2": str, "label": int}, "validation", 2),
    "mnli": _Kept("mnli", {"premise": str, "hypothesis": str, "label": int}, "validation_matched", 3),
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


def rows_of(name: str, files: list[Path]) -> list[tuple[Any, ...]]:
    """Return the values of the columns of `KEPT` in each row, file after file.

    DataError for a file that is no table, lacks a column, or has a row without a text or with another class.
    """
    kept, rows = KEPT[name], list[tuple[Any, ...]]()
    for path in files:
        table = _table(path)
        if missing := [column for column in kept.columns if column not in table.column_names]:
            raise DataError(f"{path}: has no column {' or '.join(missing)}; must have {', '.join(kept.columns)}")
        found = [*zip(*(table[column].to_pylist() for column in kept.columns), strict=True)]
        for number, row in enumerate(found, 1):
            for value, (column, kind) in zip(row, kept.columns.items(), strict=True):
                if value is None or not isinstance(value, kind):
                    raise DataError(f"{path}: row {number} has no {column} of type {kind.__name__}")
            if kept.classes and row[-1] not in range(kept.classes):
                raise DataError(f"{path}: row {number} has a label that is none of 0 to {kept.classes - 1}")
        rows += found
    return rows


def _table(path: Path) -> Any:
    try:
        import pyarrow as pa
        from pyarrow import ipc, parquet
    except ImportError as cause:
        raise ArgumentError(needs(f"a {path.suffix} file", "pyarrow")) from cause
    with reading(path, {pa.ArrowException: "is damaged; fetch the file again"}):
        if path.suffix == ".parquet":
            return parquet.read_table(path, use_threads=False)
        with pa.memory_map(str(path)) as source:
            return ipc.open_stream(source).read_all()
