"""What processes make of their sums: integers, added exactly."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcore_torch as backend
from dpcore.spec.layout import Layout
from dpcore.torch import processes
from dpcore.torch.processes import Processes
from tests.end_to_end.test_processes import in_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

WORLD = 3
LAYOUT = Layout.of([("a", (7, 5)), ("b", (4,)), ("c", (1,))])


def summed(rank: int, folder: Path) -> None:
    processes._MESSAGE = 12  # several messages, the last one shorter
    peers = Processes(torch.distributed.group.WORLD)
    totals = peers.totals([torch.zeros(entry.size) for entry in LAYOUT.entries], backend)
    every = np.rint(np.random.default_rng(5).standard_normal((WORLD, LAYOUT.dimension)) * 2.0**45)
    ends = np.cumsum([35, 4])
    for total, part in zip(totals, np.split(every[rank], ends), strict=True):
        total[...] = torch.from_numpy(part)
    pieces = LAYOUT.pieces(rank, WORLD)
    parts = peers.reduced(totals, pieces)
    true = np.split(every.astype(np.int64).sum(0), ends)
    for part, (i, start, stop) in zip(parts, pieces, strict=True):
        assert part.tolist() == true[i][start:stop].tolist()


def test_sums_of_processes_are_exact(tmp_path: Path):
    in_processes(WORLD, summed, tmp_path)


def test_the_table_of_the_page_is_what_the_script_prints(monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "asv_benchmarks"))
    import processes_on_paper

    assert processes_on_paper.table() in (root / "docs/processes.md").read_text()
    # What test_what_a_step_sends counts of a real step: 8 bytes of sums and 4 of parameters of all others' coordinates.
    assert processes_on_paper.row(3e9, 3)[0] == pytest.approx(12 * 2)
