"""One table of papers: every method has its own, and docs and command line show what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dpcore.methods import METHODS, PAPERS

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "methods"


def test_every_method_has_a_paper_that_can_be_found():
    assert list(PAPERS) == list(METHODS)
    for papers in PAPERS.values():
        for paper in papers:
            assert bool(paper.arxiv) != bool(paper.doi)
            assert re.fullmatch(r"\d{4}\.\d{5}|", paper.arxiv)
            assert re.fullmatch(r"10\.\d{4,}/\S+|", paper.doi)
            assert not paper.arxiv or paper.arxiv.startswith(str(paper.year)[2:])
            assert paper.authors
            assert paper.url in paper.text()


@pytest.mark.parametrize("method", METHODS)
def test_its_page_and_the_table_of_methods_cite_it(method: str):
    page = (DOCS / f"{method}.md").read_text()
    (row,) = (line for line in (DOCS / "index.md").read_text().splitlines() if f"]({method}.md) |" in line)
    for paper in PAPERS[method]:
        assert f"\n*Paper.* {paper.markdown()}.\n" in page
        assert f"]({paper.url})" in row


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("typer")
    from dpcore.cli import main

    assert main(["methods"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == list(METHODS)
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert all(paper.text() in text for papers in PAPERS.values() for paper in papers)
    assert main(["methods", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [paper["arxiv"] for paper in told["memf"]["papers"]] == [paper.arxiv for paper in PAPERS["memf"]]
    assert told["disk"]["summary"].startswith("DiSK: ")
