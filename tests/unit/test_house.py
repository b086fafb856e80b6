"""The order of the house: sizes of functions, circles, rooms in the contract, foreign private state."""

from __future__ import annotations

import ast
import graphlib
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").exists())
FUNCTION_LINES, ROOMS = 60, 16
SLACK = 15  # an exception's limit is at most so far above what it allows

# fmt: off
LONG_FUNCTIONS: dict[str, tuple[int, str]] = {
    "dpcore/torch/gradients/capture.py::capture": (71, "one graph, from the model to what is left of it"),
}  # statements only, without signature and docstring
# fmt: on


@cache
def sources() -> dict[Path, tuple[str, ast.Module]]:
    """Text and syntax tree of every file of the library, by its path below the root."""
    found = [path for folder in ("dpcore", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): (text := path.read_text(), ast.parse(text)) for path in found}


def too_long(sizes: dict[str, int], limit: int, exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """What is over its limit, and which exceptions are no longer needed or too generous."""
    problems = []
    for name, size in sizes.items():
        allowed, _ = exceptions.get(name, (limit, ""))
        if size > allowed:
            problems.append(f"{name}: {size} lines, allowed are {allowed}")
    for name, (allowed, reason) in exceptions.items():
        assert reason
        size = sizes.get(name, 0)
        if size <= limit:
            problems.append(f"{name}: {size} lines need no exception any more")
        elif size < allowed - SLACK:
            problems.append(f"{name}: {size} lines; lower its limit from {allowed}")
    return problems


def function_lengths() -> dict[str, int]:
    """Lines of each function's statements; nested functions count as their own, and in the one around them."""
    lengths: dict[str, int] = {}
    for path, (_, tree) in sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) is not None else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
                name = f"{path}::{node.name}"
                lengths[name] = max(lines, lengths.get(name, 0))
    return lengths


def test_no_function_grows_beyond_its_limit():
    assert not too_long(function_lengths(), FUNCTION_LINES, LONG_FUNCTIONS)


def test_limits_are_noticed():
    assert too_long({"a": 251}, 250, {}) == ["a: 251 lines, allowed are 250"]
    assert too_long({"a": 300}, 250, {"a": (305, "why")}) == []
    assert len(too_long({"a": 306, "b": 9, "c": 260}, 250, {"a": (305, "-"), "b": (300, "-"), "c": (300, "-")})) == 3


def module_name(path: Path) -> str:
    """The name by which a file is imported."""
    return ".".join(path.with_suffix("").parts).removeprefix("backends.").removesuffix(".__init__")


def imports_of(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Names of modules of ours that a module imports, also inside of functions and for types alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in known else str(node.module)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The names of one circle, or none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as problem:
        return list(problem.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others():
    known = {module_name(path) for path in sources()}
    found = {module_name(path): set(imports_of(tree, known)) for path, (_, tree) in sources().items()}
    assert not circle({name: others & known - {name} for name, others in found.items()})


def test_circles_are_noticed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    tree = ast.parse("import a\nif TYPE_CHECKING:\n    import b\nfrom p import c, x\ndef f():\n    import d")
    assert set(imports_of(tree, {"p.c"})) == {"a", "b", "p.c", "p", "d"}


def test_the_top_level_is_small_and_the_contract_names_all_of_it():
    """What the layers forbid, circles of rooms among it, is import-linter's part: `make lint`."""
    found = {path for path in (ROOT / "dpcore").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    rooms = {path.stem for path in found} - {"__init__"}
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each for each in contracts if each["type"] == "layers" and each["containers"] == ["dpcore"])["layers"]
    assert rooms == {name for layer in layers for name in re.findall(r"\w+", layer)}
    assert len(rooms) <= ROOMS


def foreign_assignments(tree: ast.Module) -> Iterator[str]:
    """Assignments to private attributes of other objects than self, cls and the module's own classes."""
    own = {"self", "cls"} | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def foreign(owner: ast.AST, name: str) -> bool:
        private = name.startswith("_") and not name.endswith("__")
        return private and not (isinstance(owner, ast.Name) and owner.id in own)

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            below: ast.AST = node
            while isinstance(below, ast.Attribute | ast.Subscript):  # also other._x[0] = ... and other._x.y = ...
                if isinstance(below, ast.Attribute) and foreign(below.value, below.attr):
                    yield f"line {node.lineno}: {ast.unparse(node)}"
                below = below.value
        elif isinstance(node, ast.Call) and re.fullmatch(
            r"(__)?(set|del)attr(__)?", getattr(node.func, "attr", getattr(node.func, "id", ""))
        ):
            owner, name = [*node.args, ast.Constant(0), ast.Constant(0)][:2]
            if isinstance(name, ast.Constant) and foreign(owner, str(name.value)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_module_assigns_private_state_of_another_object():
    found = {str(path): list(foreign_assignments(tree)) for path, (_, tree) in sources().items()}
    assert not {path: lines for path, lines in found.items() if lines}


FOREIGN = ("other._x = 1", "a.b._x += 1", "other._x[0] = 1", "other._x.y = 1", "one, other._x = 1, 2", "del other._x",
           'object.__setattr__(other, "_x", 1)', 'setattr(other, "_x", 1)')  # fmt: skip
OWN = "self._x = 1; other.x = 1; other.__doc__ = ''", 'object.__setattr__(self, "_x", 1); setattr(other, name, 1)'


@pytest.mark.parametrize(("code", "count"), [*((code, 1) for code in FOREIGN), *((code, 0) for code in OWN)])
def test_foreign_assignments_are_noticed(code: str, count: int):
    assert len(list(foreign_assignments(ast.parse(code)))) == count


def test_the_citation_has_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_test_that_holds_a_guarantee_exists():
    page = (ROOT / "docs" / "decisions" / "guarantees-and-tests.md").read_text()
    tests = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    defined = set(re.findall(r"def (test_\w+)\(", "\n".join(path.read_text() for path in tests)))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 100
    assert named - defined == set(), "guarantees without their tests"
    assert set(re.findall(r"`(test_\w+\.py)`", page)) <= {path.name for path in tests}
