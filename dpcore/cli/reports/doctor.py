"""``dpcore doctor``: checks of a user's own run before it trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from dpcore.cli.options import Json, flag, option, takes
from dpcore.cli.output import write_answer
from dpcore.cli.reports.own_run import own_run
from dpcore.cli.train.settings import SETTINGS, Settings, settings_from
from dpcore.cli.values import real

Place = Annotated[str | None, typer.Argument(metavar="FILE[:FUNCTION]", show_default=False,
    help="A script that calls make_private, or a function that returns model, data, method and loss.")]  # fmt: skip
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False,
    help="What the script finds in sys.argv; after -- if they begin with a dash.")]  # fmt: skip
Confidence = Annotated[float, option(real, "P", "Of the audit: 1 minus the probability of a false alarm.")]
Seconds = Annotated[float, option(real, "SECONDS", "At most about so many.")]

_OWN = ("data", "data_dir", "model", "seed", "epsilon", "delta", "noise_multiplier", "max_grad_norm", "clipping",
        "clipping_groups", "sampling", "max_batch_size", "groups", "method", "epochs", "batch_size", "lr")  # fmt: skip


@takes(Settings, without=[name for name in SETTINGS if name not in _OWN])
def doctor(
    place: Place = None,
    arguments: Arguments = None,
    no_audit: Annotated[bool, flag("--no-audit", "Leave the audit out: it takes most of the time.")] = False,
    confidence: Confidence = 0.99,
    seconds: Seconds = 60.0,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Examine a model, its data, a loss and a method before they train; status 1 where there is a fault."""
    with asked_run(place, arguments, given) as run:
        from dpcore.torch import doctor as examined

        found = examined(**run, audit=not no_audit, confidence=confidence, seconds=seconds)
    write_answer(as_json, found.to_dict(), str(found))
    return 0 if found.ok else 1


@contextmanager
def asked_run(place: str | None, arguments: list[str] | None, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give the keywords of the run that was asked for: the user's own, or one of ``dpcore train``."""
    if place is not None:
        with own_run(place, arguments or ()) as run:
            yield run
        return
    from dpcore.cli.datasets import load
    from dpcore.cli.train.training import arguments_of
    from dpcore.spec import backends

    settings = settings_from(given)
    dataset = load(settings.data, settings.data_dir)
    settings = settings.resolved(len(dataset))
    model, keywords = arguments_of(settings, dataset)
    with backends.use_backend(settings.backend):
        yield {"model": model, **keywords}
