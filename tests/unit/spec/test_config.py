"""Choosing a backend."""

import importlib
import sys
import threading

import pytest

import dpcore
from dpcore.errors import ArgumentError, BackendError
from dpcore.spec.backends import load_backend
from dpcore.spec.public_names import PUBLIC_NAMES
from tests.fresh import python
from tests.refused import refused


def test_numpy_is_the_default_and_the_variable_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(ArgumentError, "backend='nunpy': did you mean 'numpy'", dpcore.set_backend, "nunpy")
    assert {"numpy", "triton"} <= set(dpcore.available_backends())
    assert dpcore.get_backend() == "numpy"
    monkeypatch.setenv("DPCORE_BACKEND", "triton")
    assert dpcore.get_backend() == "triton"
    monkeypatch.setenv("DPCORE_BACKEND", "tritn")
    refused(ArgumentError, "DPCORE_BACKEND='tritn': did you mean 'triton'", dpcore.get_backend)


def test_use_backend_restores_and_is_seen_by_every_thread() -> None:
    seen = []
    with dpcore.use_backend("numpy") as backend:
        thread = threading.Thread(target=lambda: seen.append(dpcore.get_backend()))
        thread.start()
        thread.join()
        assert backend.name == "numpy"
    assert seen == ["numpy"]


def test_a_backend_that_cannot_be_imported_is_an_error_never_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dpcore_triton", None)
    refused(BackendError, r"pip install 'dpcore\[triton\]'", dpcore.set_backend, "triton")
    assert dpcore.get_backend() == "numpy"


def test_the_reference_has_every_member_of_the_port() -> None:
    from dpcore.spec.ops import Backend

    members = {name for name in vars(Backend) if not name.startswith("_")}
    assert members <= set(vars(load_backend("numpy")))


# A public name and the room behind it are one module: no class exists twice.


@pytest.mark.parametrize(("public", "room"), PUBLIC_NAMES.items())
def test_a_public_name_is_the_module_in_its_room(public: str, room: str):
    before = dict(vars(importlib.import_module(room)))
    assert importlib.import_module(public) is importlib.import_module(room)
    assert {name: value for name, value in vars(importlib.import_module(room)).items() if name in before} == before


def test_what_would_be_a_second_copy_is_refused_by_name():
    code = "import dpcore.filters.linear"
    assert "import dpcore.filters, or dpcore.stages.filters.linear" in python("-c", code).stderr


@pytest.mark.parametrize("name", ["minimize", "strategies.sensitivity", "datasets.load"])
def test_functions_keep_their_names(name: str):
    parent, _, last = f"dpcore.{name}".rpartition(".")
    assert callable(getattr(importlib.import_module(parent), last))
