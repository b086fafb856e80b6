"""`dpcore train` under torchrun: all processes train, the first tells of it and writes the run folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dpcore.cli.datasets import Dataset
from dpcore.cli.interrupt import deferred
from dpcore.cli.train.settings import Settings
from dpcore.errors import ArgumentError


def check_alone(ledger: Path | None) -> None:
    """Refuse a ledger where torchrun started several processes."""
    if ledger is not None and _started():
        raise ArgumentError(
            f"--ledger {ledger} under torchrun: must be left out, since the command saves no checkpoints of several "
            "processes; dpcore.torch.make_private(ledger=) takes one"
        )


def _started() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in os.environ


@contextmanager
def joined(settings: Settings) -> Iterator[int]:
    """Join the other processes that torchrun started, for the length of the block; gives this one's rank.

    Without torchrun this process is alone, of rank 0.
    """
    if not _started():
        yield 0
        return
    import torch
    import torch.distributed as dist

    if settings.backend == "triton" and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl")
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()


def follow(settings: Settings, dataset: Dataset) -> int:
    """Train beside the first process, without a word; return the exit status."""
    from dpcore.cli.train.threads import suited
    from dpcore.cli.train.training import Training

    training = Training(settings, dataset)
    training.private.begin()
    with deferred() as interruption, suited(training):
        outcome = training.run([], interruption, halt=True)
    return 0 if outcome.diverged or outcome.steps_taken == outcome.statement.steps_planned else interruption.status
