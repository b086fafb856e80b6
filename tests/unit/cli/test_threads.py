"""Small models run in one thread, unless a person has chosen."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("typer")

from dpcore.cli.train import training as trained
from tests.unit.cli.test_divergence import training


@pytest.mark.parametrize(("chosen", "limit", "inside"), [(None, 1 << 24, 1), (None, 10, 3), ("3", 1 << 24, 3)])
def test_a_small_model_runs_in_one_thread(
    chosen: str | None, limit: int, inside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = training()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    monkeypatch.setattr(trained, "_SMALL", limit)
    former = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with trained.suited(run):
            assert torch.get_num_threads() == inside
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(former)
