"""Texts as Hugging Face keeps them: what the published files give, and what is none."""

import sys
from pathlib import Path
from typing import Any

import pytest

from dpcore.cli.datasets import text
from dpcore.cli.datasets.arrow import KEPT
from dpcore.errors import ArgumentError, DataError
from tests.unit.cli.test_text import DART, E2E, MNLI, QNLI, QQP, SST, write

pa = pytest.importorskip("pyarrow")
from pyarrow import ipc, parquet  # noqa: E402

TRIPLES = [["Mars Hill", "JOINED", "1973"], ["Mars Hill", "LOCATION", "NC"]]
SAID = ["Mars Hill, NC, joined.", "It joined in 1973."]
# The rows that tests/unit/cli/test_text.py has as published, as Hugging Face has them.
TABLES: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "mnli": (MNLI, {"premise": ['An "ox'], "hypothesis": ["comes."], "label": [2], "idx": [0]}),
    "qqp": (QQP, {"question1": ["Why?", "A?"], "question2": ["Why so?", "B?"], "label": [1, 0]}),
    "sst-2": (SST, {"sentence": ["hide new secretions "], "label": [0]}),
    "qnli": (QNLI, {"question": ["When?", "Who?"], "sentence": ["In 1963.", "Kim."], "label": [1, 0]}),
    "e2e": (E2E, {"human_reference": ['A pub, "Blue Spice".'],
                  "meaning_representation": ["name[Blue Spice], eatType[pub]"]}),
    "dart": (DART, {"tripleset": [TRIPLES], "annotations": [{"source": ["x", "y"], "text": SAID}]}),
}  # fmt: skip
LISTED = {"tripleset": [TRIPLES], "annotations": [[{"source": "x", "text": said} for said in SAID]]}


def downloaded(folder: Path, name: str, columns: dict[str, list[Any]], parts: tuple[str, ...] = ()) -> Path:
    """Leave Parquet files as a repository of Hugging Face has them."""
    inner = folder / KEPT[name].folder
    inner.mkdir()
    for part in parts or ("train", KEPT[name].held_out):
        parquet.write_table(pa.table(columns), inner / f"{part}-00000-of-00001.parquet")
    return folder


def saved(folder: Path, name: str, columns: dict[str, list[Any]]) -> Path:
    """Leave Arrow files as `datasets.DatasetDict.save_to_disk` does."""
    table = pa.table(columns)
    for part in ("train", KEPT[name].held_out):
        (folder / part).mkdir()
        with ipc.new_stream(folder / part / "data-00000-of-00001.arrow", table.schema) as file:
            file.write_table(table)
    return folder


@pytest.mark.parametrize("leave", [downloaded, saved])
@pytest.mark.parametrize("name", TABLES)
def test_rows_are_those_of_the_published_files(name: str, leave: Any, tmp_path: Path) -> None:
    content, columns = TABLES[name]
    (tmp_path / "published").mkdir()
    published = text.read(name, write(tmp_path / "published", name, content))
    (tmp_path / "kept").mkdir()
    assert text.read(name, leave(tmp_path / "kept", name, columns)) == published


def test_annotations_may_be_listed_one_by_one(tmp_path: Path) -> None:
    train, _ = text.read("dart", downloaded(tmp_path, "dart", LISTED))
    assert train.second == SAID


def test_files_follow_each_other_by_their_names(tmp_path: Path) -> None:
    downloaded(tmp_path, "sst-2", {"sentence": ["b", "c"], "label": [1, 0]})
    first = pa.table({"sentence": ["a"], "label": [0]})
    parquet.write_table(first, tmp_path / "sst2" / "train-00000-of-00000.parquet")
    train, held_out = text.read("sst-2", tmp_path)
    assert (train.first, train.classes) == (["a", "b", "c"], [0, 1, 0])
    assert held_out.first == ["b", "c"]


@pytest.mark.parametrize(("name", "columns", "sentence"), [
    ("sst-2", {"sentence": ["a"]}, "has no column label; must have sentence, label"),
    ("sst-2", {"sentence": ["a", "b"], "label": [1, -1]}, "row 2 has a label that is none of 0 to 1"),
    ("sst-2", {"sentence": ["a", None], "label": [1, 0]}, "row 2 has no sentence of type str"),
    ("qqp", {"question1": [1], "question2": ["b"], "label": [0]}, "row 1 has no question1 of type str"),
    ("sst-2", {"sentence": [], "label": []}, "sst-2 has no text to train on"),
    ("dart", {"tripleset": [[["a", "b"]]], "annotations": [{"text": ["c"]}]}, "must be a table of triples and their"),
])  # fmt: skip
def test_another_table_is_one_sentence(name: str, columns: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        text.read(name, downloaded(tmp_path, name, columns))


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "all.parquet").touch()
    with pytest.raises(DataError, match=r"has no train.tsv, train-\*.parquet or train/\*.arrow; it has all.parquet"):
        text.read("sst-2", tmp_path)
    downloaded(tmp_path, "sst-2", TABLES["sst-2"][1], ("train",))
    with pytest.raises(DataError, match=r"sst2': has no validation-\*.parquet or validation/\*.arrow; it has train-00"):
        text.read("sst-2", tmp_path)
    table = pa.table({"sentence": pa.array([b"\xff"]).view(pa.string()), "label": [0]})
    parquet.write_table(table, tmp_path / "sst2" / "validation-0.parquet")
    with pytest.raises(DataError, match=r"validation-0.parquet: is damaged; fetch the file again$"):
        text.read("sst-2", tmp_path)
    (tmp_path / "sst2" / "validation-0.parquet").write_bytes(b"PAR1 is not all")
    with pytest.raises(DataError, match=r"validation-0.parquet: is damaged; fetch the file again$"):
        text.read("sst-2", tmp_path)


def test_without_pyarrow_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downloaded(tmp_path, "sst-2", TABLES["sst-2"][1])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ArgumentError, match=r"^a .parquet file needs pyarrow; .*'dpcore\[texts\]'$"):
        text.read("sst-2", tmp_path)
