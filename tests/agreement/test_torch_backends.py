"""A torch model trained under "numpy" and under "triton" (interpreter on the CPU, or CUDA) ends at one place."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.errors import BackendError
from dpcore.stages.strategies import NamedStrategy
from dpcore.stages.updates.averaging import ExponentialAverage
from tests.unit.torch_runs import KEY, load, saved

pytest.importorskip("triton")

BANDED = NamedStrategy("banded-inverse-square-root", 3)
COMMON = {"noise_multiplier": 0.7, "batch_size": 4, "max_grad_norm": 0.2}
# Denominators of the gradient's size: with a tiny eps, Adam makes steps of any size out of rounding.
# fmt: off
METHODS: dict[str, Callable[[], dpcore.Method]] = {
    "dp_sgd": lambda: dpcore.methods.dp_sgd(lr=0.3, clipping_groups="per_layer", **COMMON),
    "doppler": lambda: dpcore.methods.doppler(lr=0.3, filter="f5", **COMMON),
    "disk": lambda: dpcore.methods.disk(lr=0.3, base="momentum", **COMMON),
    "dp_adam": lambda: dpcore.methods.dp_adam(lr=0.05, **COMMON),
    "pmlf": lambda: dpcore.methods.pmlf(lr=0.3, window=3, beta=0.5, **COMMON),
    "memf": lambda: dpcore.methods.memf(lr=0.3, strategy=BANDED, base="momentum", **COMMON),
    "memf tree": lambda: dpcore.methods.memf(lr=0.3, strategy="tree", **COMMON),
    "srg_memf": lambda: dpcore.methods.srg_memf(lr=0.1, decay=0.5, strategy=BANDED, **COMMON),
    "accelerated_srgd": lambda: dpcore.methods.accelerated_srgd(lr=0.1, radius=1.5, **COMMON),
    "scale_then_privatize": lambda: dpcore.methods.dp_adam(
        lr=0.05, variant="scale_then_privatize", scale_eps=0.1, max_scaled_norm=1.0, eps=0.01, **COMMON),
    "independent_moments": lambda: dpcore.methods.dp_adam(lr=0.05, variant="independent_moments", eps=0.01, **COMMON),
    "adagrad": lambda: dpcore.methods.dp_adagrad(lr=0.05, eps=0.01, averaging=ExponentialAverage(0.5), **COMMON)
}
# fmt: on
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="CPU tensors need the interpreter")


def sampling(method: dpcore.Method) -> str:
    fixed = method.noise.strategy is not None or method.update.second_moment == "independent"
    return "fixed_order" if fixed else "poisson"


def train(backend: str, method: dpcore.Method, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    data = (torch.randn(16, 4).to(dtype), torch.arange(16) % 3)
    model.to(device)
    with dpcore.use_backend(backend):
        run = dpcore.torch.make_private(
            model, data, method, sampling=sampling(method), steps=3, microbatch_size=5, key=KEY, exact_key=True,
            target_delta=1e-5
        )  # fmt: skip
    for batch in run.loader:
        assert batch[0].device.type == torch.device(device).type
        run.step(batch)
    assert run.statement().software["backend"] == backend
    return [value.cpu() for value in run.output_state_dict().values()]


@interpreted
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("name", METHODS)
def test_cpu_tensors_agree(name: str, backend: str) -> None:
    want = train("numpy", METHODS[name](), "cpu")
    got = train(backend, METHODS[name](), "cpu")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6)
    other = train("numpy", METHODS["dp_sgd" if name != "dp_sgd" else "disk"](), "cpu")
    assert max((a - b).abs().max().item() for a, b in zip(want, other, strict=True)) > 1e-3


@interpreted
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_bfloat16_agrees(backend: str) -> None:
    want = train("numpy", METHODS["disk"](), "cpu", torch.bfloat16)
    got = train(backend, METHODS["disk"](), "cpu", torch.bfloat16)
    for a, b in zip(got, want, strict=True):
        # One unit in bfloat16's last place, where the float32 states round to different sides.
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.cuda
@pytest.mark.parametrize("name", METHODS)
def test_cuda_tensors_agree(name: str) -> None:
    want = train("numpy", METHODS[name](), "cpu")
    got = train("triton", METHODS[name](), "cuda")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)  # the model itself runs in other kernels


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_cuda_model_under_a_cpu_backend_is_refused(backend: str) -> None:
    with pytest.raises(BackendError, match=r'dpcore\.set_backend\("triton"\)'):
        train(backend, METHODS["dp_sgd"](), "cuda")


def test_the_backend_follows_the_model_where_none_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DPCORE_BACKEND", raising=False)
    torch.manual_seed(0)
    arguments = nn.Linear(4, 3), (torch.randn(16, 4), torch.arange(16) % 3), METHODS["dp_sgd"]()
    run = dpcore.torch.make_private(*arguments, steps=3, target_delta=1e-5)
    assert run.statement().software["backend"] == "torch"
    monkeypatch.setenv("DPCORE_BACKEND", "numpy")
    run = dpcore.torch.make_private(*arguments, steps=3, target_delta=1e-5)
    assert run.statement().software["backend"] == "numpy"


@interpreted
def test_records_public_data_and_states_cross_the_backends() -> None:
    """What was saved under "triton" goes on under every backend to one place."""
    method = dpcore.methods.dp_adam(lr=0.05, variant="side_information", eps=0.01, strategy=BANDED, **COMMON)
    data = (torch.linspace(-1, 1, 64).reshape(16, 4), torch.arange(16) % 3)

    def start(backend: str) -> dpcore.torch.PrivateRun:
        torch.manual_seed(0)
        with dpcore.use_backend(backend):
            run = dpcore.torch.make_private(
                nn.Linear(4, 3), data, method, sampling="fixed_order", steps=4, key=KEY, exact_key=True
            )
        run.record_gradients(5)
        return run

    def train_to(run: dpcore.torch.PrivateRun, stop: int) -> None:
        for batch in run.loader:
            run.step(batch, public=data)
            if run.steps_taken == stop:
                return

    runs = {backend: start(backend) for backend in ("numpy", "torch", "triton")}
    train_to(runs["numpy"], 4)
    train_to(runs["triton"], 2)
    state = saved(runs["triton"])
    assert state["optimizer"]["dpcore"]["secret"]["arrays"]
    for backend in runs:
        again = load(start(backend), state)
        train_to(again, 4)
        for key, value in runs["numpy"].recorded.items():
            np.testing.assert_allclose(again.recorded[key], value, rtol=0, atol=3e-6)
        for a, b in zip(again.model.parameters(), runs["numpy"].model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=3e-6)
