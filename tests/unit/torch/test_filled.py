"""A proved graph runs on one number of rows, so that the number of examples chooses no kernel and rounds no digit."""

from typing import Any

import numpy as np
import pytest
import torch

from asv_benchmarks.rounding_by_others import Recurrent
from dpcore.methods import dp_sgd
from dpcore.sampling import UserSampler
from dpcore.sampling import sampler as make_sampler
from dpcore.torch import make_private
from dpcore.torch.doctor.audit_run import add_up
from dpcore.torch.explain import Rehearsal
from dpcore.torch.gradients.proved import Program
from tests.unit.torch_runs import DATA, METHODS, finish, model, sgd, start

USERS = UserSampler(
    make_sampler("poisson", dataset_size=10, batch_size=4), user_of_example=np.arange(30) % 10, max_examples_per_user=3
)


VIEWS: dict[str, Any] = {"data": list(zip(*DATA, strict=True)), "augmentations": 2}


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 5}, {"sampling": USERS}, VIEWS, {"max_memory": "20 KB"}])
def test_the_graph_sees_one_number_of_rows_whatever_is_drawn(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = list[int](), Program.__call__

    def spied(program: Program, point: Any, held: Any, batch: Any) -> Any:
        seen.append(len(batch[0]))
        return run(program, point, held, batch)

    method = METHODS["dp_sgd"](4) if "sampling" in options else sgd()
    private = start(model(), method, **options)
    monkeypatch.setattr(Program, "__call__", spied)
    drawn = {len(batch[0]) for batch in private.loader if private.step(batch) is None}
    assert len(drawn) > 1
    assert {size for size in seen if size} == {private.microbatch_size}


@pytest.mark.parametrize("way", ["pairs", "one-by-one"])
def test_what_is_filled_up_adds_nothing(way: str) -> None:
    runs = [start(model(), sampling="fixed-order", microbatch_size=size, gradients=way) for size in (3, 8)]
    assert torch.allclose(*(finish(run, stop=4) for run in runs), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("count", [2, 16])
def test_one_example_more_leaves_the_others_bits_even_where_a_digit_decides(count: int) -> None:
    torch.manual_seed(0)
    data = torch.randn(100, 100, 8), torch.randint(0, 2, (100,))
    run = make_private(Recurrent(), data, dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=16), steps=9)

    def total(first: int, last: int) -> Any:
        add_up(run, tuple(part[first:last] for part in data))
        found = run.engine.mechanism.summed().copy()
        run.engine.mechanism.discard()
        return found

    own = total(0, count) - total(0, count - 1)
    assert 0.99 < np.linalg.norm(own) <= 1.0
    assert np.array_equal(total(count, count + 1) + total(0, count), total(0, count + 1))


def drawn_by(name: str, batch_size: int) -> Any:
    return make_sampler(name, dataset_size=5000, batch_size=batch_size)


@pytest.mark.parametrize(("sampler", "processes", "views", "rows"), [
    (drawn_by("poisson", 256), 1, 1, 288), (drawn_by("poisson", 256), 4, 1, 80), (drawn_by("poisson", 10), 1, 1, 17),
    (drawn_by("poisson", 64), 1, 4, 320), (drawn_by("truncated-poisson", 256), 1, 1, 288),
    (drawn_by("fixed-size", 250), 1, 1, 250), (drawn_by("fixed-order", 250), 4, 1, 63), (USERS, 1, 1, 16),
    (UserSampler(drawn_by("poisson", 500), np.arange(20_000) % 5000, 9), 2, 1, 256),  # a quarter of 1,000, whole
])  # fmt: skip
def test_what_a_step_seldom_exceeds(sampler: Any, processes: int, views: int, rows: int) -> None:
    run = start(model(), sgd(batch_size=8))
    rehearsal = Rehearsal(run.engine, run._rehearsal.example)
    chosen: Any = type("Plan", (), {"sampler": sampler})
    rehearsal.plan, run.engine.views, run.engine.mechanism.peers.world_size = chosen, views, processes
    assert rehearsal.usual_examples == rows


def test_a_given_microbatch_is_no_larger_than_a_step() -> None:
    assert start(model(), microbatch_size=1000, sampling="fixed-order").microbatch_size == 8
    assert start(model(), microbatch_size=1000).microbatch_size == 14 < len(DATA[0])
