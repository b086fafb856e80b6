"""Compiled graphs: the same masks and, but for rounding, the same run."""

import shutil
from typing import Any

import pytest
import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.errors import SpeedWarning
from dpcore.torch.gradients import cache

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own

DATA = torch.randn(64, 20, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 3


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_known", type(cache._known)())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))


def run(net: nn.Module, **options: Any) -> Any:
    method = dpcore.methods.dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=16)
    private = dpcore.torch.make_private(net, DATA, method, steps=4, key=b"k" * 32, exact_key=True, **options)
    while private.steps_taken < 4:
        for batch in private.loader:
            private.step(batch)
    return private


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_run_is_the_run() -> None:
    plain, compiled = model(), model()
    run(plain)
    private = run(compiled, compile=True)
    assert private._engine.gradient.proved.compiled
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_was_compiled_runs_compiled(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, net = model(), model()
    if whole:
        net = torch.compile(net)  # type: ignore[assignment]
    else:
        net[0].compile()
    asked = []
    monkeypatch.setattr(torch, "compile", lambda function, **options: asked.append(options) or function)
    run(plain)
    assert asked == []
    run(net)
    assert asked == [
        {"dynamic": True, "options": {"fallback_random": True}},
        *3 * [{"dynamic": True, "fullgraph": True}],
    ]
    for one, other in zip(plain.parameters(), net.parameters(), strict=True):
        assert torch.equal(one, other)


def test_where_compilation_fails_the_run_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", lambda function, **options: broken)
    with pytest.warns(SpeedWarning, match=r"compile: not done, and the run continues without \(no compiler\)"):
        private = run(model(), compile=True)
    assert not private._engine.gradient.proved.compiled


@pytest.mark.filterwarnings("ignore:gradients='auto'")
def test_a_model_without_a_proof_is_not_compiled_and_that_is_told() -> None:
    class Deciding(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    with pytest.warns(SpeedWarning, match="compile: the model is not compiled, since only proved graphs are"):
        run(nn.Sequential(Deciding(20, 3)), compile=True)
