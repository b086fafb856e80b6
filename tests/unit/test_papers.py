"""The matrix of the papers: every numbered item is there, in docs/papers.toml or as a recipe, and every name exists."""

import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("typer")

from dpcore.cli.compare import recipe
from dpcore.methods import METHODS, PAPERS

ROOT = Path(__file__).resolve().parents[2]
RECIPES = [recipe.find(name) for name in recipe.names()]
ITEMS = tomllib.loads((ROOT / "docs" / "papers.toml").read_text())


def upto(last: int) -> set[str]:
    return {str(number) for number in range(1, last + 1)}


# What the papers number, counted in their texts.
NUMBERED = {
    "doppler": {"algorithm": upto(3), "theorem": upto(3), "figure": upto(12), "table": upto(4)},
    "disk": {
        "algorithm": upto(3), "theorem": upto(3), "corollary": upto(1), "lemma": upto(1), "figure": upto(8),
        "table": upto(7),
    },
    "pmlf": {
        "algorithm": upto(1), "theorem": upto(1), "corollary": upto(1), "lemma": upto(1), "figure": upto(7),
        "table": upto(5),
    },
    "srg_memf": {
        "algorithm": upto(3), "theorem": {"4.1", "4.6", "4.7", "4.10", "4.11"}, "claim": {"4.2", "4.9"},
        "lemma": {"4.3", "4.8"}, "corollary": {"4.4", "4.5"}, "figure": upto(1),
    },
    "dp_adam": {"algorithm": upto(9), "figure": upto(6)},
}  # fmt: skip


def title(paper: str) -> str:
    return PAPERS[paper][0].title


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_numbered_item_of_a_paper_is_in_the_matrix_once(paper: str) -> None:
    of_recipes = {one.place for one in RECIPES if title(one.paper) == title(paper)}
    assert not of_recipes & ITEMS[paper].keys()
    for kind, expected in NUMBERED[paper].items():
        found = re.findall(rf"^{kind} (\d+(?:\.\d+)?)\b", "\n".join([*of_recipes, *ITEMS[paper]]), flags=re.MULTILINE)
        assert set(found) == expected, kind


def test_every_recipe_belongs_to_a_paper_of_the_matrix_and_every_method_is_named() -> None:
    assert ITEMS.keys() == NUMBERED.keys()
    assert {title(one.paper) for one in RECIPES} == set(map(title, ITEMS))
    named = {name for items in ITEMS.values() for item in items.values() for name in item["where"]}
    assert {f"dpcore.methods.{name}" for name in METHODS} <= named


@pytest.mark.parametrize("paper", ITEMS)
def test_every_name_exists_and_what_has_none_says_why(paper: str) -> None:
    for place, item in ITEMS[paper].items():
        assert item.keys() <= {"what", "where", "note"}, place
        assert item["where"] or item["note"], place
        for name in item["where"]:
            module, _, member = name.rpartition(".")
            assert hasattr(import_module(module), member), name


def test_disks_recipes_clip_as_its_appendices_do() -> None:
    running = {one.name: one.settings["clipping"].value for one in RECIPES if one.paper == "disk" and one.arms}
    assert running.pop("disk-figure-7") == "normalized"  # appendix C.3
    assert set(running.values()) == {"automatic_v"}


def test_the_page_has_a_row_for_every_item_and_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs" / "_ext"), *sys.path])
    import recipe_table

    page = recipe_table.markdown()
    assert [one.name for one in RECIPES if page.count(f"`{one.name}`") != 1] == []
    assert page.count("\n| ") == len(RECIPES) + sum(map(len, ITEMS.values())) + 2 * len(ITEMS)
