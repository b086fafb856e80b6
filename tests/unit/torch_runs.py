"""What the tests of the PyTorch edge share: a small problem, runs on it, and every method that there is."""

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dpcore
import dpcore.torch
from dpcore.methods import (
    accelerated_srgd,
    disk,
    doppler,
    dp_adagrad,
    dp_adam,
    dp_sgd,
    inner_outer,
    memf,
    pmlf,
    srg_memf,
)
from dpcore.spec.keys import EXACT, RunKeys
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.filters import OptimalFIR, ScalarKalman
from dpcore.stages.strategies import NamedStrategy
from dpcore.stages.updates.averaging import ExponentialAverage, UniformAverage
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import Doubling, WarmupCosine

KEY = bytes(range(32))
DATA = (torch.arange(150.0).reshape(30, 5) / 150, torch.arange(30) % 3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


class Tied(nn.Module):
    def __init__(self, size: int = 9, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(size, width)
        self.out = nn.Linear(width, size, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.embed(tokens)).mean(1)


def sgd(**settings: Any) -> dpcore.Method:
    return dp_sgd(**{"lr": 0.3, "noise_multiplier": 1.0, "batch_size": 8, **settings})


def start(
    net: nn.Module, method: dpcore.Method | None = None, *, stop: int = 0, **options: Any
) -> dpcore.torch.PrivateRun:
    """Return a run on the small problem, after `stop` steps."""
    options = {"data": DATA, "epochs": 3, "target_delta": 1e-5, "key": KEY, "exact_key": True, **options}
    run = dpcore.torch.make_private(net, options.pop("data"), sgd() if method is None else method, **options)
    finish(run, stop=stop)
    return run


def start_one_by_one(net: nn.Module, method: dpcore.Method | None = None, **options: Any) -> dpcore.torch.PrivateRun:
    """Return a run that looks for no graph, which is two thirds of the time that a start takes."""
    return start(net, method, **{"gradients": "one-by-one", **options})


def values(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def public_batch(run: dpcore.torch.PrivateRun) -> Any:
    """Public data, another batch at every step, for the methods that take them."""
    if run.plan.method.update.second_moment != "public":
        return None
    inputs, labels = (part[run.steps_taken :][:4] for part in DATA)
    return inputs.to(next(run.model.parameters()).dtype) + 1, labels.clone()


def finish(run: dpcore.torch.PrivateRun, scheduler: Any = None, stop: int | None = None) -> torch.Tensor:
    while run.steps_taken < run.plan.steps and run.steps_taken != stop:
        for batch in run.loader:
            run.step(batch, public_batch(run))
            if scheduler is not None:
                scheduler.step()
            if run.steps_taken == stop:
                return values(run.model)
    return values(run.model)


def saved(run: dpcore.torch.PrivateRun) -> dict[str, Any]:
    """Through torch.save and the safe torch.load, as a user does it."""
    file = io.BytesIO()
    torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def keep_keys(run: dpcore.torch.PrivateRun, state: dict[str, Any]) -> None:
    """Draw what the saved run would have drawn, so that the two can be compared; loading always forks."""
    secret = state["dpcore"]["secret"]
    keys = {name: bytes.fromhex(secret[name]) for name in ("noise_key", "sampling_key")}
    earlier = [(row, bytes.fromhex(key)) for row, key in secret["earlier_keys"]]
    run._engine.mechanism.keys = RunKeys.from_dict(secret | keys | {"earlier_keys": earlier, "origin": EXACT})


def load(run: dpcore.torch.PrivateRun, state: dict[str, Any], fork: bool = False) -> dpcore.torch.PrivateRun:
    """Go on from what `saved` returned: with the saved run's draws, or with fresh ones as users do."""
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    if not fork:
        keep_keys(run, state["optimizer"])
    return run


def as_text(run: dpcore.torch.PrivateRun) -> str:
    with torch._tensor_str.printoptions(profile="full"):
        return repr(run.optimizer.state_dict())


BANDED = NamedStrategy("banded-inverse-square-root", 4)
_AT = {"noise_multiplier": 0.7, "max_grad_norm": 0.5}
_ADAM = {**_AT, "lr": 0.05}

# Every method, with each of its kinds of state; batch_size is the caller's.
METHODS: dict[str, Callable[[float], dpcore.Method]] = {
    "dp_sgd": lambda b: dp_sgd(lr=0.3, batch_size=b, **_AT),
    "adaptive clip": lambda b: dp_sgd(lr=0.3, batch_size=b, adaptive_clip=AdaptiveClip(0.6, 0.5, 2.0), **_AT),
    "disk adaptive clip": lambda b: disk(
        lr=0.3, clipping="normalized", batch_size=b, adaptive_clip=AdaptiveClip(bit_noise_std=0.5), **_AT
    ),
    "per layer": lambda b: dp_sgd(lr=0.3, clipping_groups="per_tensor", batch_size=b, **_AT),
    "doppler": lambda b: doppler(lr=0.3, filter="f5", batch_size=b, **_AT),
    "doppler adam": lambda b: doppler(base="adam", bias_corrected=True, eps=0.01, batch_size=b, **_ADAM),
    "optimal fir": lambda b: doppler(lr=0.3, filter=OptimalFIR(3), batch_size=b, **_AT),
    "galore": lambda b: doppler(lr=0.3, galore=GaLore(2, every=3), batch_size=b, **_AT),
    "galore adam": lambda b: dp_adam(galore=GaLore(2, every=3), batch_size=b, weight_decay=0.01, **_ADAM),
    "disk": lambda b: disk(lr=0.3, batch_size=b, **_AT),
    "disk kalman": lambda b: disk(
        lr=0.3, base="adamw", kappa=ScalarKalman(sigma_H=0.1, sigma_v=0.5, sigma_w=1.0), batch_size=b, **_AT
    ),
    "disk doppler": lambda b: disk(lr=0.3, base="momentum", filter="f5", batch_size=b, **_AT),
    "pmlf": lambda b: pmlf(lr=0.3, window=3, beta=0.5, batch_size=b, **_AT),
    "inner_outer": lambda b: inner_outer(lr=0.1, window=3, beta=0.5, batch_size=b, **_AT),
    "memf": lambda b: memf(lr=0.3, batch_size=b, **_AT),
    "memf tree": lambda b: memf(lr=0.3, strategy="tree", batch_size=b, **_AT),
    "memf tree-optimal": lambda b: memf(lr=0.3, strategy="tree-optimal", batch_size=b, **_AT),
    "memf banded": lambda b: memf(lr=0.3, strategy=BANDED, base="adam", batch_size=b, **_AT),
    "srg_memf": lambda b: srg_memf(lr=0.1, decay=0.5, batch_size=b, **_AT),
    "accelerated_srgd": lambda b: accelerated_srgd(lr=0.01, radius=3.0, batch_size=b, **_AT),
    "accelerated independent": lambda b: accelerated_srgd(lr=0.01, variant="independent", batch_size=b, **_AT),
    "adam": lambda b: dp_adam(batch_size=b, **_ADAM),
    "adam independent": lambda b: dp_adam(variant="independent_moments", batch_size=b, **_ADAM),
    "adam independent tree": lambda b: dp_adam(variant="independent_moments", strategy="tree", batch_size=b, **_ADAM),
    "adam independent banded": lambda b: dp_adam(variant="independent_moments", strategy=BANDED, batch_size=b, **_ADAM),
    "adam joint": lambda b: dp_adam(variant="joint_moments", batch_size=1, **_ADAM),
    "adam bias corrected": lambda b: dp_adam(variant="bias_corrected", batch_size=b, **_ADAM),
    "adam scaled": lambda b: dp_adam(variant="scale_then_privatize", max_scaled_norm=2.0, batch_size=b, **_ADAM),
    "adam delayed": lambda b: dp_adam(
        variant="delayed_preconditioner", unscaled_steps=2, scaled_steps=3, batch_size=b, **_ADAM
    ),
    "adam public": lambda b: dp_adam(variant="side_information", batch_size=b, **_ADAM),
    "adam noiseless": lambda b: dp_adam(
        variant="noiseless_preconditioner", allow_nonprivate=True, batch_size=b, **_ADAM
    ),
    "adagrad": lambda b: dp_adagrad(batch_size=b, **_ADAM),
    "adagrad corrected": lambda b: dp_adagrad(variant="bias_corrected", batch_size=b, **_ADAM),
    "schedule and average": lambda b: dp_sgd(
        lr=0.3, schedule=WarmupCosine(3, 0.1), averaging=ExponentialAverage(0.8), radius=5.0, batch_size=b, **_AT
    ),
    "doubling": lambda b: dp_sgd(schedule=Doubling(confidence=0.3), batch_size=b, **_AT),
    "uniform average": lambda b: pmlf(lr=0.3, averaging=UniformAverage(2), batch_size=b, **_AT),
}
