"""Recipes: what a table or figure of a paper prints, where its settings come from, and what makes it again.

Each is one TOML file in `dpcore/recipes`. Files are data, and may come from elsewhere: every key and value is checked
here, with one sentence for what is wrong.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import typer

from dpcore.cli.compare.compare import from_tables
from dpcore.cli.compare.runs import SAME_FOR_ALL, Comparison
from dpcore.cli.options import count, one_of, parsers, reals
from dpcore.cli.train.settings import Settings
from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.methods import PAPERS
from dpcore.spec.validate import choice, nearest

FOLDER = resources.files("dpcore") / "recipes"
TEXTS = ("paper", "place", "title", "data", "model", "note", "reason", "study", "measure")
_KEYS = (*TEXTS, "methods", "printed", "settings", "arms", "tolerance")
_CELL = re.compile(r"(?:(\d*\.?\d+(?:e-?\d+)?)(?: ± \d*\.\d+)?)?")
# Settings that a comparison takes in another form than one run does.
_OF_COMPARISON: dict[str, Callable[[Any], Any]] = {"epsilon": reals, "lr": reals, "seeds": count, "search_seeds": count}
_NEVER = ("data_dir", "model_dir", "seed", "backend")
_MEASURES = ("accuracy", "loss")


@dataclass(frozen=True)
class Sourced:
    """A value, and the place of the paper that states it, or that it was chosen."""

    value: Any
    source: str


@dataclass(frozen=True)
class Printed:
    """The numbers that a paper prints, digit by digit: a table, or a sentence if there are none."""

    unit: str
    columns: tuple[str, ...] = ()
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def cell(self, arm: str, epsilon: float) -> str:
        """Return what is printed for an arm in the column of an epsilon, or an empty text."""
        return dict(zip(self.columns, self.rows.get(arm, ()), strict=False)).get(f"epsilon {epsilon:g}", "")

    def value(self, arm: str, epsilon: float) -> float | None:
        """Return the number of the cell, without its spread, or None."""
        found = _CELL.fullmatch(self.cell(arm, epsilon))
        return float(found[1]) if found and found[1] else None


@dataclass(frozen=True)
class Recipe:
    """One recipe: `arms` that run, or a `study` that makes it, or the `reason` why neither can be."""

    name: str
    content: bytes = field(repr=False)
    paper: str
    place: str
    title: str
    printed: Printed
    settings: dict[str, Sourced]
    data: str = ""
    model: str = ""
    methods: tuple[str, ...] = ()
    note: str = ""
    reason: str = ""
    study: str = ""
    measure: str = "accuracy"
    """What is held beside the printed numbers: held-out accuracy in percent, or the held-out loss."""
    arms: dict[str, dict[str, Sourced]] = field(default_factory=dict)
    tolerance: Sourced = Sourced(None, "")

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return sha256(self.content).hexdigest()

    @property
    def built_in(self) -> bool:
        """Whether it is, to the byte, the recipe of this name that dpcore brings."""
        return f"{self.digest}  {self.name}.toml" in (FOLDER / "SHA256SUMS").read_text().splitlines()

    @property
    def how(self) -> str:
        """What makes it: a command, or the reason why there is none."""
        if self.arms:
            return f"dpcore reproduce run {self.name}"
        return f"python {self.study}" if self.study else self.reason

    def comparison(
        self,
        seeds: int | None = None,
        data_dir: str | None = None,
        model_dir: str | None = None,
        model_scale: float | None = None,
        **changed: Any,
    ) -> Comparison:
        """Return the comparison with one contestant an arm; `changed` replaces values that the recipe has."""
        given = {name: changed.get(name, sourced.value) for name, sourced in self.settings.items()}
        more = {"data_dir": data_dir, "model_dir": model_dir, "model_scale": model_scale}
        given |= {name: value for name, value in more.items() if value is not None}
        own = {name: _read(name, parse, given.pop(name)) for name, parse in _OF_COMPARISON.items() if name in given}
        common = {name: _read(name, parsers(Settings)[name], value) for name, value in given.items()}
        tables = {
            arm: {name: changed.get(name, sourced.value) for name, sourced in table.items()}
            for arm, table in self.arms.items()
        }
        return Comparison(
            contestants=from_tables(tables, own.pop("lr", ())),
            epsilon=own.pop("epsilon", ()),
            common=common,
            **{**own, **({} if seeds is None else {"seeds": seeds})},
        )


def names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(item.name.removesuffix(".toml") for item in FOLDER.iterdir() if item.name.endswith(".toml"))


def find(word: str) -> Recipe:
    """Return a built-in recipe by its name, or the one in a .toml file."""
    if word.endswith(".toml"):
        try:
            content = Path(word).read_bytes()
        except OSError as cause:
            raise DataError(f"{word}: cannot be read ({cause.strerror}); name a recipe or its file") from cause
        return read(Path(word).stem, content, word)
    name = word.lower().replace("_", "-").replace(" ", "-")
    if name not in names():
        near = nearest(name, names())
        hint = f"did you mean {near}?" if near else "dpcore reproduce list names all; a file ends in .toml"
        raise ArgumentError(f"recipe {word!r}: is unknown; {hint}")
    return _built_in(name)


@cache
def _built_in(name: str) -> Recipe:
    return read(name, (FOLDER / f"{name}.toml").read_bytes(), name)


def read(name: str, content: bytes, where: str) -> Recipe:
    """Return the recipe of a file's content, named `where` in errors; DataError for the first thing that is wrong."""
    try:
        given = tomllib.loads(content.decode("utf-8"))
    except ValueError as cause:
        raise DataError(f"{where}: is not valid TOML ({str(cause).splitlines()[0]})") from cause
    try:
        _known(given, _KEYS, "key")
        for key in ("paper", "place", "title", "printed", "settings"):
            if key not in given:
                raise DataError(f"lacks {key!r}")
        fields: dict[str, Any] = {key: _text(given[key], key) for key in TEXTS if key in given}
        fields["printed"] = _printed(given["printed"])
        fields["settings"] = _sourced("settings", given["settings"])
        fields["methods"] = tuple(_texts(given.get("methods", []), "methods"))
        tables = _table(given.get("arms", {}), "arms")
        fields["arms"] = {arm: _sourced(f"arms.{arm}", table) for arm, table in tables.items()}
        if "tolerance" in given:
            fields["tolerance"] = _pair("tolerance", given["tolerance"])
        recipe = Recipe(name=name, content=content, **fields)
        _check(recipe)
    except DpcoreError as cause:
        raise DataError(f"{where}: {cause}") from cause
    return recipe


