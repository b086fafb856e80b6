"""Whole private runs of small torch models, for the tests that train one model under several backends."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.stages.filters import OptimalFIR
from dpcore.stages.strategies import NamedStrategy, in_blocks
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.galore import GaLore
from tests.depth import chosen
from tests.unit.torch_runs import KEY

# In the interpreter ChaCha20 takes more than twice as long; test_ops_stream.py holds its words, and a run
# of all backends in test_torch_backends.py draws them.
RNG = chosen("philox", "chacha20") if os.environ.get("TRITON_INTERPRET") == "1" else "chacha20"

Problem = Callable[[], tuple[nn.Module, torch.Tensor]]
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
    "memf in blocks": lambda: dpcore.methods.memf(lr=0.3, strategy=in_blocks(NamedStrategy("tree"), 2), **COMMON),
    "optimal fir": lambda: dpcore.methods.doppler(lr=0.3, filter=OptimalFIR(3), **COMMON),
    "doubling": lambda: dpcore.methods.dp_sgd(schedule=dpcore.schedules.Doubling(confidence=0.3), **COMMON),
    "galore": lambda: dpcore.methods.doppler(lr=0.3, galore=GaLore(2, every=2), **COMMON),
    "memf tree": lambda: dpcore.methods.memf(lr=0.3, strategy="tree", **COMMON),
    "srg_memf": lambda: dpcore.methods.srg_memf(lr=0.1, decay=0.5, strategy=BANDED, **COMMON),
    "accelerated_srgd": lambda: dpcore.methods.accelerated_srgd(lr=0.1, radius=1.5, **COMMON),
    "scale_then_privatize": lambda: dpcore.methods.dp_adam(
        lr=0.05, variant="scale_then_privatize", scale_eps=0.1, max_scaled_norm=1.0, eps=0.01, **COMMON),
    "independent_moments": lambda: dpcore.methods.dp_adam(lr=0.05, variant="independent_moments", eps=0.01, **COMMON),
    "adagrad": lambda: dpcore.methods.dp_adagrad(lr=0.05, eps=0.01, averaging=ExponentialAverage(0.5), **COMMON)
}
# fmt: on


def sampling(method: dpcore.Method) -> str:
    fixed = method.noise.strategy is not None or method.update.second_moment == "independent"
    return "fixed_order" if fixed else "poisson"


def dense() -> tuple[nn.Module, torch.Tensor]:
    """A model, and examples for it."""
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(16, 4)


def rows_first() -> tuple[nn.Module, torch.Tensor]:
    """A model of images, and images."""
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)), torch.randn(16, 2, 5, 5)


def channels_last() -> tuple[nn.Module, torch.Tensor]:
    """The same; the weights do not lie in the order of their indices."""
    model, images = rows_first()
    return model.to(memory_format=torch.channels_last), images


def train(
    backend: str, method: dpcore.Method, device: str, dtype: torch.dtype = torch.float32,
    problem: Problem = dense, rng: str = RNG, **options: Any,
) -> list[torch.Tensor]:  # fmt: skip
    """Return what a run of three steps released, on the CPU."""
    torch.manual_seed(0)
    model, inputs = problem()
    model, data = model.to(dtype), (inputs.to(dtype), torch.arange(16) % 3)
    model.to(device)
    assert problem is not channels_last or not model[0].weight.is_contiguous()
    with dpcore.use_backend(backend):
        run = dpcore.torch.make_private(
            model, data, method, sampling=sampling(method), steps=3, microbatch_size=5, key=KEY, exact_key=True,
            target_delta=1e-5, **options,
        )  # fmt: skip
    run._engine.mechanism.rng = rng
    for batch in run.loader:
        assert batch[0].device.type == torch.device(device).type
        run.step(batch)
    assert run.statement().software["backend"] == backend
    return [value.cpu() for value in run.output_state_dict().values()]
