"""Whole runs under ``cuda_graphs="model"``: they release what runs without graphs do."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import torch

import dpcore
from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.sampling import FixedOrderSampler, UserSampler
from dpcore.torch import make_private
from tests.agreement.repeated_models import DEVICE, Shifted, same
from tests.depth import chosen
from tests.refused import refused
from tests.unit.torch_runs import KEY

COMMON: dict[str, Any] = {"noise_multiplier": 0.7, "batch_size": 8, "max_grad_norm": 0.2}

USERS = [0, 0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5]  # more rows than a micro-batch's


def run(
    graphs: Any, sampling: Any, method: Any, size: int | None = 4, dtype: torch.dtype = torch.float32,
    make: Any = Shifted, **options: Any,
) -> Any:  # fmt: skip
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype)
    data = torch.randn(24, 5).to(dtype), torch.arange(24) % 3
    with dpcore.use_backend("triton"):
        given: dict[str, Any] = {"microbatch_size": size, "steps": 6} | options
        return make_private(
            model,
            data,
            method,
            sampling=sampling,
            key=KEY,
            exact_key=True,
            target_delta=1e-5,
            cuda_graphs=graphs,
            **given,
        )


def trained(graphs: Any, *args: Any, **options: Any) -> tuple[list[torch.Tensor], Any]:
    private = run(graphs, *args, **options)
    while private.steps_taken < private.plan.steps:
        for batch in private.loader:
            private.step(batch)
    return [value.cpu() for value in private.output_state_dict().values()], private._engine.gradient.repeated


RUNS: dict[str, tuple[Any, Any, int, torch.dtype]] = {  # sampler, method, micro-batch, dtype
    "two points": (
        FixedOrderSampler(dataset_size=24, batch_size=8),
        dpcore.methods.disk(lr=0.3, base="momentum", **COMMON), 4, torch.float32,
    ),
    "weights that change": (
        FixedOrderSampler(dataset_size=24, batch_size=8),
        dpcore.methods.accelerated_srgd(lr=0.1, radius=1.5, **COMMON), 4, torch.float32,
    ),
    "users": (
        UserSampler(FixedOrderSampler(dataset_size=6, batch_size=2), USERS, 6),
        dpcore.methods.dp_sgd(lr=0.3, **{**COMMON, "batch_size": 2}), 1, torch.float32,
    ),
    "16 bits": (
        FixedOrderSampler(dataset_size=24, batch_size=8), dpcore.methods.dp_adam(lr=0.05, **COMMON), 4, torch.bfloat16
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", chosen(["weights that change", "users"], list(RUNS)))
def test_a_training_run_is_that_without_graphs(name: str) -> None:
    (plain, _), (found, repeating) = (trained(graphs, *RUNS[name]) for graphs in (False, "model"))
    same([value.float() for value in plain], [value.float() for value in found])
    assert repeating.refused is None
    assert sum(one.replays for one in repeating.passes.kept.values()) > repeating._captured


def test_captured_passes_count_against_the_memory_and_are_given_back_where_it_is_short() -> None:
    sampling, method, *_ = RUNS["two points"]
    options: dict[str, Any] = {"size": None, "max_memory": 10_000}
    few, many = (run(graphs, sampling, method, **options) for graphs in ("model", True))
    assert 1 <= few.microbatch_size <= many.microbatch_size / 2
    engine = run("model", sampling, method)._engine
    engine.gradient.repeated.passes.of("key", [torch.ones(1, device=DEVICE)], [])
    with pytest.warns(SpeedWarning, match="out of memory"):
        engine._halve()
    assert engine.gradient.repeated.passes.kept.values() == []


class Chosen(Shifted):
    """Without a proof: a value decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if x.abs().sum() < 1e9 else -y


def test_a_model_without_proof_runs_without_repeated_passes_and_that_is_told() -> None:
    sampling, method, size, _ = RUNS["two points"]
    with pytest.warns(SpeedWarning) as found:
        (plain, _), (other, repeating) = (
            trained(graphs, sampling, method, size, make=Chosen) for graphs in (False, "model")
        )
    assert repeating is None
    same(plain, other)
    (sentence,) = {text for warning in found if "cuda_graphs" in (text := str(warning.message))}
    assert "are not repeated, since only proved graphs are, and 'one-by-one' runs the model itself" in sentence


def test_another_word_than_model_is_refused() -> None:
    sampling, method, *_ = RUNS["two points"]
    refused(ArgumentError, "cuda_graphs='all': must be False, True, or 'model'", run, "all", sampling, method)
