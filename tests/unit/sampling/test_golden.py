"""Pinned index sets: a run that is resumed next year must meet the same batches (design: the stream is a contract)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpcore.sampling import (
    CyclicPoissonSampler,
    FixedOrderSampler,
    FixedSizeSampler,
    PoissonSampler,
    Sampler,
    ShuffledSampler,
    TruncatedPoissonSampler,
    UserSampler,
)


def users(*, users: int, batch_size: float, examples: int, max_examples_per_user: int) -> UserSampler:
    """A user for each of the first examples, and the others spread unevenly."""
    owners = [i * i % users if i >= users else i for i in range(examples)]
    return UserSampler(PoissonSampler(dataset_size=users, batch_size=batch_size), owners, max_examples_per_user)


KINDS: dict[str, Callable[..., Sampler]] = {
    "poisson": PoissonSampler,
    "fixed_size": FixedSizeSampler,
    "fixed_order": FixedOrderSampler,
    "truncated_poisson": TruncatedPoissonSampler,
    "shuffled": ShuffledSampler,
    "cyclic_poisson": CyclicPoissonSampler,
    "users poisson": users,
}
GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "sampling.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['sampler']}-{row['step']}-{row['key'][:4]}")
def test_index_sets(row: dict[str, object]) -> None:
    sampler = KINDS[str(row["sampler"])](**row["settings"])  # type: ignore[arg-type]
    batch = sampler.indices(bytes.fromhex(str(row["key"])), row["step"])  # type: ignore[arg-type]
    assert batch[:8].tolist() == row["first"]
    assert batch.size == row["size"]
    assert hashlib.sha256(batch.astype("<i8").tobytes()).hexdigest() == row["sha256"]
    assert batch.dtype == np.int64
