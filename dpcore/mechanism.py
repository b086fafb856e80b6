"""The running mechanism: everything between per-example vectors and moved parameters, on either backend.

It owns the clipped sum, the noise, the filter's and the update's state; callers give it rows and parameters. Both the
array API (`dpcore.minimize`) and the PyTorch edge drive this one object, so a method has one meaning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.keys import RunKeys
from dpcore.plan import Plan
from dpcore.queries import Point
from dpcore.report.statement import Statement
from dpcore.spec.check import dtype_name
from dpcore.spec.layout import Layout
from dpcore.spec.ops import UPDATE_RULES, Backend, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import Stream

STATE_FORMAT = 1


class Mechanism:
    """One run's private steps.

    Parameters
    ----------
    plan : Plan
        With a noise multiplier.
    layout : Layout
        The run's tensors, in the order of `plan.tensors`.
    parameters : sequence of arrays
        Of `backend`; read here for their sizes and dtype (float32 or float64), changed by `release`.
    backend : Backend
        The object keeps it.
    keys : RunKeys
        Secret.
    rng : str
        "chacha20", or "philox" for simulations.

    Notes
    -----
    A step is any number of `add` and then one `release`. The sum belongs to the private data and never leaves this
    object un-noised.

    Attributes
    ----------
    step : int
        Steps taken on the way to the present parameters.
    releases : int
        All releases that this object knows of: `step`, and steps that were abandoned by going back to a checkpoint.
    """

    def __init__(
        self,
        plan: Plan,
        layout: Layout,
        parameters: Sequence[Any],
        *,
        backend: Backend[Any],
        keys: RunKeys,
        rng: str = "chacha20",
    ) -> None:
        plan.check_covered()
        if tuple(entry.name for entry in layout.entries) != plan.tensors:
            raise ArgumentError(f"layout: its tensors must be those of the plan, {', '.join(plan.tensors)}")
        method = plan.method
        self.plan, self.layout, self.backend, self.keys, self.rng = plan, layout, backend, keys, rng
        self.step = 0
        self.releases = 0
        self._run = os.urandom(8).hex()
        self._process = os.getpid()
        self._sizes = [sum(layout.entries[i].size for i in members) for members in plan.grouping.members]

        def vectors(count: int) -> list[tuple[Any, ...]]:
            return [tuple(backend.zeros_like(p.reshape(-1)) for _ in range(count)) for p in parameters]

        self._totals = [vector for (vector,) in vectors(1)]
        self._filter_state = vectors(method.filter.order)
        self._moments = vectors(UPDATE_RULES[method.update.rule])
        self._displacements = [vector for (vector,) in vectors(1)] if method.query.uses_displacement else None

    def points(self) -> tuple[Point, ...]:
        """Return where this step's gradients are taken, and with which weights they are combined."""
        return self.plan.method.query.points(self.step)

    def displaced(self, parameters: Sequence[Any], displacement: float) -> list[Any]:
        """Return fresh arrays ``x_t + displacement * d_{t-1}``; the parameters themselves are never moved for it."""
        if displacement == 0 or self._displacements is None:
            return list(parameters)
        return [
            parameter + displacement * vector.reshape(parameter.shape)
            for parameter, vector in zip(parameters, self._displacements, strict=True)
        ]

    def add(self, rows: Sequence[Any]) -> None:
        """Clip the examples' vectors and add them to the step's sum.

        Parameters
        ----------
        rows : sequence of (B, d_l) arrays
            One block for each tensor, of its dtype; B is the same for all and may be 0.
        """
        clip, grouping = self.plan.method.clip, self.plan.grouping
        if len(rows) != len(self._totals):
            raise ArgumentError(f"len(rows)={len(rows)}: must be {len(self._totals)}, one block for each tensor")
        norms = [self.backend.row_norms([rows[i] for i in members]) for members in grouping.members]
        factors = self.backend.clip_factors(norms, clip.rule, grouping.bounds, self._sizes, dtype_name(rows[0]))
        weights: list[Any] = [None] * len(rows)
        for members, factor in zip(grouping.members, factors, strict=True):
            for i in members:
                weights[i] = factor
        self.backend.weighted_sum(rows, weights, self._totals)

    def release(
        self,
        parameters: Sequence[Any],
        settings: Sequence[UpdateSettings] | None = None,
        normals: Sequence[Any] | None = None,
    ) -> None:
        """Add noise to the sum, filter it, move the parameters, and begin the next step.

        Parameters
        ----------
        parameters : sequence of contiguous arrays, in place
        settings : sequence of UpdateSettings, optional
            One for each tensor; the method's by default.
        normals : sequence of (d_l,) arrays, optional
            Take these for the standard normals instead of the stream's: for tests and study.

        Raises
        ------
        PrivacyError
            Beyond the last planned step, for further steps are not accounted for; in a process forked from the one
            that built the run, and for a row that was released before, for two sums must not share noise.
        """
        row = self.step
        if row >= self.plan.steps:
            raise PrivacyError(f"step={row + 1}: the plan, and its guarantee, end at step {self.plan.steps}")
        if os.getpid() != self._process:
            raise PrivacyError(
                "this process was forked from the one that built the run, and both would draw the same noise: build "
                "the run here, or load its state here, which forks the keys"
            )
        method = self.plan.method
        scale = self.plan.noise_standard_deviation
        if normals is not None:
            for total, z in zip(self._totals, normals, strict=True):
                total += scale * z
            scale = 0.0
        slots = [
            Slot(
                parameter=parameter.reshape(-1),
                total=self._totals[i],
                first=entry.first,
                filter_state=self._filter_state[i],
                moments=self._moments[i],
                displacement=None if self._displacements is None else self._displacements[i],
            )
            for i, (entry, parameter) in enumerate(zip(self.layout.entries, parameters, strict=True))
        ]
        noise = NoiseRow(self.keys.noise, row, Stream.GRADIENT, scale, self.rng)
        default = method.update.settings()
        # Before the draw, so that an interruption at any moment leaves the row spent: noise that may have been seen is
        # never added to another sum.
        self.step += 1
        self.releases += 1
        try:
            self.keys.begin(row)
            self.backend.step(
                slots,
                noise,
                self.plan.batch_size,
                method.filter.coefficients(row),
                method.update.rule,
                [default] * len(slots) if settings is None else settings,
                row + 1,
            )
        finally:
            self.discard()

    def discard(self) -> None:
        """Forget the sum of an unfinished step."""
        for total in self._totals:
            total[...] = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and NumPy arrays, in a public and a **secret** part.

        The secret part (keys) must be kept as safe as the data; without it the state is safe to publish.
        """
        arrays: dict[str, NDArray[Any]] = {}
        for name, vectors in self._vectors().items():
            arrays[name] = self.backend.to_numpy(vectors)
        return {
            "format": STATE_FORMAT,
            "public": {
                "step": self.step,
                "releases": self.releases,
                "run": self._run,
                "layout": self.layout.to_list(),
                "rng": self.rng,
                "arrays": arrays,
            },
            "secret": {
                "noise_key": self.keys.noise,
                "sampling_key": self.keys.sampling,
                "origin": self.keys.origin,
                "forks": self.keys.forks,
            },
        }

    def load_state_dict(self, state: Mapping[str, Any], *, fork: bool = True) -> None:
        """Take over a saved state.

        Parameters
        ----------
        state : mapping
            From `state_dict`.
        fork : bool
            Draw fresh noise, and fresh batches where batches are drawn, from here on (the default, always safe). False
            goes on with the saved keys, bit for bit as if never interrupted: only for a caller who knows that no step
            after this state was ever released, since one row of noise on two different sums gives both away.

        Notes
        -----
        Releases that this object made and now goes back behind stay counted (`releases`). What other processes
        released after the state was saved cannot be known here; the statement says so.

        Raises
        ------
        ArgumentError
            If the state is of another format, layout, or method.
        """
        if state.get("format") != STATE_FORMAT:
            raise ArgumentError(
                f"format={state.get('format')!r}: must be {STATE_FORMAT}, a state saved by this version"
            )
        public, secret = state["public"], state["secret"]
        if public["layout"] != self.layout.to_list():
            raise ArgumentError("state: its layout of tensors differs from this run's, so its noise rows would not fit")
        vectors = self._vectors()
        if set(public["arrays"]) != set(vectors):
            raise ArgumentError("state: it was saved by a method with other filter or update state than this run's")
        for name, vector in vectors.items():
            vector[...] = self.backend.from_numpy(np.asarray(public["arrays"][name]))
        self.discard()
        self.step, self.rng = int(public["step"]), str(public["rng"])
        # Saved by this very object, the state's releases are among ours; saved by another, they come on top.
        self.releases += 0 if public["run"] == self._run else int(public["releases"])
        self._process = os.getpid()
        saved = RunKeys(
            secret["origin"], int(secret["forks"]), noise=secret["noise_key"], sampling=secret["sampling_key"]
        )
        keep_sampling = self.plan.sampler.keeps_order
        self.keys = saved.fork(keep_sampling=keep_sampling, forks=self.keys.forks) if fork else saved

    @property
    def abandoned(self) -> int:
        """Releases that the present parameters do not rest on: they cost privacy all the same."""
        return self.releases - self.step

    def statement(
        self, delta: float, *, caveats: tuple[str, ...] = (), note: str = "", software: dict[str, str] | None = None
    ) -> Statement:
        """Return the privacy statement for what was released so far."""
        return self.plan.statement(
            delta,
            steps_taken=self.step,
            abandoned=self.abandoned,
            keys=self.keys,
            backend=self.backend.name,
            rng=self.rng,
            layout=self.layout,
            caveats=caveats,
            note=note,
            software=software,
        )

    def _vectors(self) -> dict[str, Any]:
        vectors: dict[str, Any] = {}
        for i, entry in enumerate(self.layout.entries):
            vectors |= {f"{entry.name}/filter/{k}": v for k, v in enumerate(self._filter_state[i])}
            vectors |= {f"{entry.name}/moment/{k}": v for k, v in enumerate(self._moments[i])}
            if self._displacements is not None:
                vectors[f"{entry.name}/displacement"] = self._displacements[i]
        return vectors
