"""The few lines that ``repr`` of a private run shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpcore.mechanism.mechanism import Mechanism
from dpcore.statement.text import format_epsilon, format_number

if TYPE_CHECKING:
    from dpcore.torch.run import PrivateRun


def described(run: PrivateRun, mechanism: Mechanism, delta: float | None) -> str:
    """Return what is trained by which method, what was spent of what is planned, and where: all of it public."""
    plan, peers = mechanism.plan, mechanism.peers
    parameters, sampler = mechanism.layout.dimension, plan.sampler
    lines = {
        "model": f"{type(run.model).__name__}, {parameters:,} trained parameters",
        "method": f"{plan.method.name}, noise multiplier {format_number(round(plan.noise_multiplier, 4))}",
        "epsilon": _epsilon(run, delta),
        "steps": f"{mechanism.step:,} of {plan.steps:,} done",
        "sampling": f"{type(sampler).__name__}, batches of {plan.batch_size:,g} of {sampler.dataset_size:,} expected",
        "backend": f"{mechanism.backend.name}, {peers.world_size} process{'es' * (peers.world_size > 1)}",
    }
    return "\n".join(["PrivateRun(", *(f"  {name}: {words}" for name, words in lines.items()), ")"])


def _epsilon(run: PrivateRun, delta: float | None) -> str:
    if delta is None:
        return "private.epsilon(delta) says it; no target_delta was given"
    planned = run.plan.epsilon(delta)
    spent, whole = format_epsilon(run.epsilon(delta)), format_epsilon(planned)
    return f"{spent} spent of {whole} planned, at delta {format_number(delta)}"
