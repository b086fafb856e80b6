"""A page for every public object, and the tables of docs/api.md that lead to them."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = "api"
LISTED = re.compile(r"^<!-- generated: objects (\S+) ?(.*?) -->$", flags=re.MULTILINE)


def objects(module: str, *names: str) -> dict[str, Any]:
    """The public functions and classes of a module by name: those in `__all__`, or those that it defines."""
    room = import_module(module)
    listed = names or getattr(room, "__all__", None) or [name for name in vars(room) if not name.startswith("_")]
    found = {name: getattr(room, name) for name in listed}
    if not names:
        ours = hasattr(room, "__all__")
        above = () if ours else getattr(import_module(module.rpartition(".")[0]), "__all__", ())
        found = {
            name: each
            for name, each in found.items()
            if (inspect.isclass(each) or inspect.isroutine(each))
            and (ours or each.__module__ == room.__name__)
            and not (inspect.isclass(each) and name in above)  # a class has one page
        }
    return found


def summary(thing: Any) -> str:
    """The first paragraph of the docstring, fit for a cell of a table."""
    paragraph = (inspect.getdoc(thing) or "").split("\n\n")[0]
    return escaped(" ".join(paragraph.replace("``", "`").split()))


def escaped(words: str) -> str:
    """Text whose signs do not end a cell of a table, open a tag or begin mathematics."""
    return re.sub(r"([|<$])", r"\\\1", words) if "`" not in words else words.replace("|", r"\|")


def table(module: str, *names: str) -> str:
    """Markdown: the module in a sentence, a row for each object, and the place of their pages in the tree."""
    found = objects(module, *names)
    head = "" if names else summary(import_module(module)) + "\n\n"
    rows = [f"| {{py:obj}}`{name} <{module}.{name}>` | {summary(each)} |" for name, each in found.items()]
    tree = ["```{toctree}", ":hidden:", "", f"{module} <{FOLDER}/{module}>", "```"]
    return "\n".join([f"{head}| | |", "| --- | --- |", *rows, "", *tree])


def room_page(module: str, names: list[str]) -> str:
    """reStructuredText of the page of a module: its sentence, and links to its objects.

    Their pages are no branches of the tree: furo writes the whole tree into each page, and with 250 more entries that
    took most of the time of a build.
    """
    said = " ".join((inspect.getdoc(import_module(module)) or "").split("\n\n")[0].split())
    links = [f"- :doc:`{name} <{module}.{name}>`" for name in names]
    return "\n".join([module, "=" * len(module), "", said, "", *links, ""])


def page(module: str, name: str, thing: Any) -> str:
    """reStructuredText of the page of one object."""
    whole = f"{module}.{name}"
    kind = "class" if inspect.isclass(thing) else "function" if inspect.isroutine(thing) else "data"
    above = f"In :doc:`{module}`."
    return "\n".join([":orphan:", "", whole, "=" * len(whole), "", above, "", f".. auto{kind}:: {whole}", ""])


def write(app: Any) -> None:
    """Write the pages of all objects that api.md asks for, and delete those of objects that are gone."""
    source = Path(app.srcdir)
    wanted = {}
    for found in LISTED.finditer((source / "api.md").read_text()):
        module, listed = found[1], objects(found[1], *found[2].split())
        wanted[source / FOLDER / f"{module}.rst"] = room_page(module, list(listed))
        for name, thing in listed.items():
            wanted[source / FOLDER / f"{module}.{name}.rst"] = page(module, name, thing)
    (source / FOLDER).mkdir(exist_ok=True)
    for path in set((source / FOLDER).glob("*.rst")) - set(wanted):
        path.unlink()
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
