"""Errors and warnings with the sentences that carry them, read from the source; the exit statuses of the commands."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import dpcore.cli
from dpcore import errors

ROOT = Path(dpcore.__file__).resolve().parents[1]
KINDS = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}


def sentence(node: ast.expr | None) -> str | None:
    """A message with its placeholders in braces; None where it is put together elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{" + ast.unparse(part.value) + "}"  # type: ignore[attr-defined]
            for part in node.values
        )
    return None


def called_name(call: ast.Call) -> str:
    """The last part of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def raised(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """The class and the message of what a module raises or warns of, where the class is one of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield called_name(node.exc), next(iter(node.exc.args), None)
        elif isinstance(node, ast.Call) and called_name(node) == "warn":
            given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "category")]
            if len(given) > 1:
                yield ast.unparse(given[1]).rpartition(".")[2], given[0]


@cache
def collected() -> tuple[dict[str, dict[str, list[str]]], Counter[str]]:
    """Sentences by class and room, and how many of each class have none that can be read off."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    others: Counter[str] = Counter()
    for folder in ("dpcore", "backends"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            room = path.relative_to(ROOT).parent.as_posix().replace("/", ".").removeprefix("backends.")
            for name, node in raised(ast.parse(path.read_text())):
                if name not in KINDS:
                    continue
                words = sentence(node)
                others[name] += words is None
                if words is not None and words not in found[name][room]:
                    found[name][room].append(words)
    return found, others


def listed(names: list[str]) -> str:
    found, others = collected()
    lines: list[str] = []
    for name in names:
        lines += [f"## {name}", "", f"{inspect.getdoc(KINDS[name])} {bases(name)}", ""]
        for room, sentences in sorted(found[name].items()):
            lines += [f"**{room}**", "", *(f"- {literal(words)}" for words in sentences), ""]
        if others[name]:
            places = "1 more place" if others[name] == 1 else f"{others[name]} more places"
            lines += [f"At {places} the sentence is put together when it is said.", ""]
    return "\n".join(lines)


def literal(words: str) -> str:
    """Code, which may hold backticks."""
    return f"`` {words} ``" if "`" in words else f"`{words}`"


def bases(name: str) -> str:
    above = [base.__name__ for base in KINDS[name].__bases__ if base not in (Exception, UserWarning)]
    return f"It is also a {' and a '.join(f'`{each}`' for each in above)}." if above else ""


def markdown() -> str:
    return listed([name for name, kind in KINDS.items() if not issubclass(kind, Warning)])


def warnings() -> str:
    return listed([name for name, kind in KINDS.items() if issubclass(kind, Warning)])


def exit_codes() -> str:
    """The statuses, as `dpcore.cli.main` documents them."""
    paragraph = (inspect.getdoc(dpcore.cli.main) or "").split("\n\n")[1]
    parts = " ".join(paragraph.split()).rstrip(".").split("; ")
    found = [re.fullmatch(r"(\d+(?: and \d+)?) (.*)", part) for part in parts]
    rows = [f"| {part[1]} | {part[2]} |" for part in found if part]
    return "\n".join(["| status | |", "| --- | --- |", *rows])
