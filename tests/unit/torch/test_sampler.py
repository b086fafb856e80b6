"""A loader of the host's own: it gets indices, and a step takes what holds exactly the examples that it draws."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.torch.data.loader import DrawnBatch
from tests.refused import refused
from tests.unit.torch.models import Rows
from tests.unit.torch_runs import DATA, finish, load, model, saved, sgd, start, values


def named(index: int, x: torch.Tensor, y: int) -> dict[str, Any]:
    return {"input": x, "label": y}


def pairs(rows: list[dict[str, Any]]) -> Any:
    return torch.stack([row["input"] for row in rows]), torch.tensor([row["label"] for row in rows])


def own(run: Any, **more: Any) -> DataLoader[Any]:
    return DataLoader(run.sampler.dataset, batch_sampler=run.sampler, collate_fn=run.sampler.collate, **more)


KINDS: dict[str, dict[str, Any]] = {
    "tensors": {"data": DATA},
    "dataset": {"data": TensorDataset(*DATA)},
    "collated": {"data": Rows(named), "collate_fn": pairs},
    "views": {"data": Rows(named), "collate_fn": pairs, "augmentations": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_the_run_is_that_of_its_own_loader(kind: str, workers: int) -> None:
    if workers and kind not in ("tensors", "collated"):
        pytest.skip("one of each way of reading is enough with processes")
    wanted = finish(start(model(), **KINDS[kind]))
    run = start(model(), **KINDS[kind])
    while run.steps_taken < run.plan.steps:
        for batch in own(run, num_workers=workers):
            run.step(batch)
    assert torch.equal(values(run.model), wanted)
    refused(PrivacyError, "steps have been taken", list, run.sampler)
    refused(PrivacyError, "steps have been taken", run.step, batch)


def test_empty_batches_are_steps() -> None:
    run = start(model(), sgd(batch_size=0.001), data=TensorDataset(*DATA), steps=2, epochs=None)
    (batch,) = (batch for _, batch in zip(range(1), own(run), strict=False))
    assert batch.batch[0].shape == (0, 5)
    assert batch.batch[1].dtype == torch.int64
    run.step(batch)
    assert run.steps_taken == 1


def changed(batch: DrawnBatch) -> dict[str, Any]:
    """What a host may have made of a batch, and must not."""
    (inputs, labels), places = batch
    half = len(places) // 2
    return {
        "split": DrawnBatch((inputs[:half], labels[:half]), places[:half]),
        "shuffled": DrawnBatch((inputs.flip(0), labels.flip(0)), places.flip(0)),
        "repeated": DrawnBatch((torch.cat([inputs] * 2), torch.cat([labels] * 2)), torch.cat([places] * 2)),
        "of others": DrawnBatch((inputs, labels), (places + 1) % 30),
        "lost rows": DrawnBatch((inputs[:half], labels[:half]), places),
        "lost places": (inputs, labels),
        "no places": DrawnBatch((inputs, labels), None),  # type: ignore[arg-type]
    }


@pytest.mark.parametrize("how", changed(DrawnBatch(DATA, torch.arange(30))))
def test_a_changed_batch_is_refused_and_the_drawn_one_is_still_taken(how: str) -> None:
    run = start(model())
    batch = next(batch for batch in own(run) if len(batch.places) > 1)
    before = values(run.model)
    with pytest.raises(PrivacyError):
        run.step(changed(batch)[how])
    assert run.steps_taken == 0
    assert torch.equal(values(run.model), before)
    run.step(batch)
    refused(PrivacyError, "other examples", run.step, batch)  # a second time


def test_values_may_be_changed_example_by_example() -> None:
    run = start(model())
    batch = next(iter(own(run)))
    run.step(batch._replace(batch=(batch.batch[0] * 2, batch.batch[1])))
    assert run.steps_taken == 1


def test_a_batch_of_before_a_load_is_refused() -> None:
    run = start(model())
    before = next(iter(own(run)))
    load(run, saved(run), True)  # forks: batches are drawn anew
    refused(PrivacyError, "other examples", run.step, before)
    run.step(next(iter(own(run))))


def test_reading_ahead_ends_where_the_ledger_has_not_paid(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "l.ledger", budget=(50.0, 1e-5))
    run = start(model(), ledger=tmp_path / "l.ledger", epochs=None, steps=500)
    ahead = iter(run.sampler)
    with pytest.raises(PrivacyError, match="further ahead than the ledger has paid for"):
        list(ahead)
    for batch in own(run):  # one at a time
        run.step(batch)
    assert run.steps_taken == len(run.sampler)
    late = iter(run.sampler)
    next(late)
    run.step(next(iter(run.loader)))
    run.step(next(iter(run.loader)))
    refused(PrivacyError, "iterate over it anew", next, late)


def test_what_is_pickled_has_no_keys() -> None:
    run = start(model(), data=Rows(named), collate_fn=pairs)
    refused(PrivacyError, "not pickled", pickle.dumps, run.sampler)
    dataset, collate = pickle.loads(pickle.dumps((run.sampler.dataset, run.sampler.collate)))  # noqa: S301
    assert collate([dataset[3], dataset[1]]).places.tolist() == [3, 1]


def test_padding_to_the_longest_is_refused_here_too() -> None:
    def longest(rows: list[Any]) -> Any:
        width = 5 + max(row["label"] for row in rows)
        return torch.stack([torch.nn.functional.pad(row["input"], (0, width - 5)) for row in rows])

    run = start(torch.nn.Sequential(torch.nn.AdaptiveAvgPool1d(5), model()), data=Rows(named), collate_fn=longest,
                loss=lambda output: output.sum())  # fmt: skip
    refused(ArgumentError, "pad every example to one fixed length", list, own(run))


@pytest.mark.filterwarnings("ignore")  # of packages that it pickles by
def test_a_hugging_face_dataset_in_a_loader_of_its_own() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"input": DATA[0].tolist(), "label": DATA[1].tolist()}).with_format("torch")
    run = start(model(), data=table, collate_fn=pairs)
    wanted = finish(start(model(), data=table, collate_fn=pairs), stop=2)
    for batch in own(run):
        run.step(batch)
        if run.steps_taken == 2:
            break
    assert torch.equal(values(run.model), wanted)
