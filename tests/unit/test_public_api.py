"""The names users may rely on exist, and their docstrings say what the signatures say."""

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
import tomllib
import warnings
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("numpydoc")
from numpydoc.docscrape import NumpyDocString

import dpcore

ROOT = Path(__file__).resolve().parents[2]

# The names of design.md section 5 that version 0.1 delivers. They may grow; none may go.
PROMISED = {
    "dpcore": ["set_backend", "get_backend", "use_backend", "available_backends", "methods", "Method", "minimize"],
    "dpcore.methods": ["dp_sgd", "doppler", "disk", "dp_adam"],
    "dpcore.accounting": ["PoissonSampledGaussian", "epsilon", "delta", "calibrate"],
    "dpcore.torch": ["make_private"],
}


def _modules(*packages: str) -> list[str]:
    names = []
    for package in packages:
        root = importlib.import_module(package)
        names.append(package)
        names += [found.name for found in pkgutil.walk_packages(root.__path__, package + ".")]
    return [name for name in names if not name.endswith("__main__")]


MODULES = _modules("dpcore", "dpcore_numpy", "dpcore_triton")


def _imported(module: str) -> ModuleType:
    if module.startswith("dpcore.torch.hosts"):  # of other libraries, which a machine may lack
        pytest.importorskip("transformers", exc_type=ImportError)
        pytest.importorskip("sklearn")
    return importlib.import_module(module)


def _documented(module: ModuleType) -> list[tuple[str, object]]:
    """Public functions and classes defined in a module, with the public methods of the classes."""
    found: list[tuple[str, object]] = []
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(value):
            found.append((name, value))
        elif inspect.isclass(value) and not issubclass(value, enum.Enum):
            found.append((name, value))
            found += [
                (f"{name}.{key}", method)
                for key, method in vars(value).items()
                if inspect.isfunction(method) and not key.startswith("_")
            ]
    return found


def _parse(thing: object) -> NumpyDocString:
    with warnings.catch_warnings():
        # numpydoc does not know our section "Guarantees"; the documentation renders it (docs/conf.py).
        warnings.filterwarnings("ignore", message="Unknown section")
        return NumpyDocString(inspect.getdoc(thing) or "")


def _parameters(thing: object) -> list[str]:
    """Documented names, in order: `a, b : float` documents two."""
    names = [part.strip().lstrip("*") for entry in _parse(thing)["Parameters"] for part in entry.name.split(",")]
    return [name for name in names if name]


def _signature(thing: object) -> list[str]:
    try:
        return [name for name in inspect.signature(thing).parameters if name not in {"self", "cls"}]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return []


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PROMISED.items() for name in names])
def test_promised_names_exist(module: str, name: str):
    loaded = importlib.import_module(module)
    assert hasattr(loaded, name)
    assert name in getattr(loaded, "__all__", [name])


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports_and_its_all_is_honest(module: str):
    loaded = _imported(module)
    assert inspect.getdoc(loaded), "a module says in its first line what it holds"
    names = getattr(loaded, "__all__", [])
    assert len(names) == len(set(names))
    missing = [name for name in names if not hasattr(loaded, name)]
    assert not missing


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("dpcore.")])
def test_docstrings_document_parameters_that_exist(module: str):
    wrong = {}
    for name, thing in _documented(_imported(module)):
        signature = _signature(thing)
        if dataclasses.is_dataclass(thing):
            signature = [field.name for field in dataclasses.fields(thing)]
        unknown = [parameter for parameter in _parameters(thing) if parameter not in signature]
        if unknown:
            wrong[name] = unknown
    assert not wrong


@pytest.mark.parametrize("module", PROMISED)
def test_public_callables_say_something_about_every_parameter(module: str):
    # By a Parameters section or in the sentence of a one-line docstring: the name has to stand there.
    loaded = importlib.import_module(module)
    wrong = {}
    for name in getattr(loaded, "__all__", [key for key in vars(loaded) if not key.startswith("_")]):
        thing = getattr(loaded, name)
        ours = getattr(thing, "__module__", "").startswith(module)
        if not ours or not (inspect.isfunction(thing) or dataclasses.is_dataclass(thing)):
            continue
        said = set(re.findall(r"\w+", inspect.getdoc(thing) or ""))
        missing = [parameter for parameter in _signature(thing) if parameter[0] != "_" and parameter not in said]
        if missing:
            wrong[name] = missing
    assert not wrong


def test_entry_points_name_the_backends():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["dpcore.backends"]
    assert points == {"numpy": "dpcore_numpy", "torch": "dpcore_torch", "triton": "dpcore_triton"}
    assert set(points) <= set(dpcore.available_backends())


def test_version_is_stated_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert dpcore.__version__ == project["version"]


def test_the_command_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["dpcore"].partition(":")
    assert callable(getattr(importlib.import_module(module), function))
