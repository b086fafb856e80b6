"""The site's own tools: what is generated from the code, the check of the built pages, and the list of versions."""

from __future__ import annotations

import ast
import json
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


def test_a_marker_nobody_knows_ends_the_build():
    import dpcore_docs

    assert dpcore_docs.filled("a\n<!-- a comment -->\nb") == "a\n<!-- a comment -->\nb"
    with pytest.raises(KeyError, match="nothing"):
        dpcore_docs.filled("<!-- generated: nothing -->")


def test_recorded_figures_are_shown_with_machine_and_commit():
    import benchmark_pages

    page = benchmark_pages.training("training_vs_peers_threads2")
    recorded = json.loads((ROOT / "asv_benchmarks/recorded/training_vs_peers_threads2.json").read_text())
    ratio = recorded["models"]["mlp"]["contestants"]["dpcore"]["ratio_of_medians"]
    assert f"| {ratio:.2f} |" in page
    assert recorded["machine"]["commit"][:7] in page
    assert recorded["command"] in page


def test_times_of_the_command_line_are_shown():
    import benchmark_pages

    page = benchmark_pages.command_line()
    recorded = json.loads((ROOT / "asv_benchmarks/recorded/command_line.json").read_text())
    for jobs, times in recorded["jobs_s"].items():
        assert f"--jobs {jobs}` | {benchmark_pages.duration(sorted(times)[1])} |" in page
    for entry in (*recorded["threads"], *recorded["threads_while_cores_are_busy"]):
        assert f"| {entry['products']:,} |" in page
        assert f"| {entry['two_over_one']:.2f} |" in page
    assert recorded["machine"]["commit"][:7] in page
    assert recorded["command"] in page


def test_versions_are_listed_from_the_newest_on(tmp_path: Path):
    import versions

    built, site = tmp_path / "built", tmp_path / "site"
    built.mkdir()
    site_of(built, index="pages")
    for name in ("0.9.0", "dev", "0.10.0"):
        names = versions.add(site, name, built)
    assert names == json.loads((site / "versions.json").read_text()) == ["0.10.0", "0.9.0", "dev"]
    assert 'href="0.10.0/index.html"' in (site / "index.html").read_text()
    with pytest.raises(SystemExit, match="must be a release"):
        versions.add(site, "../elsewhere", built)
    with pytest.raises(SystemExit, match="built site"):
        versions.add(site, "1.0.0", tmp_path / "nothing")


def test_the_history_has_a_column_for_each_commit():
    import benchmark_pages

    history = list(benchmark_pages.runs())
    page = benchmark_pages.asv_history()
    assert history == sorted(history, key=lambda run: run["date"])
    for run in history:
        assert run["commit_hash"][:7] in page
    value = history[-1]["results"]["accounting.Guarantees.track_poisson_pld"][0][0]
    assert f"{value:.6g}" in page
    assert benchmark_pages.combinations(history, "accounting.Schedules.peakmem_pld") == ["1000", "5000"]
    assert benchmark_pages.cell([0.0125], 0, "a.time_b") == "12.5 ms"
    assert benchmark_pages.duration(25.94) == "25.9 s"
    assert benchmark_pages.cell([None], 0, "a.time_b") == benchmark_pages.cell([], 0, "a.time_b") == "-"
