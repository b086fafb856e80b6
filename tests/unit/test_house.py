"""The order of the house: sizes of files and functions, circles, rooms in the contract, foreign private state."""

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
FILE_LINES, FUNCTION_LINES, ROOMS = 250, 60, 16
SLACK = 15  # an exception's limit is at most so far above what it allows

# Longer files: their limit, and why.
LONG_FILES = {
    "dpcore/mechanism/mechanism.py": (580, "to be split: what it holds, what it does, what pays"),
    "dpcore/ledger/ledger.py": (545, "to be split"),
    "dpcore/plan/plan.py": (465, "to be split"),
    "dpcore/audit/canaries.py": (395, "to be split"),
    "dpcore/torch/describe.py": (365, "goes with replay"),
    "dpcore/mechanism/ledger_account.py": (350, "shrinks with replay"),
    "dpcore/mechanism/minimize.py": (335, "shrinks with the one training step"),
    "dpcore/theory/analysis/filters.py": (330, "to be split"),
    "dpcore/audit/auditing.py": (325, "to be split"),
    "dpcore/ledger/reservations.py": (310, "to be split"),
    "dpcore/torch/make_private.py": (310, "half of it is the docstring of its many arguments"),
    "dpcore/spec/ops.py": (305, "the port's specification: nearly all of it is prose"),
    "dpcore/accounting/calibrate.py": (300, "to be split"),
    "dpcore/accounting/pld/compose.py": (290, "one algorithm, and the derivation of its error"),
    "dpcore/ledger/state.py": (280, "to be split"),
    "backends/dpcore_triton/step.py": (275, "one kernel and its launch"),
    "dpcore/statement/verify/settings.py": (270, "shrinks when verify rebuilds the plan"),
    "dpcore/sampling/users.py": (270, "to be split"),
    "dpcore/statement/statement.py": (265, "to be split"),
    "dpcore/accounting/pld/discretize.py": (265, "one algorithm, and the derivation of its error"),
    "dpcore/torch/run.py": (260, "to be split"),
    "dpcore/statement/verify/rederive.py": (260, "shrinks when verify rebuilds the plan"),
}
# Longer functions (statements only, without signature and docstring): their limit, and why.
LONG_FUNCTIONS = {
    "dpcore/mechanism/minimize.py::minimize": (120, "shrinks with the one training step"),
}
# Modules that import each other inside of functions.
LATE_CIRCLES = {("dpcore.methods.common", "dpcore.methods"): "a method is built again from the table of all methods"}


@cache
def sources() -> dict[Path, tuple[str, ast.Module]]:
    """Text and syntax tree of every file of the library, by its path below the root."""
    found = [path for folder in ("dpcore", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT): (path.read_text(), ast.parse(path.read_text())) for path in found}


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


def test_no_file_grows_beyond_its_limit():
    sizes = {str(path): len(text.splitlines()) for path, (text, _) in sources().items()}
    assert not too_long(sizes, FILE_LINES, LONG_FILES)


def test_no_function_grows_beyond_its_limit():
    assert not too_long(function_lengths(), FUNCTION_LINES, LONG_FUNCTIONS)


def test_limits_are_noticed():
    assert too_long({"a": 251}, 250, {}) == ["a: 251 lines, allowed are 250"]
    assert too_long({"a": 300}, 250, {"a": (305, "why")}) == []
    assert len(too_long({"a": 306, "b": 9, "c": 260}, 250, {"a": (305, "-"), "b": (300, "-"), "c": (300, "-")})) == 3


def module_name(path: Path) -> str:
    """The name by which a file is imported."""
    return ".".join(path.with_suffix("").parts).removeprefix("backends.").removesuffix(".__init__")


def imports_of(tree: ast.Module, known: set[str], late: bool) -> Iterator[str]:
    """Names of modules of ours that a module imports; those inside of functions only with `late`."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo += node.orelse
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                whole = f"{node.module}.{name.name}"
                yield whole if whole in known else str(node.module)
        elif late or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)


def graph(late: bool) -> dict[str, set[str]]:
    """Which module imports which."""
    known = {module_name(path) for path in sources()}
    found = {module_name(path): set(imports_of(tree, known, late)) for path, (_, tree) in sources().items()}
    return {name: (others & known) - {name} for name, others in found.items()}


def room(module: str) -> str:
    """The entry of dpcore/ in which a module lies."""
    return ".".join(module.split(".")[:2])


def circle(edges: dict[str, set[str]]) -> list[str]:
    """The names of one circle, or none."""
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as problem:
        return list(problem.args[1])
    return []


def test_no_module_imports_itself_by_way_of_others():
    assert not circle(graph(late=False))


def test_imports_inside_of_functions_make_no_circles_either():
    edges = graph(late=True)
    for (one, other), reason in LATE_CIRCLES.items():
        assert reason
        assert other in edges[one], f"{one} imports {other} no longer: take the exception out"
        edges[one].discard(other)
    assert not circle(edges)


def test_rooms_make_no_circles():
    rooms: dict[str, set[str]] = {}
    for module, others in graph(late=True).items():
        if module not in {"dpcore", "dpcore_numpy", "dpcore_triton"}:
            rooms.setdefault(room(module), set()).update(map(room, others))
    assert not circle({name: others - {name, "dpcore"} for name, others in rooms.items()})


def test_circles_are_noticed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}})
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    tree = ast.parse("import a\nif TYPE_CHECKING:\n    import b\nfrom p import c, x\ndef f():\n    import d")
    assert set(imports_of(tree, {"p.c"}, late=False)) == {"a", "p.c", "p"}
    assert set(imports_of(tree, {"p.c"}, late=True)) == {"a", "p.c", "p", "d"}


def entries() -> set[str]:
    """What stands at the top of dpcore/ and can be imported."""
    found = {path for path in (ROOT / "dpcore").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    return {path.stem for path in found} - {"__init__"}


@pytest.mark.xfail(reason="23 loose modules, until the rooms are moved (../shared/layout.md)")
def test_the_top_level_is_small():
    assert len(entries()) <= ROOMS, sorted(entries())


@pytest.mark.xfail(reason="nine modules are not covered, until the contract is written anew")
def test_the_layer_contract_names_every_room():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each for each in contracts if each["type"] == "layers" and each["containers"] == ["dpcore"])["layers"]
    named = {name for layer in layers for name in re.findall(r"\w+", layer)}
    assert entries() - named == set(), "rooms that the contract does not cover"
    assert named - entries() == set(), "names in the contract that do not exist"


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
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {
            "setattr", "delattr", "__setattr__", "__delattr__",
        }:  # fmt: skip
            owner, name = [*node.args, ast.Constant(0), ast.Constant(0)][:2]
            if isinstance(name, ast.Constant) and foreign(owner, str(name.value)):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_no_module_assigns_private_state_of_another_object():
    found = {str(path): list(foreign_assignments(tree)) for path, (_, tree) in sources().items()}
    assert not {path: lines for path, lines in found.items() if lines}


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("other._x = 1", 1),
        ("a.b._x += 1", 1),
        ("other._x[0] = 1", 1),
        ("other._x.y = 1", 1),
        ("one, other._x = 1, 2", 1),
        ("del other._x", 1),
        ('object.__setattr__(other, "_x", 1)', 1),
        ('setattr(other, "_x", 1)', 1),
        ("self._x = 1; other.x = 1; other.__doc__ = ''", 0),
        ('object.__setattr__(self, "_x", 1); setattr(other, name, 1)', 0),
    ],
)
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
