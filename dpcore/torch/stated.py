"""The statement of a torch run: with torch's version, its date, and notes on what the plan does not tell."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import torch

from dpcore.mechanism.loop import PRIVATE_DIAGNOSTICS
from dpcore.mechanism.mechanism import Mechanism
from dpcore.statement.statement import Statement
from dpcore.statement.text import counted, format_epsilon

if TYPE_CHECKING:
    from dpcore.torch.run import PrivateRun


def stated(
    run: PrivateRun, mechanism: Mechanism, delta: float, caveats: tuple[str, ...], diagnostics: bool, note: str
) -> Statement:
    """Return the privacy statement for all that was released so far."""
    taken = (PRIVATE_DIAGNOSTICS,) if diagnostics else ()
    notes = " ".join(part for part in (note, _stop(run, delta), _rates(run)) if part)
    software: dict[str, str] = {"torch": torch.__version__}
    statement = mechanism.statement(delta, caveats=(*caveats, *taken), note=notes, software=software)
    return replace(statement, date=datetime.now(UTC).date().isoformat())


def _rates(run: PrivateRun) -> str:
    """Say which learning rates are in force, where they are no longer the method's, which the statement lists."""
    present = sorted({float(group["lr"]) for group in run.optimizer.param_groups})
    if present == [run.plan.method.update.settings().learning_rate]:
        return ""
    return (
        "The learning rate was set beside the method, by groups, a scheduler or a loaded state: at last "
        f"{' and '.join(f'{rate:.6g}' for rate in present)}. The guarantee does not depend on it."
    )


def _stop(run: PrivateRun, delta: float) -> str:
    """Say which epsilon holds after a stop that results decided.

    The epsilon of a number of steps is that of a number fixed beforehand. Where it follows from what was released, what
    is known in the end is a function of the releases of the whole plan: those up to the stop decide it, and the rest is
    left out. So the epsilon of the plan holds.
    """
    if not run.stopped_by_results or run.steps_taken >= run.plan.steps:
        return ""
    return (
        f"Results decided to stop after {run.steps_taken:,} of {counted(run.plan.steps, 'planned step')}: the epsilon "
        f"that holds then is that of all planned steps, {format_epsilon(run.epsilon(delta, planned=True))}, and not "
        "that of the steps taken, which is of a number fixed beforehand."
    )
