"""Pinned index sets: a run that is resumed next year must meet the same batches (design: the stream is a contract)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpcore import sampling
from dpcore.sampling import PoissonSampler, Sampler, UserSampler


def users(*, users: int, batch_size: float, examples: int, max_examples_per_user: int) -> UserSampler:
    """A user for each of the first examples, and the others spread unevenly."""
    owners = [i * i % users if i >= users else i for i in range(examples)]
    return UserSampler(PoissonSampler(dataset_size=users, batch_size=batch_size), owners, max_examples_per_user)


KINDS: dict[str, Callable[..., Sampler]] = {
    "poisson": PoissonSampler, "truncated_poisson": sampling.TruncatedPoissonSampler,
    "cyclic_poisson": sampling.CyclicPoissonSampler, "fixed_size": sampling.FixedSizeSampler,
    "fixed_order": sampling.FixedOrderSampler, "shuffled": sampling.ShuffledSampler,
    "random_allocation": sampling.RandomAllocationSampler, "users poisson": users,
}  # fmt: skip
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sampling.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['sampler']}-{row['step']}-{row['key'][:4]}")
def test_index_sets(row: dict[str, object]) -> None:
    sampler = KINDS[str(row["sampler"])](**row["settings"])  # type: ignore[arg-type]
    batch = sampler.indices(bytes.fromhex(str(row["key"])), row["step"])  # type: ignore[arg-type]
    assert batch[:8].tolist() == row["first"]
    assert batch.size == row["size"]
    assert hashlib.sha256(batch.astype("<i8").tobytes()).hexdigest() == row["sha256"]
    assert batch.dtype == np.int64
