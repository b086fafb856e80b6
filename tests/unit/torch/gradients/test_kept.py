"""Tables that a model's code makes once, in caches of its own and of libraries."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.methods import dp_sgd
from dpcore.torch import PrivateRun, make_private

LIBRARY = """
import functools
import torch

KEPT = {}

@functools.lru_cache(maxsize=8)
def _cached(size):
    return {"table": (torch.arange(size) / size).sin()}

def cached(size):
    return _cached(size)

@functools.lru_cache(maxsize=8)
def unrelated(size):
    return torch.ones(size)

class Tables:
    @staticmethod
    @functools.cache
    def _of(size):
        return (torch.arange(size) / size).sin()

    @classmethod
    def of(cls, size):
        return cls._of(size)

def kept(size):
    if size not in KEPT:
        KEPT[size] = (torch.arange(size) / size).sin()
    return KEPT[size]
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A package that is installed, into which the walk over what a model holds does not look."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "tables_of_a_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(folder)
    yield importlib.import_module("tables_of_a_library")
    del sys.modules["tables_of_a_library"]


class Shifted(nn.Module):
    def __init__(self, table: Any) -> None:
        super().__init__()
        self.layer, self.tables = nn.Linear(5, 3), {0: table}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.tables[0](x.shape[1])
        return self.layer(x + (found["table"] if isinstance(found, dict) else found))


DATA = torch.randn(24, 5), torch.arange(24) % 3


def started(model: nn.Module, data: Any = DATA) -> PrivateRun:
    method = dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=6)
    return make_private(model, data, method, steps=20, sampling="fixed_order", gradients="pairs")


def trained_and_evaluated(run: PrivateRun, inputs: Any) -> None:
    """Take steps past the call at which the model is captured again, with an evaluation before it."""
    run.model.train()
    for _ in range(4):
        for batch in run.loader:
            run.step(batch)
        run.model.eval()
        with torch.no_grad():
            assert isinstance(float(run.model(inputs).sum()), float)
        run.model.train()
    assert run.steps_taken == 16


@pytest.mark.parametrize("before", [False, True])
def test_a_table_in_a_cache_of_functools(library: ModuleType, before: bool) -> None:
    kept = library.unrelated(3)
    for table in (library.cached, library.Tables.of):
        model = Shifted(table)
        if before:
            model(DATA[0])
        trained_and_evaluated(started(model), DATA[0])
    assert library.unrelated(3) is kept


def test_a_table_in_the_models_own_dict() -> None:
    class Own(Shifted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] not in self.tables:
                self.tables[x.shape[1]] = torch.arange(x.shape[1]) / 5
            return self.layer(x + self.tables[x.shape[1]])

    trained_and_evaluated(started(Own(None)), DATA[0])


def test_another_table_is_another_model(library: ModuleType) -> None:
    model = Shifted(library.kept)
    model(DATA[0])
    run = started(model)
    batches = (batch for _ in range(4) for batch in run.loader)
    for _ in range(15):
        run.step(next(batches))
    library.KEPT[5] = library.KEPT[5] + 1e-6
    with pytest.raises(ArgumentError, match="computes something else than when it was last looked at"):
        run.step(next(batches))


def test_a_table_where_it_cannot_be_taken_out_is_refused_and_one_with_values_is_not(library: ModuleType) -> None:
    model = Shifted(library.kept)
    with pytest.raises(ArgumentError, match=r"keeps a tensor .*tables_of_a_library\.py, line \d+, in kept\)"):
        started(model)
    library.KEPT.clear()
    model(DATA[0])
    trained_and_evaluated(started(model), DATA[0])


def test_no_tensor_of_a_capture_is_left_when_there_is_no_proof(library: ModuleType) -> None:
    class Decides(Shifted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            return h if h.sum() < 1e9 else -h

    with pytest.warns(match="takes 'one-by-one'"):
        run = make_private(
            Decides(library.cached), DATA, dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=6), steps=20,
            sampling="fixed_order",
        )  # fmt: skip
    trained_and_evaluated(run, DATA[0])
