"""``dpcore train``: one model, one method, one guarantee."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli.options import Json, flag, takes
from dpcore.cli.train import config_file
from dpcore.cli.train import resume as resumed
from dpcore.cli.train.run import run
from dpcore.cli.train.settings import PRIVACY, RUN, Settings, settings_from

Ledger = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Pay for every step from this ledger, and stop before its budget is crossed (dpcore ledger create).",
        rich_help_panel=PRIVACY,
    ),
]


@takes(Settings)
def train(
    context: typer.Context,
    ledger: Ledger = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Run folder; runs/DATA-MODEL-METHOD if not given.",
        rich_help_panel=RUN)] = None,
    overwrite: Annotated[bool, flag("--overwrite", "Replace the run in that folder.", RUN)] = False,
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=config_file.use, metavar="FILE",  # noqa: ARG001 (its callback reads it)
        help="Settings from a .toml file, or from a run's config.json; options win.", rich_help_panel=RUN)] = None,
    resume: Annotated[Path | None, typer.Option(is_eager=True, callback=resumed.use, metavar="FOLDER",
        help="Go on with the run in this folder, which a ledger pays for, from its checkpoint.",
        rich_help_panel=RUN)] = None,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Train a model with a stated privacy guarantee."""
    if resume is not None:
        resumed.check(context, resume)
    settings = settings_from(given)
    if resume is not None:
        return resumed.resume(settings, resume, as_json, ledger)
    return run(settings, out, overwrite, as_json, ledger)
