"""Refusal of models, options and settings that several processes cannot train by together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dpcore.errors import ArgumentError
from dpcore.mechanism.peers import Peers
from dpcore.plan.plan import Plan
from dpcore.spec.layout import Layout
from dpcore.torch.data.data import Data


def check_plain(model: nn.Module) -> None:
    """Refuse a model that another engine has taken apart already."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ArgumentError(
            f"model={type(model).__name__!r}: must be the model itself (model.module); dpcore adds the sums of all "
            "processes, after each has clipped its own"
        )


def check_alone(peers: Peers, **asked: object) -> None:
    """Refuse what a run of several processes cannot do yet."""
    for name in (name for name, given in asked.items() if given and peers.world_size > 1):
        raise ArgumentError(
            f"{name} in a run of {peers.world_size} processes: must be left out, or train in one process"
        )


def check_alike(
    peers: Peers, model: nn.Module, plan: Plan, layout: Layout, backend: str, data: Data, more: Mapping[str, Any]
) -> None:
    """Refuse processes that would not train one model by one plan, before any of them draws a batch."""
    if peers.world_size == 1:
        return
    settings = {
        "method": plan.method.describe(),
        "sampling": plan.sampler.describe(),
        "number of steps": plan.steps,
        "model (names and shapes of what is trained)": layout.to_list(),
        "backend": backend,
        "data (number of examples)": data.length,
        "augmentations": data.views,
        "prefetch": data.prefetch,
    }
    peers.check_alike({**settings, **more})
    values = {name: value for name, value in model.state_dict().items() if not hasattr(value, "to_local")}
    peers.check_alike({f"values of {name!r} in the model": value for name, value in values.items()})
