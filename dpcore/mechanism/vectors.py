"""Every vector that a run keeps, one set for each tensor."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.mechanism.peers import Peers
from dpcore.plan.plan import Plan
from dpcore.spec.check import dtype_name
from dpcore.spec.free_memory import check_room, host_memory
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import UPDATE_RULES, Backend
from dpcore.stages.queries import Point, widest_window
from dpcore.stages.updates.schedules import is_adaptive

Whole = Callable[[Sequence[Any]], list[Any]]
"""Puts all processes' pieces together to whole vectors, one for each tensor."""


@dataclass
class RunVectors:
    """Flat arrays of the backend.

    Outer lists have one entry for each tensor of the layout; those that are *own*, one for each piece that this process
    owns (with one process the same). If a process stores only its own pieces of the parameters, all are own.
    """

    # The step's sum of clipped vectors, integers in float64. **Private**: it leaves the run only with noise, and is
    # never saved.
    totals: list[Any]
    noise_state: list[tuple[Any, ...]]  # own, float64; correlates the noise: **secret**
    square_noise_state: list[tuple[Any, ...]]  # likewise
    filter_state: list[tuple[Any, ...]]  # own; in GaLore's subspace if a tensor is projected
    moments: list[tuple[Any, ...]]  # likewise
    displacements: list[Any] | None  # d_{t-1}, if the query needs it
    history: list[list[Any]]  # x_{t-1}, x_{t-2}, ..., as many as the query's lags
    past: list[list[Any]]  # own; g_{t-1}, g_{t-2}, ..., as many as an adaptive filter remembers
    reference: list[Any] | None  # own; x at the last change of an adaptive learning rate
    scales: list[Any] | None  # the query's factors on gradients
    unscaled: list[Any] | None  # own; the sum of a cycle's unscaled averages, of which a delayed second moment is made
    averages: list[Any] | None  # own; of the parameters
    projections: dict[int, Any]  # GaLore's P of the tensors that are projected

    @classmethod
    def of(
        cls,
        plan: Plan,
        layout: Layout,
        parameters: Sequence[Any],
        backend: Backend[Any],
        separate_square: bool,
        peers: Peers,
    ) -> "RunVectors":
        """Make the vectors of a plan, all zero; `separate_square`: a second moment is released with its own noise."""
        method = plan.method
        if str(getattr(parameters[0], "device", "cpu")) == "cpu":
            check_vectors(plan, layout, parameters, peers, *host_memory())
        flat = [backend.zeros_like(parameter.reshape(-1)) for parameter in parameters]
        own = flat if peers.shards else [flat[tensor][start:stop] for tensor, start, stop in peers.pieces(layout)]
        projections: dict[int, Any] = {}
        small = list(own)
        if method.galore is not None and peers.world_size > 1:
            raise ArgumentError(
                f"galore={method.galore!r} in a run of {peers.world_size} processes: it projects whole matrices, but a "
                "process owns pieces of them; leave it out, or train in one process"
            )
        for i, entry in enumerate(layout.entries):
            if method.galore is not None and method.galore.projects(entry.shape):
                m, n = entry.shape
                projections[i] = backend.from_numpy(np.zeros((m, method.galore.rank), dtype_name(flat[i])))
                small[i] = backend.from_numpy(np.zeros(method.galore.rank * n, dtype_name(flat[i])))

        if method.galore is not None and not projections:
            raise ArgumentError(
                f"galore={method.galore!r}: projects no tensor, since none is a matrix with more than "
                f"{method.galore.rank} rows; take a smaller rank, or leave it out"
            )

        def several(count: int, of: Sequence[Any] = flat, dtype: str | None = None) -> list[tuple[Any, ...]]:
            return [tuple(backend.zeros_like(vector, dtype) for _ in range(count)) for vector in of]

        def one(needed: bool, of: Sequence[Any] = flat) -> list[Any] | None:
            return [backend.zeros_like(vector) for vector in of] if needed else None

        order = 0 if method.noise.strategy is None else method.noise.strategy.order
        adaptive: Any = method.filter if method.filter.adaptive else None
        return cls(
            totals=peers.totals(flat, backend),
            noise_state=several(order, own, "float64"),
            square_noise_state=several(order if separate_square else 0, own, "float64"),
            filter_state=several(method.filter.order, small),
            moments=several(UPDATE_RULES[method.update.rule], small),
            displacements=one(method.query.uses_displacement),
            history=[list(vectors) for vectors in several(method.query.lags)],
            past=[list(vectors) for vectors in several(0 if adaptive is None else adaptive.memory, own)],
            reference=one(is_adaptive(method.schedule), own),
            scales=one(method.preconditioning is not None),
            unscaled=one(method.update.second_moment == "delayed", own),
            averages=one(method.averaging is not None, own),
            projections=projections,
        )

    def start_moments(self, parameters: Sequence[Any], pieces: Sequence[Piece]) -> None:
        """Let the accelerated method's sequences begin at x_0."""
        for moments, (tensor, start, stop) in zip(self.moments, pieces, strict=True):
            for vector in moments:
                vector[...] = parameters[tensor].reshape(-1)[start:stop]

    def at(self, parameters: Sequence[Any], point: Point, step: int) -> list[Any]:
        """Return the parameters of a point of step `step`; see `Mechanism.at`."""
        if point.lag == 0:
            base, moved = list(parameters), self.displacements
        else:
            shapes, history = [parameter.shape for parameter in parameters], self.history
            base = [past[point.lag - 1].reshape(shape) for past, shape in zip(history, shapes, strict=True)]
            moved = None
            if point.displacement != 0 and point.lag < step:
                moved = [past[point.lag - 1] - past[point.lag] for past in history]
        if point.displacement == 0 or moved is None:
            return base
        return [x + point.displacement * d.reshape(x.shape) for x, d in zip(base, moved, strict=True)]

    def keep_history(self, parameters: Sequence[Any]) -> None:
        """Put x_t in front of the earlier parameters; the oldest one's memory takes it."""
        for past, parameter in zip(self.history, parameters, strict=True):
            if past:
                past.insert(0, past.pop())
                past[0][...] = parameter.reshape(-1)

    def public(self, layout: Layout, whole: Whole, held: Whole) -> dict[str, Any]:
        """Return the vectors that are functions of releases, by name.

        `whole` joins own ones, and `held` those that each process stores as it stores the parameters.
        """
        named: dict[str, Sequence[Sequence[Any]]] = {
            "filter": self.filter_state,
            "moment": self.moments,
            "average-before": self.past,
        }
        vectors = self._named(layout, whole, named) | self._named(layout, held, {"earlier": self.history})
        kept = {"displacement": self.displacements, "scale": self.scales}
        singles = {name: held(single) for name, single in kept.items() if single is not None}
        for name, own in {"average": self.averages, "reference": self.reference, "unscaled": self.unscaled}.items():
            if own is not None:
                singles[name] = whole(own)
        for i, entry in enumerate(layout.entries):
            vectors |= {f"{entry.name}/{name}": single[i] for name, single in singles.items()}
            if i in self.projections:
                vectors[f"{entry.name}/projection"] = self.projections[i]
        return vectors

    def secret(self, layout: Layout, whole: Whole) -> dict[str, Any]:
        """Return the states of correlated noise, by name: whoever has them can subtract part of it."""
        return self._named(layout, whole, {"noise": self.noise_state, "square-noise": self.square_noise_state})

    @staticmethod
    def _named(layout: Layout, whole: Whole, kinds: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, Any]:
        vectors: dict[str, Any] = {}
        for kind, of in kinds.items():
            for k, parts in enumerate(zip(*of, strict=True)):
                for entry, vector in zip(layout.entries, whole(parts), strict=True):
                    vectors[f"{entry.name}/{kind}/{k}"] = vector
        return vectors


