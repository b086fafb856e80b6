"""Texts from the files that their authors publish, or as Hugging Face keeps them: GLUE, E2E, DART, and arXiv.

One row of a file is one example, and with it the unit of privacy: E2E and DART have several sentences of one source.
"""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple, TextIO

from dpcore.cli.datasets import arrow
from dpcore.cli.datasets.files import listed, reading
from dpcore.errors import DataError

CLASSES, NEXT, MASKED = "classes", "next", "masked"
"""What is learned of a text: its class, the second text after the first, or the tokens that are masked."""


class Part(NamedTuple):
    """The texts of one part of a data set, for some tasks in pairs, and for `CLASSES` the class of each."""

    first: list[str]
    second: list[str]
    classes: list[int]


class _Glue(NamedTuple):
    folder: str
    columns: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    held_out: str = "dev.tsv"  # the labels of test.tsv are not published


GLUE: Final = {
    "sst-2": _Glue("SST-2", ("sentence",), "label", ("0", "1")),
    "qnli": _Glue("QNLI", ("question", "sentence"), "label", ("entailment", "not_entailment")),
    "qqp": _Glue("QQP", ("question1", "question2"), "is_duplicate", ("0", "1")),
    "mnli": _Glue(
        "MNLI", ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"), "dev_matched.tsv"
    ),
}
TASKS: Final = {**dict.fromkeys(GLUE, CLASSES), "e2e": NEXT, "dart": NEXT, "arxiv": MASKED}
FILES: Final = {
    **{name: ("train.tsv", of.held_out) for name, of in GLUE.items()},
    "e2e": ("trainset.csv", "testset_w_refs.csv"),
    "dart": ("dart-v1.1.1-full-train.json", "dart-v1.1.1-full-dev.json"),
    "arxiv": ("arxiv-metadata-oai-snapshot.json",),
}
_DAMAGE: Final[dict[type[Exception], str]] = {
    UnicodeDecodeError: "is not UTF-8 text; fetch the file again", csv.Error: "is no table ({})",
}  # fmt: skip
_SHARES = 19
"""Of the abstracts of arXiv 17 parts are for training, one for testing, and one is left for validation."""


def read(name: str, folder: Path) -> tuple[Part, Part]:
    """Return the training part of a data set of `TASKS`, and the held-out one.

    DataError if a file is missing, has no such columns, or has a label that the task has not.
    """
    if kept := arrow.files_of(name, folder):
        parts = (_kept(name, kept[0]), _kept(name, kept[1]))
    else:
        parts = _published(name, folder)
    for part, words in zip(parts, ("to train on", "held out"), strict=True):
        if not part.first:
            raise DataError(f"data_dir={str(folder)!r}: {name} has no text {words}; is it the right file?")
    return parts


def _kept(name: str, files: list[Path]) -> Part:
    rows = arrow.rows_of(name, files, classes=len(GLUE[name].labels) if name in GLUE else 0)
    if name == "dart":
        with _in_form(files[0], "a table of triples and their annotations"):
            rows = [(_said(triples), text) for triples, annotations in rows for text in _texts(annotations)]
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], []]
    classes = columns.pop() if name in GLUE else []
    return Part(columns[0], columns[1] if len(columns) > 1 else [], classes)


def _texts(annotations: Any) -> list[str]:
    # Of `datasets` before its version 4 one list for each field.
    return annotations["text"] if isinstance(annotations, dict) else [each["text"] for each in annotations]


def _published(name: str, folder: Path) -> tuple[Part, Part]:
    place = folder / GLUE[name].folder if name in GLUE and (folder / GLUE[name].folder).is_dir() else folder
    files = [place / file for file in FILES[name]]
    if name in arrow.KEPT and not files[0].exists():
        forms = f"{files[0].name}, train-*.parquet or train/*.arrow"
        raise DataError(f"data_dir={str(place)!r}: has no {forms}; it has {listed(place)}")
    return _arxiv(files[0]) if name == "arxiv" else (_part(name, files[0]), _part(name, files[1]))


def _part(name: str, path: Path) -> Part:
    if name in GLUE:
        return _glue(path, GLUE[name], short=name == "qqp")
    pairs = [*zip(*_pairs(name, path), strict=True)] or [(), ()]
    return Part(list(pairs[0]), list(pairs[1]), [])


def _glue(path: Path, task: _Glue, short: bool) -> Part:
    with _opened(path) as file:
        lines = csv.reader(file, "excel-tab", quoting=csv.QUOTE_NONE)
        rows = [*_table(path, lines, (*task.columns, task.label), short)]
    for number, row in rows:
        if row[-1] not in task.labels:
            raise DataError(f"{path}: line {number} has a {task.label} that is none of {', '.join(task.labels)}")
    texts = [*zip(*(row for _, row in rows), strict=True)] or [(), ()]
    classes = [task.labels.index(label) for label in texts[-1]]
    return Part(list(texts[0]), list(texts[1]) if len(task.columns) > 1 else [], classes)


def _table(path: Path, rows: Any, columns: tuple[str, ...], short: bool) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield line numbers and the values of some columns; `short` rows, as QQP has as published, are left out."""
    head: list[str] = next(rows, [])
    if missing := [column for column in columns if column not in head]:
        raise DataError(f"{path}: has no column {' or '.join(missing)}; its first line must name {', '.join(columns)}")
    places = [head.index(column) for column in columns]
    for row in rows:
        if len(row) > max(places):
            yield rows.line_num, tuple(row[place] for place in places)
        elif not short:
            raise DataError(f"{path}: line {rows.line_num} has {len(row)} of {len(head)} columns; is the file cut off?")


def _pairs(name: str, path: Path) -> Iterator[tuple[str, str]]:
    """Yield what is said as data, and a sentence that says it."""
    with _opened(path) as file:
        if name == "e2e":
            yield from ((said, text) for _, (said, text) in _table(path, csv.reader(file), ("mr", "ref"), short=False))
            return
        with _in_form(path, "JSON, a list of entries with 'tripleset' and 'annotations'"):
            for entry in json.load(file):
                said = _said(entry["tripleset"])
                yield from ((said, annotation["text"]) for annotation in entry["annotations"])


def _said(triples: list[list[str]]) -> str:
    return " | ".join(f"{subject} : {of.lower()} : {what}" for subject, of, what in triples)


def _arxiv(path: Path) -> tuple[Part, Part]:
    """Return the abstracts; a paper's own number says which part it is in, whatever else the file has."""
    parts: tuple[list[str], list[str]] = ([], [])
    with _opened(path) as file, _in_form(path, "JSON, one object with 'id' and 'abstract' in each line"):
        for line in file:
            paper = json.loads(line)
            share = int.from_bytes(sha256(paper["id"].encode()).digest()[:8]) % _SHARES
            if share < _SHARES - 1 and (text := paper["abstract"].strip()):
                parts[share == 0].append(text)
    return Part(parts[0], [], []), Part(parts[1], [], [])


@contextmanager
def _in_form(path: Path, form: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as cause:
        if isinstance(cause, UnicodeDecodeError):
            raise
        raise DataError(f"{path}: must be {form}") from cause


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if not path.exists():
        raise DataError(f"data_dir={str(path.parent)!r}: has no {path.name}; it has {listed(path.parent)}")
    with reading(path, _DAMAGE), path.open(encoding="utf-8", newline="") as file:
        yield file
