"""Joins the parts of a private run, once they fit together."""

from __future__ import annotations

from typing import Any

from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.peers import Peers
from dpcore.mechanism.room import check_vectors
from dpcore.plan.plan import Plan
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import Backend
from dpcore.torch.data.data import Data
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.engine import Engine
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.model.memory import free_memory
from dpcore.torch.optimizer import PrivateOptimizer
from dpcore.torch.parameter_views import Working


def layout_of(working: Working) -> Layout:
    """Return where each trained tensor's elements lie in the random stream."""
    return Layout.of((name, p.shape) for name, p in zip(working.names, working.parameters, strict=True))


def assembled(
    gradient: PerExampleGradient,
    working: Working,
    source: Data,
    plan: Plan,
    keys: RunKeys,
    *,
    backend: Backend[Any],
    peers: Peers,
    params: Any = None,
    microbatch_size: int = 1,
) -> tuple[Engine, PrivateLoader, PrivateOptimizer]:
    """Return a run's engine, with a mechanism of these keys, the loader of its batches, and its optimizer."""
    layout, parameters = layout_of(working), working.arrays()
    device = working.parameters[0].device
    if device.type == "cuda":  # the mechanism asks the machine itself, and knows no devices
        check_vectors(plan, layout, parameters, peers, *free_memory(device))
    mechanism = Mechanism(plan, layout, parameters, backend=backend, keys=keys, peers=peers)
    loader = PrivateLoader(source, mechanism)
    engine = Engine(gradient, mechanism, working, microbatch_size)
    engine.views = source.views
    return engine, loader, PrivateOptimizer(list(working.parameters) if params is None else params, engine, loader)
