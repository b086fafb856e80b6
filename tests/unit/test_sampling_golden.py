"""Pinned index sets: a run that is resumed next year must meet the same batches (design: the stream is a contract)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from dpcore.sampling import FixedOrderSampler, FixedSizeSampler, PoissonSampler

KINDS = {"poisson": PoissonSampler, "fixed_size": FixedSizeSampler, "fixed_order": FixedOrderSampler}
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "sampling.json").read_text())


@pytest.mark.parametrize("row", GOLDEN, ids=lambda row: f"{row['sampler']}-{row['step']}-{row['key'][:4]}")
def test_index_sets(row: dict[str, object]) -> None:
    sampler = KINDS[str(row["sampler"])](**row["settings"])  # type: ignore[arg-type]
    batch = sampler.indices(bytes.fromhex(str(row["key"])), row["step"])  # type: ignore[arg-type]
    assert batch[:8].tolist() == row["first"]
    assert batch.size == row["size"]
    assert hashlib.sha256(batch.astype("<i8").tobytes()).hexdigest() == row["sha256"]
    assert batch.dtype == np.int64
