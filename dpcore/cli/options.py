"""Options, each said once: what several commands share, and how a dataclass becomes the options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

# What the commands train and compare draw by, and what the accounting commands know.
SAMPLINGS = (
    "poisson",
    "truncated-poisson",
    "fixed-size",
    "fixed-order",
    "shuffled",
    "cyclic-poisson",
    "random-allocation",
)
ACCOUNTED = (*SAMPLINGS, "full-batch")


def option(parser: Callable[[Any], Any], metavar: str, words: str, panel: str | None = None) -> Any:
    """Return an option with a value."""
    return typer.Option(parser=parser, metavar=metavar, help=words, rich_help_panel=panel)


def flag(name: str, words: str, panel: str | None = None) -> Any:
    """Return an option without a value; `name` has the dashes."""
    return typer.Option(name, metavar=" ", help=words, rich_help_panel=panel)


class _PlainHelp:
    """Shows --help as the flag that it is: without it, typer writes <bool> beside it."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option."""
        found = super().get_help_option(ctx)  # type: ignore[misc]
        if found is not None:
            found.metavar = " "
        return found


class _Command(_PlainHelp, TyperCommand):
    pass


class _Group(_PlainHelp, TyperGroup):
    pass


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Commands(typer.Typer):
    """Several commands under one name, which by itself shows their help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_Group, rich_markup_mode="rich", **settings)
        self.callback(invoke_without_command=True)(_show_help)

    def command(
        self, name: str | None = None, *, example: str = "", **settings: Any
    ) -> Callable[[_Function], _Function]:
        """Return the decorator that adds a command; its help ends with the example."""
        if example:
            settings["epilog"] = f"Example:  {example}"
        return super().command(name, cls=_Command, **settings)


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Json = Annotated[bool, flag("--json", "Print one JSON object on standard output, nothing else there.")]


def picture(value: Any) -> Path:
    """Return the path of a picture that can be written, checked before anything is computed."""
    path = Path(value)
    if path.suffix.lower() not in (".png", ".pdf", ".svg") or path.is_dir():
        raise typer.BadParameter(f"{str(value)!r} must be a file that ends in .png, .pdf, .svg")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{str(value)!r}: there is no folder {path.parent}")
    return path


Picture = Annotated[Path | None, option(picture, "FILE.png", "Draw a picture there (.png, .pdf, .svg).")]


@cache
def parsers(table: type) -> dict[str, Callable[[Any], Any]]:
    """Return the parser of each field of a table of options, for values that come from a file."""
    return {name: info.parser or _switch for name, (_, info) in _options(table).items()}


def takes(table: type, without: Container[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take the fields of a table as options; they come as keywords, into its `**given`.

    Not those in `without`. An option of its own by the name of a field, or by that of several (seed and seeds),
    replaces it, and stands in its place in the help.
    """

    def changed(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command, eval_str=True)
        own = {name: p for name, p in signature.parameters.items() if p.kind is not p.VAR_KEYWORD}
        first = [own.pop(name) for name, p in [*own.items()] if p.default is p.empty]
        shared = []
        for item in fields(table):
            name = next((name for name in (item.name, f"{item.name}s") if name in own), None)
            if name is not None:
                shared.append(own.pop(name))
            elif item.name not in without:
                default = None if item.default is MISSING else item.default
                kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[_options(table)[item.name]]
                shared.append(inspect.Parameter(item.name, kind, default=default, annotation=annotation))
        rest = [p.replace(kind=p.KEYWORD_ONLY) for p in (*shared, *own.values())]
        command.__signature__ = signature.replace(parameters=[*first, *rest])  # type: ignore[attr-defined]
        return command

    return changed


@cache
def _options(table: type) -> dict[str, tuple[Any, OptionInfo]]:
    """Return the type and the option of each field; a value that has a parser has no type for typer to look at."""
    found = {}
    for name, hint in get_type_hints(table, include_extras=True).items():
        kind, info = get_args(hint)
        found[name] = (kind if info.parser is None else Any, info)
    return found


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise typer.BadParameter(f"{value!r} must be true or false")
    return value
