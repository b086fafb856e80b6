"""One table of options: what commands, files and methods take is the same, and none is left out."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import pytest

pytest.importorskip("typer")
import typer

from dpcore.cli import app, options
from dpcore.cli.options import real
from dpcore.cli.train.settings import SETTINGS
from dpcore.methods import METHODS, keywords

# Options build these, or give them another name; galore takes objects only.
BUILT = {"adaptive_clip", "averaging", "a", "b", "galore"}


@dataclass(frozen=True)
class Table:
    rate: Annotated[float | None, options.option(real, "R", "A rate.")] = None
    on: Annotated[bool | None, options.flag("--on", "A flag.")] = None
    left: Annotated[float, options.option(real, "L", "Left out.")] = 2.0


def names(command: str) -> set[str]:
    place = import_module(f"dpcore.cli.{command}.{command}")
    group = typer.Typer()
    group.command()(getattr(place, command))
    return {str(parameter.name) for parameter in typer.main.get_command(group).params}


def test_every_keyword_of_every_method_is_an_option():
    known = {keyword for method in METHODS for keyword in keywords(method)}
    assert known - BUILT <= set(SETTINGS)


def test_commands_take_the_settings_by_their_names():
    assert set(SETTINGS) <= names("train")
    # One value of these is not enough for a comparison, or it decides them itself.
    assert set(SETTINGS) - names("compare") == {"method", "noise_multiplier", "seed"}


@pytest.mark.parametrize("name", app.COMMANDS)
def test_the_help_of_all_says_what_the_command_says(name: str):
    place, words, example = app._COMMANDS[name]
    module, _, attribute = place.partition(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        assert words == found.__doc__
    assert example.startswith(f"dpcore {name} ")


def test_a_table_becomes_options():
    heard: dict[str, Any] = {}
    group = typer.Typer()

    @group.command()
    @options.takes(Table, without=("left",))
    def command(**given: Any) -> None:
        heard.update(given)

    group(["--rate", "1/4", "--on"], standalone_mode=False)
    assert heard == {"rate": 0.25, "on": True}
    read = options.parsers(Table)
    assert (read["rate"]("50%"), read["on"](False), read["left"](3)) == (0.5, False, 3.0)


def test_an_option_of_the_commands_own_stands_in_the_fields_place():
    @options.takes(Table)
    def command(end: bool = False, ons: int = 3, rate: str = "x", **given: Any) -> None: ...

    found = inspect.signature(command).parameters
    assert list(found) == ["rate", "ons", "left", "end"]
    assert (found["rate"].default, found["ons"].default, found["left"].default) == ("x", 3, 2.0)
