"""The site's own tools: what is generated from the code, the check of the built pages, and the list of versions."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _docs_on_the_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), str(ROOT / "docs" / "_ext"), *sys.path])


def site_of(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        (folder / f"{name}.html").write_text(f"<html><body>{body}</body></html>")
    return folder


def test_links_and_pictures_that_are_not_there_are_named(tmp_path: Path):
    import check_site

    site = site_of(
        tmp_path,
        index='<a href="other.html#here">a</a> <a href="https://example.org/x">b</a> <img src="there.png">',
        other='<h1 id="here">x</h1> <a href="index.html">c</a> <a href="#here">d</a>',
    )
    (site / "there.png").write_bytes(b"")
    assert check_site.broken(site) == []
    site_of(site, other='<h1 id="there">x</h1> <img src="gone.png"> <a href="gone.html">e</a>')
    assert check_site.broken(site) == [
        "index.html: other.html#here: the page has no such place",
        "other.html: gone.png is not there",
        "other.html: gone.html is not there",
    ]
    assert check_site.broken(site / "nothing")


@pytest.mark.slow
def test_a_page_that_scrolls_sideways_is_noticed_by_a_browser(tmp_path: Path):
    import check_site

    if check_site.missing():
        pytest.skip(check_site.missing())
    site_of(
        tmp_path,
        index='<meta name="viewport" content="width=device-width">fits',
        wide='<meta name="viewport" content="width=device-width"><p style="width: 500px">wide</p>',
        bare='<meta name="viewport" content="width=device-width"><img src="gone.png">',
    )
    wrong = check_site.looked_at(tmp_path, ["index.html", "wide.html", "bare.html"], None)
    assert any(each.startswith("wide.html: scrolls") and "phone" in each for each in wrong)
    assert not any("index.html" in each or ("wide.html" in each and "desktop" in each) for each in wrong)
    assert sum("gone.png does not show" in each for each in wrong) == 2


def test_links_have_words_and_files_for_a_reader_of_the_repository():
    """Sphinx fills in a link without words, and pages that it generates; who reads the files at GitHub sees neither."""
    pages = [*ROOT.glob("*.md"), *(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)]
    links = [
        (page, found)
        for page in pages
        for found in re.finditer(r"(?<!!)\[([^][]*)\]\(([^)#\s]*)[^)]*\)", page.read_text())
    ]
    assert len(links) > 300
    assert [f"{page.name}: {link[0]}" for page, link in links if not link[1]] == []
    written = [
        (page, link[2]) for page, link in links if link[2] and "://" not in link[2] and "gallery/" not in link[2]
    ]
    assert [f"{page.name}: {to}" for page, to in written if not (page.parent / to).exists()] == []


def test_every_command_and_option_is_on_the_page():
    import command_reference

    page = command_reference.markdown()
    assert "## `dpcore train`" in page
    assert "### `dpcore ledger show`" in page
    for words, command in command_reference.commands():
        assert f"`{words}`" in page
        for parameter in command.params if not getattr(command, "commands", None) else []:
            assert parameter.opts[0] == "--help" or command_reference.spelled(parameter) in page


def test_errors_carry_the_sentences_of_the_source():
    import error_reference

    page = error_reference.markdown()
    assert "## BudgetError" in page
    assert "`{name}={value}: must be finite`" in page
    assert "## DeltaWarning" not in page
    assert "## DeltaWarning" in error_reference.warnings()
    tree = ast.parse(
        "raise ArgumentError(f'x={x!r}: must be {rule}')\nraise words(1)\nwarnings.warn('slow', SpeedWarning)"
    )
    found = [(name, error_reference.sentence(node)) for name, node in error_reference.raised(tree)]
    assert found == [("ArgumentError", "x={x}: must be {rule}"), ("words", None), ("SpeedWarning", "slow")]


def test_exit_statuses_are_those_of_the_command_line():
    import error_reference

    table = error_reference.exit_codes()
    assert [row.split("|")[1].strip() for row in table.splitlines()[2:]] == ["0", "1", "2", "3", "130 and 143"]


def test_every_public_object_has_a_page():
    import api_pages
    import dpcore.filters

    listed = {(found[1], name) for found in api_pages.LISTED.finditer((ROOT / "docs" / "api.md").read_text())
              for name in api_pages.objects(found[1], *found[2].split())}  # fmt: skip
    assert {("dpcore.filters", name) for name in dpcore.filters.__all__ if name != "NAMED_FILTERS"} <= listed
    assert ("dpcore", "minimize") in listed
    assert ("dpcore.torch", "make_private") in listed
    assert api_pages.page("dpcore", "minimize", dpcore.minimize).endswith(".. autofunction:: dpcore.minimize\n")


def test_recorded_figures_are_shown_with_machine_and_commit():
    import benchmark_pages

    page = benchmark_pages.training("training_vs_peers_threads2")
    recorded = json.loads((ROOT / "asv_benchmarks/recorded/training_vs_peers_threads2.json").read_text())
    ratio = recorded["models"]["mlp"]["contestants"]["dpcore"]["ratio_of_medians"]
    assert f"| {ratio:.2f} |" in page
    assert recorded["machine"]["commit"][:7] in page
    assert recorded["command"] in page
