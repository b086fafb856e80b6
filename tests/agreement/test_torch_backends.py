"""A torch model trained under "numpy" and under "triton" (interpreter on the CPU, or CUDA) ends at one place."""

import os
from functools import cache

import numpy as np
import pytest
import torch
from runs import BANDED, COMMON, METHODS, Problem, channels_last, dense, rows_first, train
from torch import nn

import dpcore
import dpcore.torch
from dpcore.errors import BackendError
from tests.depth import chosen
from tests.unit.torch_runs import KEY, load, saved

pytest.importorskip("triton")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="CPU tensors need the interpreter")
# Where each backend of tensors computes. A model on a GPU runs in other kernels, which round otherwise.
PLACES = {"torch": ("cpu", 0.0), "triton": ("cpu", 0.0) if INTERPRETED else ("cuda", 1e-4)}


# Methods that a change trains; in the interpreter two of them. test_ops_step.py holds all forms of a step, and
# test_methods.py runs them in the interpreter without a model.
FEW = ("dp_sgd", "disk", "memf", "scale_then_privatize")


@cache
def by_numpy(name: str) -> list[torch.Tensor]:
    """What a run releases, which is nobody's to change."""
    return train("numpy", METHODS[name](), "cpu")


@interpreted
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "torch") for name in chosen(FEW, tuple(METHODS))),
        *((name, "triton") for name in chosen(FEW[::2], tuple(METHODS))),
    ],
)
def test_cpu_tensors_agree(name: str, backend: str) -> None:
    want = by_numpy(name)
    got = train(backend, METHODS[name](), "cpu")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    other = by_numpy("dp_sgd" if name != "dp_sgd" else "disk")
    assert max((a - b).abs().max().item() for a, b in zip(want, other, strict=True)) > 1e-3


@pytest.mark.parametrize("problem", chosen([channels_last], [dense, channels_last]))
@pytest.mark.parametrize("backend", PLACES)
def test_bfloat16_agrees(backend: str, problem: Problem) -> None:
    device, rounding = PLACES[backend]
    want = train("numpy", METHODS["disk"](), "cpu", torch.bfloat16, problem)
    got = train(backend, METHODS["disk"](), device, torch.bfloat16, problem)
    for a, b in zip(got, want, strict=True):
        # One unit in bfloat16's last place, where the float32 states round to different sides. On a device the
        # gradients are those of other bfloat16 products.
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-7, atol=1e-6 + 10 * rounding)


@pytest.mark.parametrize("backend", PLACES)
@pytest.mark.parametrize("name", chosen(["memf in blocks"], ["dp_sgd", "scale_then_privatize", "memf in blocks"]))
def test_channels_last_agrees(name: str, backend: str) -> None:
    """Noise, filters and states are those of the row-major weights, wherever the weights lie."""
    device, rounding = PLACES[backend]
    want = train("numpy", METHODS[name](), "cpu", problem=rows_first)
    got = train(backend, METHODS[name](), device, problem=channels_last)
    assert not got[0].is_contiguous()
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 + rounding)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("name", METHODS)
def test_cuda_tensors_agree(name: str, device: str) -> None:
    """Also on a device that is not the current one, where nothing may go by way of the current one."""
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    want = train("numpy", METHODS[name](), "cpu")
    assert torch.cuda.current_device() == 0
    got = train("triton", METHODS[name](), device)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)  # the model itself runs in other kernels


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
                nn.Linear(4, 3), data, method, sampling="fixed_order", steps=2, key=KEY, exact_key=True
            )
        run.record_gradients(5)
        return run

    def train_to(run: dpcore.torch.PrivateRun, stop: int) -> None:
        for batch in run.loader:
            run.step(batch, public=tuple(part.clone() for part in data))
            if run.steps_taken == stop:
                return

    runs = {backend: start(backend) for backend in ("numpy", "torch", "triton")}
    train_to(runs["numpy"], 2)
    train_to(runs["triton"], 1)
    state = saved(runs["triton"])
    assert state["optimizer"]["dpcore"]["secret"]["arrays"]
    for backend in runs:
        again = load(start(backend), state)
        train_to(again, 2)
        for key, value in runs["numpy"].recorded.items():
            np.testing.assert_allclose(again.recorded[key], value, rtol=0, atol=1e-5)
        found, wanted = (list(one.model.parameters()) for one in (again, runs["numpy"]))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
