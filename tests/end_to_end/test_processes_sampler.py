"""`private.sampler` in several processes: a loader of one's own reads each one's share, and nothing else is taken."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpcore.errors import PrivacyError
from dpcore.ledger import Ledger
from dpcore.methods import disk, dp_sgd
from dpcore.torch.data.loader import DrawnBatch
from tests.end_to_end.test_processes import COMMON, in_processes
from tests.unit.torch_runs import DATA, finish, model, start, values

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the tests start processes as Linux does")

METHODS = {"dp_sgd": dp_sgd, "disk": disk}


def begin(name: str, **options: Any) -> Any:
    return start(model(), METHODS[name](**COMMON), data=TensorDataset(*DATA), **options)


def loader_of(run: Any, workers: int = 0) -> DataLoader[Any]:
    sampler = run.sampler
    more: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    return DataLoader(sampler.dataset, batch_sampler=sampler, collate_fn=sampler.collate, num_workers=workers, **more)


def to_the_end(run: Any, workers: int = 0) -> None:
    loader = loader_of(run, workers)
    while run.steps_taken < run.plan.steps:
        for batch in loader:
            run.step(batch)


def shares(rank: int, folder: Path) -> None:
    """Train by a loader of one's own, with and without workers that read ahead."""
    for name, workers in (("dp_sgd", 0), ("dp_sgd", 2), ("disk", 0)):
        run = begin(name)
        to_the_end(run, workers)
        if rank == 0:
            torch.save(values(run.model), folder / f"{name}-{workers}.pt")
    run = begin("dp_sgd")
    torch.save([list(places) for places in run.sampler], folder / f"places-{rank}.pt")
    ledger = folder / "people.ledger"
    if rank == 0:
        Ledger.create(ledger)
    torch.distributed.barrier()
    run = begin("dp_sgd", ledger=ledger, data_id="people")
    to_the_end(run)
    if rank == 0:
        torch.save(values(run.model), folder / "ledger.pt")
    run.close()


def others(rank: int, folder: Path) -> None:
    """Refuse, in all processes and with a sentence, what a host made of the shares."""
    run = begin("dp_sgd", sampling="fixed-order")
    right = next(iter(loader_of(run)))

    def refused_by_one(batch: Any) -> None:
        words = "holds other examples than this step draws" if rank == 1 else "rank 1"
        with pytest.raises(PrivacyError, match=words):
            run.step(batch)
        assert run.steps_taken == 0

    # As a loader gives it whose indices another library shared out again.
    halves = DrawnBatch(tuple(tensor[::2] for tensor in right.batch), right.places[::2])
    refused_by_one(halves if rank == 1 else right)
    # The share of another process.
    exchanged: list[Any] = [None, None]
    torch.distributed.all_gather_object(exchanged, right)
    refused_by_one(DrawnBatch(*exchanged[0]) if rank == 1 else right)
    with pytest.raises(PrivacyError, match="holds other examples than this step draws"):
        run.step(DrawnBatch(*exchanged[1 - rank]))
    assert run.steps_taken == 0
    run.step(right)  # the right one still can be taken
    assert run.steps_taken == 1
    to_the_end(run)


def test_a_loader_of_ones_own_trains_what_one_process_trains(tmp_path: Path):
    in_processes(2, shares, tmp_path)
    for name in METHODS:
        wanted = finish(begin(name))
        for file in (*tmp_path.glob(f"{name}-*.pt"), *(tmp_path.glob("ledger.pt") if name == "dp_sgd" else ())):
            torch.testing.assert_close(torch.load(file), wanted, rtol=1e-5, atol=1e-6)
    both = [torch.load(tmp_path / f"places-{rank}.pt") for rank in range(2)]
    alone = [list(places) for places in begin("dp_sgd").sampler]
    assert [first + second for first, second in zip(*both, strict=True)] == alone
    assert len(list(tmp_path.glob("*.pt"))) == 6


def test_what_is_not_this_processs_share_is_refused_in_all(tmp_path: Path):
    in_processes(2, others, tmp_path)
