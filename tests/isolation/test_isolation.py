"""One example moves the sum of clipped gradients by no more than C, whatever the model; or the model is refused.

Each model of the tables goes through `make_private`. Examples of a batch are taken out and replaced. A change runs a
sample, at least one model of each group, at three places of the batch: where examples mix, the sum of the others stays
from none as it was. With ``DPCORE_ISOLATION=all``, or hypothesis' profile "nightly", all run, with ten seeds, at every
place.
"""

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch

from dpcore.stages.clipping.blocks import Rows
from dpcore.torch.data import batches
from dpcore.torch.gradients.per_example import OneByOne
from tests.depth import chosen
from tests.isolation import attention, layers, mixers, operations, training
from tests.isolation.models import BATCH, Case
from tests.isolation.moves import CRASHED, REFUSED, outcome, worst

ALL = chosen(False, True) or os.environ.get("DPCORE_ISOLATION") == "all"
SEEDS = range(10 if ALL else 1)
PLACES = range(BATCH) if ALL else (0, 5, BATCH - 1)
EACH = {"apart": 1, "either": 1, "mixer": 2}
"""Models of each group that a change runs."""

TABLES: list[Any] = [operations, layers, attention, training, mixers]
if importlib.util.find_spec("tests.isolation.hugging_face") and importlib.util.find_spec("transformers"):
    TABLES.append(importlib.import_module("tests.isolation.hugging_face"))

CASES = {case.name: case for table in TABLES for case in table.CASES}
REFUSED_WRONGLY: dict[str, str] = getattr(TABLES[-1], "REFUSED_WRONGLY", {})

UNCOUPLED = {"drawn: rrelu"}
"""Models that draw as many numbers as values of an example say, so that one seed gives the others of a batch other draws.

Their law is the same, which is what the guarantee needs (`dpcore.torch.randomness`), but no two sums can be compared.
"""


def sample() -> list[str]:
    """Some names of each group, from all over it; all names where everything is run."""
    if ALL:
        return list(CASES)
    groups: dict[str, list[str]] = {}
    for name in CASES:
        groups.setdefault(name.partition(":")[0].partition(" ")[0], []).append(name)
    found = []
    for names in groups.values():
        count = EACH[CASES[names[0]].kind]
        found += [names[(2 * place + 1) * len(names) // (2 * count)] for place in range(count)]
    return found


def test_no_two_models_have_one_name() -> None:
    assert len(CASES) == sum(len(table.CASES) for table in TABLES) >= 300
    assert CASES.keys() >= REFUSED_WRONGLY.keys() | UNCOUPLED
    assert {case.kind for case in CASES.values()} <= {"apart", "mixer", "either"}


@pytest.mark.parametrize("name", sample())
def test_one_example_moves_the_sum_by_its_clip_norm(name: str) -> None:
    case = CASES[name]
    found = worst(outcome(case, seed, PLACES) for seed in SEEDS)
    assert found.way != CRASHED, found.sentence
    assert name in UNCOUPLED or not found.exceeds(), found
    assert found.last <= 1e-12, found  # all sums are exact, but the division by the clip norm is not
    assert found.stray <= 1e-6, found
    if name in REFUSED_WRONGLY:
        assert found.way == REFUSED, f"is mended, so take it off REFUSED_WRONGLY: {found}"
    elif case.kind == "apart":
        assert found.accepted, found.sentence


def together(self: Any, point: Any, batch: Any) -> list[Rows]:
    """The gradient of each example's loss in the whole batch, as a run would take it that proves nothing."""
    state = {name: value.clone().requires_grad_() for name, value in zip(self.values.names, point, strict=True)}
    inputs, targets = batches.normalize(batch)
    rows = []
    with torch.enable_grad():
        output = torch.func.functional_call(self.model, state, (inputs,))
        losses = torch.nn.functional.cross_entropy(output, targets[0], reduction="none")
    for loss in losses:
        found = torch.autograd.grad(loss, list(state.values()), retain_graph=True, allow_unused=True)
        rows.append([torch.zeros_like(v) if g is None else g for g, v in zip(found, state.values(), strict=True)])
    return [Rows(torch.stack(column).reshape(len(rows), -1)) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("name", "mixes"),
    [
        ("row: softmax", False),
        ("statistics: batch norm by hand", True),
        ("statistics: sum", True),
        ("order: first", True),
        ("guard: largest value, where", True),
        ("statistics: trace of 1e-6", True),
    ],
)
def test_the_check_sees_a_model_that_mixes(name: str, mixes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepted(gradient: Any, *_: Any) -> None:
        gradient.way, gradient.reasons["pairs"] = "one-by-one", "a test wants it"

    # Its module has the name of its function.
    monkeypatch.setattr(importlib.import_module("dpcore.torch.make_private"), "try_out", accepted)
    monkeypatch.setattr(OneByOne, "__call__", together)
    found = outcome(Case(name, CASES[name].build, "mixer"), 0)
    assert found.way == "one-by-one", found
    if name != "statistics: trace of 1e-6":  # which keeps to the bounds
        assert found.exceeds() == mixes, found
    assert (found.stray > 3e-6) == mixes, found
