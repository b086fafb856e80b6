"""A public name and the room behind it are one module: no class exists twice."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import dpcore
from dpcore.spec.public_names import PUBLIC_NAMES


@pytest.mark.parametrize(("public", "room"), PUBLIC_NAMES.items())
def test_a_public_name_is_the_module_in_its_room(public: str, room: str):
    module = importlib.import_module(room)
    assert importlib.import_module(public) is module
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if found.name != "make_digits":
            below = importlib.import_module(f"{room}.{found.name}")
            assert importlib.import_module(f"{public}.{found.name}") is below


def test_the_function_minimize_keeps_its_name():
    assert callable(dpcore.minimize)


def test_a_submodule_is_found_by_its_public_name_first():
    code = "from dpcore.filters.low_pass import LowPass; import dpcore; assert LowPass is dpcore.filters.LowPass"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_that_are_not_there_are_missing():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dpcore.filters.no_such_module")
