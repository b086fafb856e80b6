"""Files of texts as published: columns by name, labels by meaning, and what is none."""

import json
from pathlib import Path

import pytest

from dpcore.cli.datasets import text
from dpcore.errors import DataError

# Beginnings of the published files, header and one or two lines each.
MNLI = 'index\tpairID\tsentence1\tsentence2\tlabel1\tgold_label\n0\t1\tAn "ox\tcomes.\tneutral\tcontradiction\n'
QQP = (
    "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n5\t1\t2\tWhy?\tWhy so?\t1\n6\t1\t2\tHow?\n7\t3\t4\tA?\tB?\t0\n"
)
SST = "sentence\tlabel\nhide new secretions \t0\n"
QNLI = "index\tquestion\tsentence\tlabel\n0\tWhen?\tIn 1963.\tnot_entailment\n1\tWho?\tKim.\tentailment\n"
E2E = 'mr,ref\n"name[Blue Spice], eatType[pub]","A pub, ""Blue Spice""."\n'
DART = json.dumps([{
    "tripleset": [["Mars Hill", "JOINED", "1973"], ["Mars Hill", "LOCATION", "NC"]], "subtree_was_extended": False,
    "annotations": [{"source": "x", "text": "Mars Hill, NC, joined."}, {"source": "y", "text": "It joined in 1973."}],
}])  # fmt: skip


def write(folder: Path, name: str, content: str) -> Path:
    inner = folder / text.GLUE[name].folder if name in text.GLUE else folder
    inner.mkdir(exist_ok=True)
    for file in text.FILES[name]:
        (inner / file).write_text(content, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("name", "content", "expected"), [
    ("mnli", MNLI, (['An "ox'], ["comes."], [2])),
    ("qqp", QQP, (["Why?", "A?"], ["Why so?", "B?"], [1, 0])),
    ("sst-2", SST, (["hide new secretions "], [], [0])),
    ("qnli", QNLI, (["When?", "Who?"], ["In 1963.", "Kim."], [1, 0])),
    ("e2e", E2E, (["name[Blue Spice], eatType[pub]"], ['A pub, "Blue Spice".'], [])),
    ("dart", DART, (["Mars Hill : joined : 1973 | Mars Hill : location : NC"] * 2,
                    ["Mars Hill, NC, joined.", "It joined in 1973."], [])),
], ids=lambda value: value if isinstance(value, str) and len(value) < 6 else "")  # fmt: skip
def test_rows_of_published_files_are_texts_and_classes(
    name: str, content: str, expected: object, tmp_path: Path
) -> None:
    train, held_out = text.read(name, write(tmp_path, name, content))
    assert tuple(train) == expected
    assert held_out == train


def abstracts(numbers: range) -> str:
    return "\n".join(json.dumps({"id": f"0704.{n:04}", "title": "x", "abstract": f"  About {n}.\n"}) for n in numbers)


def test_a_paper_stays_in_its_part_whatever_else_is_there(tmp_path: Path) -> None:
    train, held_out = text.read("arxiv", write(tmp_path, "arxiv", abstracts(range(380))))
    fewer, fewer_held_out = text.read("arxiv", write(tmp_path, "arxiv", abstracts(range(1, 380, 2))))
    assert set(fewer.first) == set(train.first) & {f"About {n}." for n in range(1, 380, 2)}
    assert set(fewer_held_out.first) < set(held_out.first)
    assert not set(train.first) & set(held_out.first)
    # Of 19 shares 17 and 1: 340 and 20 of 380, each within five standard deviations.
    assert abs(len(train.first) - 340) < 30
    assert abs(len(held_out.first) - 20) < 22
    assert len(train.first) + len(held_out.first) < 380


@pytest.mark.parametrize(("name", "content", "sentence"), [
    ("sst-2", MNLI, r"^[^(]*train.tsv: has no column sentence or label; its first line must name sentence, label"),
    ("sst-2", "", "has no column sentence"),
    ("sst-2", "sentence\tlabel\n", "sst-2 has no text to train on"),
    ("qnli", QNLI.replace("not_", "no_"), "line 2 has a label that is none of entailment, not_entailment"),
    ("mnli", MNLI + "1\t2\tcut", "line 3 has 3 of 6 columns; is the file cut off?"),
    ("e2e", "mr,ref\n\x00", "line 2|is no table"),
    ("dart", DART[:-3], "must be JSON, a list of entries with 'tripleset' and 'annotations'"),
    ("dart", '[{"annotations": []}]', "must be JSON, a list of entries"),
    ("arxiv", '{"id": "x"}', "must be JSON, one object with 'id' and 'abstract' in each line"),
])  # fmt: skip
def test_another_file_is_one_sentence(name: str, content: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        text.read(name, write(tmp_path, name, content))


def test_what_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    (write(tmp_path, "sst-2", SST) / "SST-2" / "dev.tsv").unlink()
    with pytest.raises(DataError, match=r"SST-2': has no dev.tsv; it has train.tsv"):
        text.read("sst-2", tmp_path)
    (tmp_path / "trainset.csv").write_bytes(b"mr,ref\n\xff,a\n")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        text.read("e2e", tmp_path)
