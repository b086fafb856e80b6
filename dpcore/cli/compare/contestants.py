"""Contestants from ``--methods`` or from a configuration file, read by the parsers of ``dpcore train``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from dpcore.cli.compare.comparison import OWN_SETTINGS, Contestant
from dpcore.cli.train.train import train
from dpcore.cli.values import reals
from dpcore.errors import ArgumentError


def from_methods(methods: Iterable[str], common: Mapping[str, Any], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return one contestant for each method, all with the same settings and learning rates."""
    return tuple(Contestant(method, {**_given(common), "method": method}, lr) for method in methods)


def from_tables(tables: Mapping[str, Any], common: Mapping[str, Any], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return the contestants of a configuration file.

    Parameters
    ----------
    tables : mapping of str to mapping
        Name to settings, by the names that ``dpcore train`` has for them; `lr` may be one value or several.
    common : mapping
        Settings of all contestants; a table's own win.
    lr : tuple of float
        The learning rates of those that name none.

    Raises
    ------
    ArgumentError
        For a table without a method, and for unknown keys and values.
    """
    contestants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ArgumentError(f"contestants: {name!r} must be a table, as in [contestants.{name}]")
        own = {key.replace("-", "_"): value for key, value in table.items()}
        grid = tuple(_parse(name, "lr", own.pop("lr"), _rates)) if own.get("lr") is not None else lr
        read = {key: _parse(name, key, value, _parser(name, key)) for key, value in own.items()}
        if "method" not in read:
            raise ArgumentError(f"contestant {name!r}: names no method, such as method = 'disk'")
        contestants.append(Contestant(name, {**_given(common), **read}, grid))
    return tuple(contestants)


def _given(common: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in common.items() if value is not None}


def _rates(value: Any) -> tuple[float, ...]:
    return reals([value] if isinstance(value, (int, float)) else value)


def _parser(contestant: str, key: str) -> Callable[[Any], Any]:
    parsers = option_parsers()
    if key in OWN_SETTINGS:
        return parsers[key]
    if key in parsers:
        raise ArgumentError(f"contestant {contestant!r}: {key!r} is the same for all; set it outside of the table")
    near = difflib.get_close_matches(key, OWN_SETTINGS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(sorted((*OWN_SETTINGS, 'lr')))}"
    raise ArgumentError(f"contestant {contestant!r}: has the unknown key {key!r}; {hint}")


def _parse(contestant: str, key: str, value: Any, parser: Callable[[Any], Any]) -> Any:
    try:
        return parser(value)
    except typer.BadParameter as error:
        raise ArgumentError(f"contestant {contestant!r}: {key}: {error.message}") from error


@cache
def option_parsers() -> dict[str, Callable[[Any], Any]]:
    """Return the parser of each option of ``dpcore train`` by the option's name, so that both read alike."""
    hints = get_type_hints(train, include_extras=True)
    parsers = {}
    for name in inspect.signature(train).parameters:
        if get_origin(hints[name]) is not Annotated:
            continue
        option = get_args(hints[name])[1]
        said = [text.removeprefix("--") for text in option.param_decls or () if text.startswith("--")]
        parsers[(said or [name])[0].replace("-", "_")] = option.parser or str
    return parsers