def _check(recipe: Recipe) -> None:
    """Refuse a recipe that is not complete."""
    if recipe.paper not in PAPERS:
        raise DataError(f"paper={recipe.paper!r}: must be one of {', '.join(PAPERS)}")
    if (bool(recipe.arms) + bool(recipe.reason) + bool(recipe.study)) != 1:
        raise DataError("must have exactly one of arms, study and reason")
    if "epsilon" not in recipe.settings:
        raise DataError("settings: lacks 'epsilon'; if the paper does not state it, the value is that sentence")
    if not recipe.arms:
        for key in ("data", "model", "methods"):
            if not getattr(recipe, key):
                raise DataError(f"lacks {key!r}, which only arms make needless")
        return
    if recipe.data or recipe.model or recipe.methods:
        raise DataError("data, model and methods: must be among the settings and the arms if there are arms")
    choice(_MEASURES, measure=recipe.measure)
    tolerance = recipe.tolerance.value
    if not isinstance(tolerance, (int, float)) or isinstance(tolerance, bool) or not 0 < tolerance <= 100:
        raise DataError(f"tolerance={tolerance!r}: must be a number of points above 0, with a source")
    for key in ("data", "model", "delta", "epochs", "batch_size", "seeds"):
        if key not in recipe.settings:
            raise DataError(f"settings: lacks {key!r}")
    data = recipe.settings["data"].value
    if not isinstance(data, str) or Path(data).name != data:  # files are written and read by this name
        raise DataError(f"settings.data={data!r}: must be a name")
    if strange := [row for row in recipe.printed.rows if row not in recipe.arms]:
        raise DataError(f"printed.rows: {strange[0]!r} is no arm")
    made = recipe.comparison()
    for run in made.examples:
        made.settings_for(run)


def _printed(given: Any) -> Printed:
    if isinstance(given, str):
        return Printed(_text(given, "printed"))
    _known(_table(given, "printed"), ("unit", "columns", "rows"), "key of printed")
    rows = {
        name: tuple(_list(cells, f"printed.rows: {name}"))
        for name, cells in _table(given.get("rows", {}), "printed.rows").items()
    }
    made = Printed(_text(given.get("unit", ""), "printed.unit"), tuple(_texts(given.get("columns"), "columns")), rows)
    if not rows:
        raise DataError('printed.rows: is empty; write printed = "read off figure: none" if there are no numbers')
    for name, cells in rows.items():
        if len(cells) != len(made.columns):
            raise DataError(f"printed.rows: {name!r} has {len(cells)} cells; must have {len(made.columns)}")
        for cell in cells:
            if not isinstance(cell, str) or not _CELL.fullmatch(cell):
                raise DataError(f"printed.rows: {name!r} has {cell!r}; must be text such as '92.4', '92.4 ± 0.1' or ''")
    return made


def _sourced(where: str, given: Any) -> dict[str, Sourced]:
    """Return settings by name, each with its source; an arm's method needs none."""
    known = {*(name for name in parsers(Settings) if name not in _NEVER), *_OF_COMPARISON}
    if where != "settings":
        known = {*(known - SAME_FOR_ALL - set(_OF_COMPARISON)), "lr"}
    table = {key.replace("-", "_"): value for key, value in _table(given, where).items()}
    _known(table, known, f"setting in {where}")
    return {
        key: Sourced(value, "") if key == "method" else _pair(f"{where}.{key}", value) for key, value in table.items()
    }


def _pair(where: str, given: Any) -> Sourced:
    if not isinstance(given, dict) or set(given) != {"value", "source"}:
        raise DataError(f'{where}={given!r}: must be {{ value = ..., source = "table 2" }}, or source = "chosen"')
    return Sourced(given["value"], _text(given["source"], f"{where}.source"))


def _read(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except typer.BadParameter as error:
        raise ArgumentError(f"settings.{name}: {error.message}") from error


def _known(given: Mapping[str, Any], known: Any, what: str) -> None:
    for key in given:
        if key not in known:
            near = nearest(key, known)
            raise DataError(f"has the unknown {what} {key!r}" + (f"; did you mean {near!r}?" if near else ""))


def _table(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise DataError(f"{where}={given!r}: must be a table")
    return given


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str) or not given.strip():
        raise DataError(f"{where}={given!r}: must be a text")
    return given


def _list(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise DataError(f"{where}={given!r}: must be a list of texts")
    return given


def _texts(given: Any, where: str) -> list[str]:
    return [_text(item, where) for item in _list(given, where)]


paper_of = one_of(lambda: dict.fromkeys(name.partition("-")[0] for name in names()))
"""Parser of the papers that have recipes, by the word that their recipes' names begin with."""
