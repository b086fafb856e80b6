"""Clipping at 10 million coordinates under Triton; `tests/unit/stages/test_clip.py` has the reference."""

from __future__ import annotations

import math
import os
import sys

import numpy as np
import pytest

from dpcore.spec.backends import load_backend
from dpcore.spec.contributions import rounding_of_rows

pytest.importorskip("triton")


def test_ten_million_entries_never_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = load_backend("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        # The interpreter pays for each program and for masked rows: one long row in few programs.
        for name in ("dpcore_triton.row_norms", "dpcore_triton.clip"):
            monkeypatch.setattr(sys.modules[name], "ROWS", 1)
            monkeypatch.setattr(sys.modules[name], "COLUMNS", 1 << 17)
    row = np.full((1, 10_000_000), 0.1, np.float32)
    row[0, ::7] = 1e-3
    exact = math.sqrt(math.fsum(np.square(row[0].astype(np.float64)).tolist()))
    rows = backend.from_numpy(row)
    norms = backend.row_norms([rows])
    assert float(backend.to_numpy(norms)[0]) == pytest.approx(exact, rel=1e-9)
    size, unit = row.shape[1], 2.0**-36
    weights = backend.clip_factors([norms], "standard", [1.0], [size], [rounding_of_rows(size)], unit)
    total = backend.from_numpy(np.zeros(size))
    backend.weighted_sum([rows], weights, [total])
    clipped = math.sqrt(math.fsum(np.square(unit * backend.to_numpy(total)).tolist()))
    assert 1 - 1e-5 < clipped <= 1
