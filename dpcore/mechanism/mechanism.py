"""The running mechanism: everything between per-example vectors and moved parameters, on either backend.

It owns the clipped sum, the noise, the filter's and the update's state; callers give it rows and parameters. Both the
array API (`dpcore.minimize`) and the PyTorch edge drive this one object, so a method has one meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.after_update import average, constrain
from dpcore.mechanism.composed_step import Composition, Normals, Observer
from dpcore.mechanism.state import MechanismState
from dpcore.plan.noise_variance import noise_variances
from dpcore.spec.backends import load_backend
from dpcore.spec.check import dtype_name
from dpcore.spec.ops import SECOND_MOMENT, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import Stream
from dpcore.stages.queries import Point
from dpcore.stages.updates import SECOND_MOMENTS
from dpcore.statement.build import state
from dpcore.statement.statement import Statement


class Mechanism(MechanismState):
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

    Threads take turns call by call (`dpcore.mechanism.turns`); hold `turns.lock` to make several calls one.

    Attributes
    ----------
    step : int
        Steps taken on the way to the present parameters.
    branches : Branches
        Which rows left on which branch, as far as this object and the states that it loaded know.
    account : Account or None
        Told of every batch before it is drawn and of every release before it is made.
    turns : Turns
    """

    def draw(self) -> NDArray[np.int64]:
        """Return the examples of this step, after the account has agreed to pay for it. Secret where sampling is."""
        with self.turns.alone("draw"):
            if self.account is not None:
                self.account.before_draw(self.step)
            self.turns.drew(self.step)
            return self.plan.sampler.indices(self.keys.sampling, self.step)

    def points(self) -> tuple[Point, ...]:
        """Return where this step's gradients are taken, and with which weights they are combined."""
        return self.plan.method.query.points(self.step)

    def at(self, parameters: Sequence[Any], point: Point) -> list[Any]:
        """Return the parameters of a point: the present ones themselves, kept earlier ones, or fresh displaced arrays.

        None of them may be written to; the present parameters are never moved for a point.
        """
        if point.lag == 0:
            base, moved = list(parameters), self.vectors.displacements
        else:
            shapes, history = [parameter.shape for parameter in parameters], self.vectors.history
            base = [past[point.lag - 1].reshape(shape) for past, shape in zip(history, shapes, strict=True)]
            moved = None
            if point.displacement != 0 and point.lag < self.step:
                moved = [past[point.lag - 1] - past[point.lag] for past in history]
        if point.displacement == 0 or moved is None:
            return base
        return [x + point.displacement * d.reshape(x.shape) for x, d in zip(base, moved, strict=True)]

    def add(self, rows: Sequence[Any]) -> None:
        """Scale the examples' vectors where the query does, clip them, and add them to the step's sum.

        Parameters
        ----------
        rows : sequence of (B, d_l) arrays
            One block for each tensor, of its dtype; B is the same for all and may be 0.
        """
        with self.turns.alone("add"):
            self._add(rows)

    def _add(self, rows: Sequence[Any]) -> None:
        if len(rows) != len(self.vectors.totals):
            raise ArgumentError(f"len(rows)={len(rows)}: must be {len(self.vectors.totals)}, one block for each tensor")
        self.turns.check(self.step)
        self._drop_earlier_sum()
        self.turns.adding()
        now = self.step, self.clip_norm
        clip, grouping = self.plan.clip_at(*now), self.plan.grouping_at(*now)
        if self.vectors.scales is not None and self.plan.scaled(self.step):
            # The scaled vector itself is formed, so that what is clipped is what is summed, rounding included. Without
            # NumPy's warning of an overflow, which would tell of one example.
            with np.errstate(all="ignore"):
                rows = [block * scale for block, scale in zip(rows, self.vectors.scales, strict=True)]
        norms = [self.backend.row_norms([rows[i] for i in members]) for members in grouping.members]
        factors = self.backend.clip_factors(norms, clip.rule, grouping.bounds, self._sizes, dtype_name(rows[0]))
        weights: list[Any] = [None] * len(rows)
        for members, factor in zip(grouping.members, factors, strict=True):
            for i in members:
                weights[i] = factor
        self.backend.weighted_sum(rows, weights, self.vectors.totals)
        if self._running is not None:
            self._running.add(norms[0])

    def clipped_mean_norm(self) -> float:
        """Return ``||sum of clipped vectors|| / (B C_eff)``, of the sum so far.

        A **private diagnostic**: whoever publishes it gives up the guarantee.
        """
        norm = math.sqrt(sum(float((total * total).sum()) for total in self.vectors.totals))
        return norm / (self.plan.batch_size * self.plan.sensitivity_at(self.step, self.clip_norm).contribution)

    def release(
        self,
        parameters: Sequence[Any],
        settings: Sequence[UpdateSettings] | None = None,
        normals: Normals | None = None,
        *,
        public: Sequence[Any] | None = None,
        observe: Observer | None = None,
    ) -> None:
        """Add noise to the sum, filter it, move the parameters, and begin the next step.

        Parameters
        ----------
        parameters : sequence of contiguous arrays, in place
        settings : sequence of UpdateSettings, optional
            One for each tensor; the method's by default. The schedule's factor is applied to them.
        normals : callable, optional
            ``normals(row, stream)`` returns standard normals, (d_l,) for each tensor, instead of the stream's: for
            tests and study; of the clip norm's stream the very first is used. From then on the statement says that the
            run is not private.
        public : sequence of arrays, optional
            A gradient of public data, where the update's second moment is made of one.
        observe : callable, optional
            Given the released averages and what the filter made of them, one flat array for each tensor.

        Raises
        ------
        ArgumentError
            If `public` is given or left out where it must not be.
        PrivacyError
            Beyond the last planned step, for further steps are not accounted for; in a process forked from the one
            that built the run, and for a row that was released before, for two sums must not share noise.
        """
        with self.turns.alone("release"):
            self.turns.check(self.step)
            self._release(parameters, settings, normals, public, observe)

    def _release(
        self,
        parameters: Sequence[Any],
        settings: Sequence[UpdateSettings] | None,
        normals: Normals | None,
        public: Sequence[Any] | None,
        observe: Observer | None,
    ) -> None:
        row = self.step
        if row >= self.plan.steps:
            raise PrivacyError(f"step={row + 1}: the plan, and its guarantee, end at step {self.plan.steps}")
        method = self.plan.method
        if (public is not None) != (method.update.second_moment == "public"):
            raise ArgumentError(
                "public: must be a gradient of public data for second_moment='public', and None for any other"
            )
        if self.account is not None:
            self.account.before_release(row)
        numbers = self._prepared(row, settings, len(parameters))
        if method.update.rule == "accelerated" and row == 0:
            for moments, parameter in zip(self.vectors.moments, parameters, strict=True):
                for vector in moments:
                    vector[...] = parameter.reshape(-1)
        self._drop_earlier_sum()
        self._mend_noise()
        slots = self._slots(parameters, public)
        # Before the draw, so that an interruption at any moment leaves the row spent: noise that may have been seen is
        # never added to another sum.
        self.step += 1
        self._caller_noise |= normals is not None
        norm = self.clip_norm
        try:
            self.keys.begin(row)
            self.vectors.keep_history(parameters)
            self._torn = True
            self._take(slots, row, numbers, normals, observe)
            self._torn = False
            constrain(self.backend, method, slots, numbers)
            norm = self._following_norm(row, normals)
        finally:
            self._discard()
            self.turns.drew(None)
            if self._running is not None and norm is not None:
                self._running.keep(row + 1, norm)
            # After an interruption, too: the next step may be a scaled one.
            self._numbers = numbers
            for i, used in enumerate(numbers):
                self._corrections[i] = 1 - used.beta2 ** (row + 1) if "adam" in method.update.rule else 1.0
            self._prepare_scale()
        if method.averaging is not None and self.vectors.averages is not None:
            average(method.averaging, self.vectors.averages, self._outcome(parameters), row)

    def _following_norm(self, row: int, normals: Normals | None) -> float | None:
        """Return the next step's clip norm, where it is adapted: the second release of this step.

        Its one normal number is the float64 definition's on every backend, and no other draw's: a stream of its own.
        """
        if self._running is None:
            return None
        if normals is not None:
            return self._running.following(float(normals(row, Stream.CLIP_BOUND)[0][0]))
        reference = load_backend("numpy")
        z = reference.normal(self.keys.noise, row, Stream.CLIP_BOUND, 0, 1, dtype="float64", rng=self.rng)
        return self._running.following(float(z[0]))

    def _prepared(self, row: int, settings: Sequence[UpdateSettings] | None, count: int) -> list[UpdateSettings]:
        """Return each tensor's numbers of this step: schedule, bias of the second moment, denominators."""
        method = self.plan.method
        chosen = [method.update.settings()] * count if settings is None else list(settings)
        factor = 1.0 if method.schedule is None else method.schedule.factor(row, self.plan.steps)
        variances = self._variances if method.update.bias_corrected else None
        known: dict[UpdateSettings, UpdateSettings] = {}
        for numbers in chosen:
            if numbers not in known:
                scheduled = numbers._replace(learning_rate=factor * numbers.learning_rate)
                known[numbers] = method.update.prepared(scheduled, row, variances)
        return [known[numbers] for numbers in chosen]

    @cached_property
    def _variances(self) -> NDArray[np.float64]:
        """The variance of the noise in each coordinate of what is squared, by step."""
        method = self.plan.method
        seed = self.plan.noise_standard_deviation() / self.plan.batch_size
        filtered = method.filter if method.update.second_moment == "filtered" else None
        return seed**2 * noise_variances(filtered, method.noise.strategy, self.plan.steps)

    def _slots(self, parameters: Sequence[Any], public: Sequence[Any] | None) -> list[Slot[Any]]:
        scaled = self.vectors.scales is not None and self.plan.scaled(self.step)
        return [
            Slot(
                parameter=parameter.reshape(-1),
                total=self.vectors.totals[i],
                first=entry.first,
                filter_state=self.vectors.filter_state[i],
                moments=self.vectors.moments[i],
                displacement=None if self.vectors.displacements is None else self.vectors.displacements[i],
                noise_state=self.vectors.noise_state[i],
                scale=self.vectors.scales[i] if scaled and self.vectors.scales is not None else None,
                square=None if public is None else public[i].reshape(-1) ** 2,
            )
            for i, (entry, parameter) in enumerate(zip(self.layout.entries, parameters, strict=True))
        ]

    def _take(
        self,
        slots: list[Slot[Any]],
        row: int,
        numbers: list[UpdateSettings],
        normals: Normals | None,
        observe: Observer | None,
    ) -> None:
        """Take the step by the fused operation, or by the plain ones where it does not cover the method."""
        plan, method = self.plan, self.plan.method
        strategy = method.noise.strategy
        scale, square_scale = plan.noise_standard_deviation(row, self.clip_norm), self._square_noise(row)
        noise = NoiseRow(self.keys.noise, row, Stream.GRADIENT, scale, self.rng)
        square_noise = NoiseRow(self.keys.noise, row, Stream.SECOND_MOMENT, square_scale, self.rng)
        square = SECOND_MOMENTS[method.update.second_moment]
        correlation = None if strategy is None else strategy.coefficients(row)
        streamed = strategy is None or (correlation is not None and not square_scale)
        plain = normals is not None or observe is not None or self._filter.adaptive or method.galore is not None
        if streamed and not plain:
            self.backend.step(
                slots,
                noise,
                plan.batch_size,
                self._filter.coefficients(row),
                method.update.rule,
                numbers,
                row + 1,
                correlation=correlation,
                square=square,
                square_noise=square_noise if square_scale else None,
            )
            return
        kept = self.vectors
        composition = Composition(
            self.backend, method, plan.batch_size, self.keys, self.layout, kept.projections, kept.past, self.rng
        )
        self._statistics = composition.step(
            slots, noise, square, square_noise, kept.square_noise_state, self._statistics, numbers, normals, observe
        )

    def _outcome(self, parameters: Sequence[Any]) -> list[Any]:
        """The parameters, or y where the accelerated method has taken a step."""
        if self.plan.method.update.rule != "accelerated" or self.step == 0:
            return list(parameters)
        return [y.reshape(p.shape) for (_, y), p in zip(self.vectors.moments, parameters, strict=True)]

    def output(self, parameters: Sequence[Any]) -> list[Any]:
        """Return the method's answer: the average where one is kept, y of the accelerated method, or the parameters.

        Arrays of the parameters' shapes, not to be written to.
        """
        if self.vectors.averages is None or self.step == 0:
            return self._outcome(parameters)
        return [average.reshape(p.shape) for average, p in zip(self.vectors.averages, parameters, strict=True)]

    def negative_share(self) -> float:
        """Return the share of coordinates whose debiased second moment is negative; NaN where there is none.

        A function of released vectors.
        """
        if self.plan.method.update.rule not in SECOND_MOMENT or self._numbers is None:
            return float("nan")
        moments = self._second_moments()
        negative = sum(float((u < n.bias).sum()) for u, n in zip(moments, self._numbers, strict=True))
        return negative / float(sum(u.reshape(-1).shape[0] for u in moments))

    def _drop_earlier_sum(self) -> None:
        """Begin the sum of a step with nothing, also where an interruption left the sum of the step before."""
        if self._summed != self.step:
            self._discard()
            self._summed = self.step

    def discard(self) -> None:
        """Forget the sum of an unfinished step."""
        with self.turns.alone("discard"):
            self._discard()

    def statement(
        self, delta: float, *, caveats: tuple[str, ...] = (), note: str = "", software: dict[str, str] | None = None
    ) -> Statement:
        """Return the privacy statement for what was released so far."""
        return state(
            self.plan,
            delta,
            steps_taken=self.step,
            abandoned=self.abandoned,
            keys=self.keys,
            backend=self.backend.name,
            rng=self.rng,
            layout=self.layout,
            caller_noise=self._caller_noise,
            caveats=caveats if self.account is None else (*caveats, *self.account.caveats),
            ledger={} if self.account is None else self.account.describe(delta),
            note=note,
            software=software,
        )
