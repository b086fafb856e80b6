"""Options that several commands share, and how a dataclass becomes the options of a command."""

import inspect
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from dpcore.spec.validate import nearest

# The largest signed 64-bit integer; no count here needs more.
_LARGEST = 2**63 - 1
_WHOLE = "whole number; write one like 60000 or 6e4"
_DIGITS = re.compile(r"[+-]?\d+(_\d+)*")


def real(value: Any, kind: str = "number; write one like 0.1, 1e-5 or 1/60000") -> float:
    """Return a finite number from typed text, or from a number of a configuration file; errors name its `kind`."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        result = float(value)
    else:
        try:
            upper, slash, lower = str(value).partition("/")
            result = float(upper) / float(lower) if slash else float(upper)
        except (ValueError, OverflowError, ZeroDivisionError):
            raise typer.BadParameter(f"{value!r} is not a {kind}") from None
    if not math.isfinite(result):
        raise typer.BadParameter(f"{value!r} is not finite; write an ordinary number")
    if result == 0.0 and re.search("[1-9]", str(value).lower().partition("e")[0]):
        raise typer.BadParameter(f"{value!r} is too small to differ from 0; write an ordinary number")
    return result


def count(value: Any) -> int:
    """Return an integer of at least 0: 60000, 60_000 and 6e4 are the same."""
    result = whole(value)
    if result < 0:
        raise typer.BadParameter(f"{value!r} is not a whole number of 0 or more")
    return result


def whole(value: Any) -> int:
    """Return any integer, negative ones too."""
    digits = str(value).strip()
    # By way of a float, 9007199254740993 would become another number.
    result = int(digits) if _DIGITS.fullmatch(digits) else real(value, _WHOLE)
    if result != int(result):
        raise typer.BadParameter(f"{value!r} is not a {_WHOLE}")
    if abs(result) > _LARGEST:
        raise typer.BadParameter(f"{value!r} is too large; write a whole number of at most {_LARGEST:,}")
    return int(result)


def reals(value: Any) -> tuple[float, ...]:
    """Return numbers separated by commas or spaces, or the list of a configuration file."""
    if isinstance(value, (list, tuple)):
        return tuple(real(item) for item in value)
    parts = _between_commas(value, "number")
    return tuple(real(number) for part in parts for number in part.split())


def one_of(options: Callable[[], Iterable[str]] | Iterable[str]) -> Callable[[Any], str]:
    """Return a parser for one of `options` (a list, or a function that returns one) in any case, with - or _."""

    def parse(value: Any) -> str:
        known = {_key(option): option for option in (options() if callable(options) else options)}
        if _key(str(value)) in known:
            return known[_key(str(value))]
        near = nearest(_key(str(value)), known)
        hint = f"did you mean {known[near]}? " if near else ""
        raise typer.BadParameter(f"{value!r} is unknown; {hint}known: {', '.join(known.values())}")

    return parse


def name_or_design(options: Iterable[str], designs: Iterable[str]) -> Callable[[Any], str]:
    """Return a parser for one of `options`, or for one of `designs` with its numbers behind it."""
    parse_one, parse_design = one_of((*options, *designs)), one_of(designs)

    def parse(value: Any) -> str:
        words = str(value).split()
        numbered = len(words) > 1 and re.fullmatch(r"[\d.e+-]+|paper", words[1])
        return " ".join((parse_design(words[0]), *words[1:])) if numbered else parse_one(value)

    return parse


def name_or_file(options: Iterable[str], endings: tuple[str, ...]) -> Callable[[Any], str]:
    """Return a parser for one of `options`, or for a file that has one of the endings."""
    parse_one = one_of(options)

    def parse(value: Any) -> str:
        return str(value) if Path(str(value)).suffix.lower() in endings else parse_one(value)

    return parse


def names(options: Callable[[], Iterable[str]] | Iterable[str]) -> Callable[[Any], tuple[str, ...]]:
    """Return a parser for several of `options`, separated by commas, or the list of a configuration file."""
    parse_one = one_of(options)

    def parse(value: Any) -> tuple[str, ...]:
        parsed = tuple(map(parse_one, value if isinstance(value, (list, tuple)) else _between_commas(value, "name")))
        if not parsed:
            raise typer.BadParameter(f"{value!r} has no name; write names with commas between them")
        return parsed

    return parse


def group_norms(value: Any) -> str | dict[str, float]:
    """Return a name of clipping groups, or norms by pattern from ``conv*=0.5,linear*=1`` or a table."""
    if isinstance(value, Mapping):
        return {str(pattern): real(norm) for pattern, norm in value.items()}
    if "=" not in str(value):
        return one_of(("flat", "per_layer", "per_tensor"))(value)
    pairs = [part.rpartition("=") for part in _between_commas(value, "norm")]
    if not all(pattern.strip() for pattern, _, _ in pairs):
        raise typer.BadParameter(f"{value!r} has a norm without a pattern; write such as 'conv*=0.5,*=1'")
    norms = {pattern.strip(): real(norm) for pattern, _, norm in pairs}
    if len(norms) < len(pairs):
        raise typer.BadParameter(f"{value!r} has two norms for one pattern; write each pattern once")
    return norms


def _between_commas(value: Any, what: str) -> list[str]:
    """Return the parts between commas, and refuse an empty one: something may have been forgotten there."""
    parts = [part.strip() for part in str(value).strip().strip("[]()").split(",")]
    if not any(parts):
        raise typer.BadParameter(f"{value!r} has no {what}; write {what}s with commas between them")
    if not all(parts):
        raise typer.BadParameter(f"{value!r} lacks a {what} at one of its commas; write {what}s with one comma between")
    return parts


def _key(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


def option(parser: Callable[[Any], Any], metavar: str, words: str, panel: str | None = None) -> Any:
    """Return an option with a value."""
    return typer.Option(parser=parser, metavar=metavar, help=words, rich_help_panel=panel)


def flag(name: str, words: str, panel: str | None = None) -> Any:
    """Return an option without a value; `name` has the dashes."""
    return typer.Option(name, metavar=" ", help=words, rich_help_panel=panel)


def _plain_help(kind: Any) -> Any:
    """Return a kind of command that shows --help as a flag; typer would write <bool> next to it."""

    def get_help_option(self: Any, ctx: Any) -> Any:
        help_option = kind.get_help_option(self, ctx)
        if help_option is not None:
            help_option.metavar = " "
        return help_option

    return type(kind.__name__, (kind,), {"get_help_option": get_help_option})


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Commands(typer.Typer):
    """Several commands under one name, which by itself shows their help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=_plain_help(TyperGroup), rich_markup_mode="rich", **settings)
        self.callback(invoke_without_command=True)(_show_help)

    def command(
        self, name: str | None = None, *, example: str = "", **settings: Any
    ) -> Callable[[_Function], _Function]:
        """Return the decorator that adds a command; its help ends with the example."""
        if example:
            settings["epilog"] = f"Example:  {example}"
        return super().command(name, cls=_plain_help(TyperCommand), **settings)


