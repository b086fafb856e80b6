"""Settings from a TOML file (or from a run folder's config.json): the options' own names, without the dashes."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import typer

from dpcore.errors import ArgumentError, DataError
from dpcore.spec.canonical import read_json_file
from dpcore.spec.validate import nearest

# These belong to one call of the command, not to an experiment.
_NOT_SETTINGS = {"config", "help", "debug", "json", "overwrite"}
TABLES = "contestants"


def read(path: Path) -> dict[str, Any]:
    """Return the settings in a .toml file or in the config.json of a run."""
    try:
        if path.suffix == ".json":
            settings = read_json_file(path)
            settings = settings.get("settings") if isinstance(settings, dict) else None
            if not isinstance(settings, dict):
                raise DataError(f"config={str(path)!r}: holds no settings; name a .toml file or a run's config.json")
            return {key: value for key, value in settings.items() if value is not None}
        return tomllib.loads(path.read_text("utf-8"))
    except DataError:
        raise
    except OSError as cause:
        raise DataError(f"config={str(path)!r}: cannot be read ({cause.strerror})") from cause
    except ValueError as cause:
        problem, kind = str(cause).splitlines()[0], "JSON" if path.suffix == ".json" else "TOML"
        raise DataError(f"config={str(path)!r}: is not valid {kind} ({problem})") from cause


def use(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's settings the defaults of the command; options on the command line win.

    The tables of contestants that ``dpcore compare`` takes are no options, but put into ``context.meta`` as they are.
    """
    if path is None:
        return None
    known = {
        option.removeprefix("--").replace("-", "_"): str(parameter.name)
        for parameter in context.command.params
        for option in parameter.opts
        if option.startswith("--")
    }
    known = {key: name for key, name in known.items() if key not in _NOT_SETTINGS}
    defaults = {}
    for key, value in read(path).items():
        plain_key = key.replace("-", "_")
        if plain_key == TABLES and context.command.name == "compare" and isinstance(value, dict):
            context.meta[plain_key] = value
            continue
        if plain_key in _NOT_SETTINGS:
            raise ArgumentError(f"config={str(path)!r}: {key!r} belongs to the command line, not into the file")
        if plain_key not in known:
            near = nearest(plain_key, known)
            hint = f"did you mean {near!r}?" if near else f"known keys are {', '.join(sorted(known))}"
            raise ArgumentError(f"config={str(path)!r}: has the unknown key {key!r}; {hint}")
        if isinstance(value, dict) and plain_key != "clipping_groups":
            raise ArgumentError(
                f"config={str(path)!r}: {key!r} is a table; settings stand at the top level, without tables"
            )
        defaults[known[plain_key]] = value
    context.default_map = defaults
    return path
