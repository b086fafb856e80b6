"""Every command with its arguments and options, from the application itself."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

import typer

from dpcore.cli.app import COMMANDS, application


def commands() -> Iterator[tuple[str, Any]]:
    """All commands by their words, groups before what is in them."""
    root = typer.main.get_command(application(*COMMANDS))
    for name in COMMANDS:
        command = root.commands[name]
        yield f"dpcore {name}", command
        for inner, below in getattr(command, "commands", {}).items():
            yield f"dpcore {name} {inner}", below


def plain(words: str) -> str:
    """Help text as a cell: on one line, its markup and its signs shown as they are."""
    signs = (
        html.escape(" ".join(words.split()), quote=False).replace("|", r"\|").replace("*", r"\*").replace("$", r"\$")
    )
    return re.sub(r"(?<![\w`-])(--[a-z][\w-]*)", r"`\1`", signs)


def spelled(parameter: Any) -> str:
    """`--delta DELTA`, or the metavar of an argument."""
    metavar = (parameter.metavar or "").strip()
    if not parameter.opts[0].startswith("-"):
        return f"`{metavar or parameter.name.upper()}`"
    names = " / ".join([*parameter.opts, *parameter.secondary_opts])
    return f"`{names} {metavar}`" if metavar else f"`{names}`"


def default(parameter: Any) -> str:
    value = parameter.default
    if parameter.required:
        return "required"
    return "" if value is None or value is False or value == "" or callable(value) else f"`{value}`"


def options(command: Any) -> Iterator[str]:
    """The table of a command's options, one for each panel of its help."""
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False) and parameter.name != "help":
            panels.setdefault(parameter.rich_help_panel or "", []).append(parameter)
    for panel, parameters in panels.items():
        yield f"| {panel or 'Options'} | default | |\n| --- | --- | --- |"
        for parameter in parameters:
            yield f"| {spelled(parameter)} | {default(parameter)} | {plain(parameter.help or '')} |"
        yield ""


def markdown() -> str:
    lines: list[str] = []
    for words, command in commands():
        sentence = re.sub(r"\s*Example:\s.*", "", command.help or "", flags=re.DOTALL)
        example = re.sub(r"^Example:\s*", "", command.epilog or "").strip()
        mark = "###" if words.count(" ") > 1 else "##"
        lines += [f"{mark} `{words}`", "", plain(sentence), ""]
        lines += ["```text", example, "```", ""] if example else []
        lines += options(command) if not getattr(command, "commands", None) else []
    return "\n".join(lines)