def _show_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


Json = Annotated[bool, flag("--json", "Print one JSON object on standard output, nothing else there.")]


def written(*endings: str) -> Callable[[Any], Path]:
    """Return a parser for a file with one of the endings that can be written, checked before anything is computed."""

    def parse(value: Any) -> Path:
        path = Path(value)
        if path.suffix.lower() not in endings or path.is_dir():
            raise typer.BadParameter(f"{str(value)!r} must be a file that ends in {', '.join(endings)}")
        if not path.parent.is_dir():
            raise typer.BadParameter(f"{str(value)!r}: there is no folder {path.parent}")
        return path

    return parse


Picture = Annotated[
    Path | None, option(written(".png", ".pdf", ".svg"), "FILE.png", "Draw a picture there (.png, .pdf, .svg).")
]


@cache
def parsers(table: type) -> dict[str, Callable[[Any], Any]]:
    """Return the parser of each field of a table of options, for values that come from a file."""
    return {name: info.parser or _switch for name, (_, info) in _options(table).items()}


def takes(table: type, without: Container[str] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take the fields of a table as options; they come as keywords, into its `**given`.

    Fields in `without` are left out. A command's own option with the name of a field, or its plural (seed and seeds),
    replaces the field's, in the help, too.
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
    options = {}
    for name, hint in get_type_hints(table, include_extras=True).items():
        kind, info = get_args(hint)
        options[name] = (kind if info.parser is None else Any, info)
    return options


def _switch(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise typer.BadParameter(f"{value!r} must be true or false")
    return str(value).lower() == "true"
