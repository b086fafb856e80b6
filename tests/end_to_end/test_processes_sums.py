"""What processes make of their sums: float32 messages, added in float64, within a bound that is stated."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dpcore_torch as backend
from dpcore.spec.layout import Layout
from dpcore.spec.rounding import ROUNDING_SENT, message_rounding
from dpcore.torch import processes
from dpcore.torch.processes import CAVEAT, Processes, caveats_of
from tests.end_to_end.test_processes import in_processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

WORLD = 3
LAYOUT = Layout.of([("a", (7, 5)), ("b", (4,)), ("c", (1,))])


def summed(rank: int, folder: Path) -> None:
    processes._MESSAGE = 12  # several messages, the last one shorter
    for terms, contribution, dtype in (
        (1000, 1.0, torch.float32), (1000, 3e-42, torch.float32), (1000, 3e36, torch.float32),
        (10_000, 1.0, torch.float32), (1000, 1.0, torch.float64),
    ):  # fmt: skip
        peers = Processes(torch.distributed.group.WORLD)
        vectors = [torch.zeros(entry.size, dtype=dtype) for entry in LAYOUT.entries]
        totals = peers.totals(vectors, backend, terms)
        # Lengths of a third of the most examples; the directions differ.
        every = np.random.default_rng(5).standard_normal((WORLD, LAYOUT.dimension))
        every *= contribution * terms / WORLD / np.linalg.norm(every, axis=1, keepdims=True)
        for total, part in zip(totals, np.split(every[rank], np.cumsum([35, 4])), strict=True):
            total[...] = torch.from_numpy(part)
        pieces = LAYOUT.pieces(rank, WORLD)
        parts = peers.reduced(totals, pieces, contribution)
        true = np.split(every.sum(0), np.cumsum([35, 4]))
        error = max(
            float(np.abs(part.numpy() - true[i][start:stop]).max())
            for part, (i, start, stop) in zip(parts, pieces, strict=True)
        )
        narrow = terms < 10_000 and dtype == torch.float32
        assert peers.rounding == (message_rounding(terms) if narrow else 0.0)
        if narrow:
            assert 0 < error <= message_rounding(terms) / 2 * contribution
            told = caveats_of(peers)
            assert told[0] == CAVEAT
            assert "1.2e-04 of the clip norm more" in told[1]
        else:
            assert error <= 1e-12 * terms
            assert caveats_of(peers) == (CAVEAT,)
    peers = Processes(torch.distributed.group.WORLD)
    totals = peers.totals([torch.zeros(entry.size) for entry in LAYOUT.entries], backend, 8)
    for total in totals:
        total.fill_(2.0 ** (-20 * rank))  # exact in float32, their sum is not
    for part in peers.reduced(totals, LAYOUT.pieces(rank, WORLD), 1.0):
        assert (part == 1 + 2.0**-20 + 2.0**-40).all()


def test_messages_round_as_stated(tmp_path: Path):
    in_processes(WORLD, summed, tmp_path)


def test_messages_never_round_what_counts():
    # The most examples whose sums are sent in float32, and one more.
    most = int(ROUNDING_SENT * 2**23)
    assert message_rounding(most) <= ROUNDING_SENT < message_rounding(most + 1)


def test_one_example_moves_rounded_sums_by_no_more_than_the_bound():
    rng = np.random.default_rng(0)
    count, dimension = 200, 50
    vectors = rng.standard_normal((count, dimension))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[: count // 2] = np.abs(vectors[0])  # a long sum, so that rounding is at its worst

    def sent(rows: np.ndarray) -> np.ndarray:
        return sum(part.sum(0).astype(np.float32).astype(np.float64) for part in np.array_split(rows, 4))

    moved = [np.linalg.norm(sent(vectors) - sent(np.delete(vectors, i, 0))) for i in range(count)]
    assert max(moved) <= 1 + message_rounding(count)
    assert max(moved) > 1 + 1e-9  # float64 alone would not do this


def test_the_table_of_the_page_is_what_the_script_prints(monkeypatch: pytest.MonkeyPatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "asv_benchmarks"))
    import processes_on_paper

    assert processes_on_paper.table() in (root / "docs/processes.md").read_text()
    # What test_what_a_step_sends counts of a real step: 4 bytes of sums and 4 of parameters of all others' coordinates.
    assert processes_on_paper.row(3e9, 3)[0] == pytest.approx(8 * 2)
