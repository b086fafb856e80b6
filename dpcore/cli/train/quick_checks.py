"""The checks of a run that need no torch: made first, before anything is created and before torch takes its seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dpcore import sampling
from dpcore.cli.datasets import Dataset
from dpcore.cli.train.settings import Settings
from dpcore.errors import DpcoreError
from dpcore.plan.plan import Plan
from dpcore.spec.extras import needs
from dpcore.statement.text import counted, format_number


def check_run(settings: Settings, dataset: Dataset, ledger: Path | None) -> Plan:
    """Refuse what is known to fail; return the plan, in which a noise multiplier may still be open."""
    check_beside(settings, ledger)
    return plan_of(settings, len(dataset))


def check_beside(settings: Settings, ledger: Path | None) -> None:
    """Refuse a ledger that cannot be used, and a package that is not there."""
    if settings.tensorboard and find_spec("tensorboard") is None:
        raise DpcoreError(needs("tensorboard=True", "tensorboard"))
    if ledger is not None:
        from dpcore.ledger import Ledger

        Ledger.open(ledger)


def plan_of(settings: Settings, examples: int) -> Plan:
    """Return the plan of a run on so many examples."""
    method = settings.build_method(examples)
    sampler = sampling.sampler(
        str(settings.sampling),
        dataset_size=examples,
        batch_size=method.batch_size,
        max_batch_size=settings.max_batch_size,
        groups=settings.groups,
    )
    steps = settings.epochs * sampler.steps_per_epoch
    return Plan(method, sampler, steps)


def first_line(settings: Settings, dataset: Dataset, plan: Plan) -> str:
    """Say what is about to be trained."""
    if settings.epsilon is not None:
        noise = f"noise for epsilon = {format_number(settings.epsilon)} at delta = {format_number(settings.delta)}"
    else:
        noise = f"noise multiplier {format_number(settings.noise_multiplier or 0.0)}"
    return (
        f"Training {settings.model} on {dataset.name} by {settings.method}: {counted(len(dataset), 'example')}, "
        f"{counted(plan.steps, 'step')}, {noise}"
    )
