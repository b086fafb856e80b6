"""Whether what a run keeps from step to step fits into memory: asked before any of it is allocated."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from dpcore.mechanism.peers import Peers
from dpcore.plan.plan import Plan
from dpcore.spec.check import dtype_name
from dpcore.spec.free_memory import check_room
from dpcore.spec.layout import Layout
from dpcore.stages.queries import widest_window


class Kept(NamedTuple):
    """Vectors that a setting asks for: `said` names it with its value, and `less` what to take instead."""

    vectors: int
    size: int  # coordinates of each, in this process
    said: str
    less: str
    beyond: int = 0  # what the setting counts beside these vectors
    dtype: str | None = None  # where it is not the parameters'


def check_vectors(
    plan: Plan, layout: Layout, parameters: Sequence[Any], peers: Peers, free: int | None, where: str
) -> None:
    """Refuse a plan whose window, ring of noise or filter takes more than is free.

    Raises
    ------
    ArgumentError
        With the setting, its value, what it would take and how much of it fits.
    """
    dtype = dtype_name(parameters[0])
    held = sum(math.prod(parameter.shape) for parameter in parameters)
    own = held if peers.shards else sum(stop - start for _, start, stop in peers.pieces(layout))
    for kept in _kept(plan, held, own):
        kind = kept.dtype or dtype
        each = kept.size * np.dtype(kind).itemsize
        if kept.vectors and each:
            most = max((free or 0) // each + kept.beyond, kept.beyond)
            what = f"{kept.said}: keeps {kept.vectors:,} vectors of {kept.size:,} {kind} coordinates"
            check_room(kept.vectors * each, what, f"{kept.less} of at most {most:,}", free, where)


def _kept(plan: Plan, held: int, own: int) -> Iterator[Kept]:
    method = plan.method
    query, window = method.query, widest_window(method.query)
    if window is None:
        yield Kept(query.lags, held, f"query={type(query).__name__}(...), lags={query.lags:,}", "take lags")
    else:
        yield Kept(query.lags, held, f"window={window:,}", "take a window", beyond=1)
    strategy: Any = method.noise.strategy
    if strategy is not None:
        said = f"strategy={strategy.describe()['kind']!r}, order={strategy.order:,}"
        yield Kept(strategy.order, own, said, "take a strategy with fewer bands or factors: an order", dtype="float64")
    filtered: Any = method.filter
    said = f"filter={type(filtered).__name__}(...)"
    if filtered.adaptive:
        yield Kept(filtered.memory, own, f"{said}, length={filtered.memory:,}", "take a length")
    # GaLore's are smaller, by what only the run knows.
    size = own if method.galore is None else 0
    yield Kept(filtered.order, size, f"{said}, order={filtered.order:,}", "take a filter with an order")
