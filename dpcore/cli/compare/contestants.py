"""Contestants from ``--methods`` or from a configuration file, read by the parsers of the options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import typer

from dpcore.cli.compare.comparison import SAME_FOR_ALL, Contestant
from dpcore.cli.options import parsers
from dpcore.cli.train.training_options import TrainingOptions
from dpcore.cli.values import reals
from dpcore.errors import ArgumentError
from dpcore.spec.validate import nearest


def from_methods(methods: Iterable[str], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return one contestant for each method, all with the same learning rates."""
    return tuple(Contestant(method, {"method": method}, lr) for method in methods)


def from_tables(tables: Mapping[str, Any], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return the contestants of a configuration file; `lr` is for those whose table has none."""
    contestants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ArgumentError(f"contestants: {name!r} must be a table, as in [contestants.{name}]")
        own = {key.replace("-", "_"): value for key, value in table.items()}
        grid = tuple(_parse(name, "lr", own.pop("lr"), _rates)) if own.get("lr") is not None else lr
        read = {key: _parse(name, key, value, _parser(name, key)) for key, value in own.items()}
        if "method" not in read:
            raise ArgumentError(f"contestant {name!r}: names no method, such as method = 'disk'")
        contestants.append(Contestant(name, read, grid))
    return tuple(contestants)


def _rates(value: Any) -> tuple[float, ...]:
    return reals([value] if isinstance(value, (int, float)) else value)


def _parser(contestant: str, key: str) -> Callable[[Any], Any]:
    known = parsers(TrainingOptions)
    if key in SAME_FOR_ALL:
        raise ArgumentError(f"contestant {contestant!r}: {key!r} is the same for all; set it outside of the table")
    if key in known:
        return known[key]
    own = sorted(set(known).difference(SAME_FOR_ALL) | {"lr"})
    near = nearest(key, own)
    hint = f"did you mean {near!r}?" if near else f"known keys are {', '.join(own)}"
    raise ArgumentError(f"contestant {contestant!r}: has the unknown key {key!r}; {hint}")


def _parse(contestant: str, key: str, value: Any, parser: Callable[[Any], Any]) -> Any:
    try:
        return parser(value)
    except typer.BadParameter as error:
        raise ArgumentError(f"contestant {contestant!r}: {key}: {error.message}") from error