def check_vectors(
    plan: Plan, layout: Layout, parameters: Sequence[Any], peers: Peers, free: int | None, where: str
) -> None:
    """Refuse a plan whose window, ring of noise or filter takes more than is free, before any of it is allocated."""
    method, dtype = plan.method, dtype_name(parameters[0])
    query, filtered, strategy = method.query, method.filter, method.noise.strategy
    held = sum(math.prod(parameter.shape) for parameter in parameters)
    own = held if peers.shards else sum(stop - start for _, start, stop in peers.pieces(layout))
    window = widest_window(query)
    # Each setting with its value, its vectors and their coordinates in this process, and what else it counts.
    settings: list[tuple[str, int, int, str, int]] = [
        (f"query={type(query).__name__}(...), lags={query.lags:,}", query.lags, held, dtype, 0)
        if window is None
        else (f"window={window:,}", query.lags, held, dtype, 1)
    ]
    kept, name = (filtered.memory, "length") if filtered.adaptive else (filtered.order, "order")  # type: ignore[attr-defined]
    # GaLore's are smaller, by how much only the run can say.
    size = own if method.galore is None else 0
    settings.append((f"filter={type(filtered).__name__}(...), {name}={kept:,}", kept, size, dtype, 0))
    if strategy is not None:
        said = f"strategy={strategy.describe()['kind']!r}, order={strategy.order:,}"
        settings.append((said, strategy.order, own, "float64", 0))
    for said, vectors, size, kind, others in settings:
        each = size * np.dtype(kind).itemsize
        if vectors and each:
            what = f"{said}: keeps {vectors:,} vectors of {size:,} {kind} coordinates"
            setting = said.split(", ")[-1].split("=")[0]
            check_room(vectors * each, what, f"take {setting}={(free or 0) // each + others:,} at most", free, where)
