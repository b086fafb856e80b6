"""The conda recipe says what pyproject.toml says."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
# conda-forge's names, where they are not PyPI's.
NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
EXTRAS = ("torch", "triton", "crypto", "plots", "images", "texts", "sklearn", "tensorboard")


def recipe() -> dict[str, Any]:
    """The recipe, with what its context stands for put in."""
    text = (ROOT / "conda" / "recipe.yaml").read_text()
    context = yaml.safe_load(text)["context"]
    for name, value in context.items():
        text = text.replace("${{ " + name + " }}", value)
    return yaml.safe_load(text)


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def of_conda(requirement: str) -> str:
    """`torch>=2.11; platform_system == 'Linux'` as conda writes it."""
    name, rule = re.fullmatch(r"([\w-]+)(>=[\w.]+)", requirement.partition(";")[0].strip()).groups()  # type: ignore[union-attr]
    return f"{NAMES.get(name, name)} {rule}"


def test_version_and_license_are_the_projects():
    ours, theirs = project()["project"], recipe()
    assert theirs["package"] == {"name": ours["name"], "version": ours["version"]}
    assert theirs["about"]["license"] == ours["license"]
    assert theirs["about"]["summary"] == ours["description"]


def test_what_it_needs_is_what_the_project_needs():
    ours, needs = project(), recipe()["requirements"]
    expected = [f"python {ours['project']['requires-python']}", *map(of_conda, ours["project"]["dependencies"])]
    assert needs["run"] == [*expected, "__linux"]
    assert set(map(of_conda, ours["build-system"]["requires"])) <= set(needs["host"])


def test_constraints_are_those_of_the_extras():
    extras = project()["project"]["optional-dependencies"]
    expected = {of_conda(each) for name in EXTRAS for each in extras[name] if not each.startswith("dpcore")}
    assert set(recipe()["requirements"]["run_constraints"]) == expected


def test_commands_are_the_projects():
    scripts = project()["project"]["scripts"]
    assert recipe()["build"]["python"]["entry_points"] == [f"{name} = {place}" for name, place in scripts.items()]
