"""A public name and the room behind it are one module: no class exists twice."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from dpcore.spec.public_names import PUBLIC_NAMES


@pytest.mark.parametrize(("public", "room"), PUBLIC_NAMES.items())
def test_a_public_name_is_the_module_in_its_room(public: str, room: str):
    before = dict(vars(importlib.import_module(room)))
    assert importlib.import_module(public) is importlib.import_module(room)
    assert {name: value for name, value in vars(importlib.import_module(room)).items() if name in before} == before


def test_what_would_be_a_second_copy_is_refused_by_name():
    code = "import dpcore.filters.linear"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "import dpcore.filters, or dpcore.stages.filters.linear" in done.stderr


@pytest.mark.parametrize("name", ["minimize", "strategies.sensitivity", "datasets.load"])
def test_functions_keep_their_names(name: str):
    parent, _, last = f"dpcore.{name}".rpartition(".")
    assert callable(getattr(importlib.import_module(parent), last))
