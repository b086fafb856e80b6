"""Checks of an event whose sampler is known by name only."""

from __future__ import annotations

from dpcore.accounting import Adjacency, Event, Gaussian, MatrixGaussian, NonPrivate
from dpcore.accounting.phases import parts_of
from dpcore.sampling import FixedBatches
from dpcore.statement.statement import Statement
from dpcore.statement.verify.finding import FAILED, SAME, TRUSTED, Finding, same

LISTED = FixedBatches.kind
"""The one sampler of the library whose description does not hold what it does: of its batches there is a digest."""


def by_parts(label: str, event: Event, statement: Statement, steps: int) -> Finding:
    """Compare every part of an event with the settings; how often an example takes part remains to be trusted."""
    parts = [(part, times) for part, times in parts_of(event) if times]
    if steps and not parts:
        return Finding(label, FAILED, f"releases nothing, and {steps:,} steps were taken or planned")
    problems = [_common(part, statement) for part, _ in parts] + [_steps(parts, statement, steps)]
    problem = next((problem for problem in problems if problem is not None), None)
    if problem is not None:
        return Finding(label, FAILED, problem)
    return Finding(label, TRUSTED, f"with noise and steps as stated, that this is what happens: {_briefly(parts)}")


def _common(part: Event, statement: Statement) -> str | None:
    sigma, sampler = statement.noise["noise_multiplier"], statement.sampler
    # Under replacement an example moves a sum twice as far, and multipliers are relative to that.
    expected = sigma / 2 if part.adjacency is Adjacency.REPLACE_ONE else sigma
    if not same(getattr(part, "noise_multiplier", expected), expected):
        return f"has another noise multiplier than the noise, {sigma!r}"
    for name in ("dataset_size", "sample_rate", "max_batch_size"):  # whatever else the sampler does
        if name in sampler and not same(getattr(part, name, sampler[name]), sampler[name]):
            return f"has another {name} than the sampler, {sampler[name]!r}"
    if sampler.get("sampler") != LISTED or isinstance(part, NonPrivate):
        return None
    if not isinstance(part, (Gaussian, MatrixGaussian)):
        return f"is sampled, {type(part).__name__}, and a list of batches is not"
    return None if part.adjacency == statement.adjacency else f"is of another adjacency, {part.adjacency}, in part"


def _steps(parts: list[tuple[Event, int]], statement: Statement, steps: int) -> str | None:
    """What is wrong with how many steps the parts have, and with how often or how far an example moves them."""
    if not parts:
        return None
    first, times = parts[0]
    most = steps + statement.steps_abandoned  # where every step draws anew, abandoned ones are steps like the others
    if isinstance(first, MatrixGaussian):  # the other is that of the branches
        parts, most = parts[:1], steps
    counted = sum(part.steps * count for part, count in parts if hasattr(part, "steps"))
    uncounted = any(not hasattr(part, "steps") for part, _ in parts)
    if counted not in (steps, most) and not (uncounted and counted <= most):
        return f"has {counted!r} steps, and {steps!r} were taken or planned"
    if isinstance(first, MatrixGaussian):
        whole = statement.noise["sensitivity_of_run"]
        least = whole * (1 - SAME) if steps == statement.steps_planned else 0.0
        if not least <= first.sensitivity <= whole * (1 + SAME):
            return f"has the sensitivity {first.sensitivity!r}, and that of the whole run is {whole!r}"
    if isinstance(first, Gaussian) and statement.sampler.get("sampler") == LISTED:
        # An example of a batch that is not empty takes part once in every cycle, and once in a step at most.
        possible = steps // statement.sampler["steps_per_epoch"] <= first.count * times <= steps
        often = "once" if first.count * times == 1 else f"{first.count * times} times"
        return None if possible else f"counts an example {often} in {steps:,} steps"
    return None


def _briefly(parts: list[tuple[Event, int]]) -> str:
    if not parts:
        return "nothing"
    said = parts[0][0].to_dict()
    words = ", ".join(f"{name} {said[name]}" for name in ("sample_rate", "count", "sensitivity") if name in said)
    return f"{said['event']}({words})" + (f" and {len(parts) - 1:,} more" if parts[1:] else "")
