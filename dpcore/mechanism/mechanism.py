"""The running mechanism: everything between per-example vectors and moved parameters, on either backend.

It owns the clipped sum, the noise, the filter's and the update's state; callers give it rows and parameters. Both the
array API (`dpcore.minimize`) and the PyTorch edge drive this one object, so a method has one meaning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.after_update import average, constrain
from dpcore.mechanism.composed_step import Composition, Normals, Observer
from dpcore.mechanism.noise_state import check_noise_range, rebuild
from dpcore.mechanism.vectors import RunVectors
from dpcore.plan.noise_variance import noise_variances
from dpcore.plan.plan import Plan
from dpcore.plan.scales import check_joint_scale
from dpcore.spec.backends import load_backend
from dpcore.spec.check import dtype_name
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import SECOND_MOMENT, Backend, NoiseRow, Slot, UpdateSettings
from dpcore.spec.stream import Stream
from dpcore.stages.clipping.running import RunningNorm
from dpcore.stages.queries import Phase, Point
from dpcore.stages.updates import SECOND_MOMENTS
from dpcore.statement.statement import Statement

STATE_FORMAT = 2


class Account(Protocol):
    """Pays for a run's releases: a ledger's run."""

    def before_draw(self, step: int) -> None:
        """Make sure that step `step` is paid for, before its batch is drawn; may give the mechanism other keys.

        Raises
        ------
        PrivacyError
            If the budget does not allow it; nothing was drawn or released then.
        """

    def before_release(self, step: int, settings: Sequence[UpdateSettings]) -> None:
        """Make sure that step `step` is paid for, and take note of the settings it moves the parameters by."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the statement."""

    @property
    def branches(self) -> int | None:
        """On how many branches the abandoned steps lie, at most; None where that is not known."""

    def describe(self, delta: float) -> dict[str, Any]:
        """Return what the statement says of the account, as JSON values."""


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
    account : Account or None
        Told of every batch before it is drawn and of every release before it is made.
    replay_end : int
        Rows below it may have left with these keys before; a ledger allows to release them once more, the same sums.
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
        check_joint_scale(plan.method.update, plan.sensitivity_at().contribution, layout.dimension)
        self.plan, self.layout, self.backend, self.keys, self.rng = plan, layout, backend, keys, rng
        self.step = 0
        self.releases = 0
        self.account: Account | None = None
        self.replay_end = 0
        self._run = os.urandom(8).hex()
        self._process = os.getpid()
        self._sizes = [sum(layout.entries[i].size for i in members) for members in plan.grouping_at().members]
        check_noise_range(plan, dtype_name(parameters[0]))
        self.vectors = RunVectors.of(plan, layout, parameters, backend, bool(self._square_noise(0)))
        adaptive = plan.adaptive_clip
        self._running: RunningNorm | None = None
        if adaptive is not None:
            self._running = RunningNorm(adaptive, plan.clip_at().max_grad_norm, plan.batch_size)
        self._summed = 0
        self._torn = False
        self._caller_noise = False
        self._statistics = self._filter.initial() if self._filter.adaptive else ()
        self._corrections = [0.0] * len(parameters)
        self._numbers: list[UpdateSettings] | None = None
        self._prepare_scale()

    @property
    def _filter(self) -> Any:
        return self.plan.method.filter

    def _square_noise(self, step: int) -> float:
        return 0.0 if self.plan.noise_multiplier == 0 else self.plan.square_noise_standard_deviation(step)

    @property
    def clip_norm(self) -> float | None:
        """The clip norm in force where it is adapted; a function of releases."""
        return None if self._running is None else self._running.norm

    @property
    def clip_norms(self) -> list[float] | None:
        """The clip norms C_0 .. C_t on the way to the present parameters, where they are adapted; they are released."""
        return None if self._running is None else self._running.at(self.step)

    def draw(self) -> NDArray[np.int64]:
        """Return the examples of this step, after the account has agreed to pay for it. Secret where sampling is."""
        if self.account is not None:
            self.account.before_draw(self.step)
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
        if len(rows) != len(self.vectors.totals):
            raise ArgumentError(f"len(rows)={len(rows)}: must be {len(self.vectors.totals)}, one block for each tensor")
        self._drop_earlier_sum()
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
        row = self.step
        if row >= self.plan.steps:
            raise PrivacyError(f"step={row + 1}: the plan, and its guarantee, end at step {self.plan.steps}")
        if os.getpid() != self._process:
            raise PrivacyError(
                "this process was forked from the one that built the run, and both would draw the same noise: build "
                "the run here, or load its state here, which forks the keys"
            )
        method = self.plan.method
        if (public is not None) != (method.update.second_moment == "public"):
            raise ArgumentError(
                "public: must be a gradient of public data for second_moment='public', and None for any other"
            )
        if self.account is not None:
            self.account.before_release(row, [method.update.settings()] if settings is None else list(settings))
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
        self.releases += row >= self.replay_end
        self._caller_noise |= normals is not None
        norm = self.clip_norm
        try:
            self.keys.begin(row, again=row < self.replay_end)
            self.vectors.keep_history(parameters)
            self._torn = True
            self._take(slots, row, numbers, normals, observe)
            self._torn = False
            constrain(self.backend, method, slots, numbers)
            norm = self._following_norm(row, normals)
        finally:
            self.discard()
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

    def _second_moments(self) -> list[Any]:
        """The bias-corrected second moment of each tensor, before the noise's share is taken off; a fresh array."""
        place = SECOND_MOMENT[self.plan.method.update.rule]
        if self.step == 0:
            return [moments[place] + 0 for moments in self.vectors.moments]
        return [m[place] / c for m, c in zip(self.vectors.moments, self._corrections, strict=True)]

    def negative_share(self) -> float:
        """Return the share of coordinates whose debiased second moment is negative; NaN where there is none.

        A function of released vectors.
        """
        if self.plan.method.update.rule not in SECOND_MOMENT or self._numbers is None:
            return float("nan")
        moments = self._second_moments()
        negative = sum(float((u < n.bias).sum()) for u, n in zip(moments, self._numbers, strict=True))
        return negative / float(sum(u.reshape(-1).shape[0] for u in moments))

    def _prepare_scale(self) -> None:
        """Make the next step's scale ``1 / (sqrt(nuhat) + eps)`` where that step begins a scaled phase."""
        query = self.plan.method.preconditioning
        if query is None or self.vectors.scales is None or query.phase(self.step) is not Phase.REFRESHED:
            return
        for scale, nu in zip(self.vectors.scales, self._second_moments(), strict=True):
            scale[...] = 1 / (nu**0.5 + query.scale_eps)

    def _drop_earlier_sum(self) -> None:
        """Begin the sum of a step with nothing, also where an interruption left the sum of the step before."""
        if self._summed != self.step:
            self.discard()
            self._summed = self.step

    def _mend_noise(self) -> None:
        """Make the states of correlated noise anew where an interruption cut short what advances them.

        In a tensor whose state missed a step, the noise would go on as if that step had never been: rows of another
        matrix than the one that is accounted.
        """
        strategy = self.plan.method.noise.strategy
        if self._torn and strategy is not None and strategy.order:
            arguments = self.backend, strategy, self.keys, self.layout, self.rng, self.step
            rebuild(self.vectors.noise_state, Stream.GRADIENT, *arguments)
            rebuild(self.vectors.square_noise_state, Stream.SECOND_MOMENT, *arguments)
        self._torn = False

    def discard(self) -> None:
        """Forget the sum of an unfinished step."""
        for total in self.vectors.totals:
            total[...] = 0
        if self._running is not None:
            self._running.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and NumPy arrays, in a public and a **secret** part.

        The secret part (keys, states of correlated noise) must be kept as safe as the data; without it the state is
        safe to publish.
        """
        self._mend_noise()

        def arrays(vectors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
            return {name: self.backend.to_numpy(vector) for name, vector in vectors.items()}

        return {
            "format": STATE_FORMAT,
            "public": {
                "step": self.step,
                "releases": self.releases,
                "run": self._run,
                "layout": self.layout.to_list(),
                "rng": self.rng,
                "caller_noise": self._caller_noise,
                "statistics": list(self._statistics),
                "corrections": list(self._corrections),
                **({} if self.clip_norms is None else {"clip_norms": self.clip_norms}),
                "arrays": arrays(self.vectors.public(self.layout)),
            },
            "secret": {**self.keys.to_dict(), "arrays": arrays(self.vectors.secret(self.layout))},
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
        mine = self.vectors.public(self.layout), self.vectors.secret(self.layout)
        saved = public["arrays"], secret["arrays"]
        if any(set(theirs) != set(vectors) for vectors, theirs in zip(mine, saved, strict=True)):
            raise ArgumentError("state: it was saved by a method with other filter or update state than this run's")
        if ("clip_norms" in public) != (self._running is not None):
            raise ArgumentError("state: must hold the clip norms of its run where the clip is adaptive, and only there")
        for vectors, theirs in zip(mine, saved, strict=True):
            for name, vector in vectors.items():
                vector[...] = self.backend.from_numpy(np.asarray(theirs[name]))
        if self._running is not None:
            self._running.norms = [float(norm) for norm in public["clip_norms"]]
        self.__dict__.pop("_variances", None)  # the plan may have taken over the saved noise multiplier
        self._statistics = tuple(public["statistics"])
        self._corrections = list(public["corrections"])
        self._caller_noise = bool(public["caller_noise"])
        self._numbers = None
        self._torn = False
        self.discard()
        self.step, self.rng = int(public["step"]), str(public["rng"])
        self.replay_end = 0
        # Saved by this very object, the state's releases are among ours; saved by another, they come on top.
        self.releases += 0 if public["run"] == self._run else int(public["releases"])
        self._process = os.getpid()
        keys = RunKeys.from_dict(secret)
        keep = self.plan.sampler.keeps_order
        self.keys = keys.fork(keep_sampling=keep, forks=self.keys.forks, row=self.step) if fork else keys

    def branch(self, keys: RunKeys, releases: int) -> None:
        """Go on under other keys, after `releases` releases in all."""
        self.keys, self.releases, self.replay_end = keys, max(releases, self.step), 0

    @property
    def released(self) -> int:
        """Rows of these keys' branch that may have left: the steps taken, or more where a replay is under way."""
        return max(self.step, self.replay_end)

    @property
    def abandoned(self) -> int:
        """Releases that the present parameters do not rest on: they cost privacy all the same."""
        return self.releases - self.released

    def statement(
        self, delta: float, *, caveats: tuple[str, ...] = (), note: str = "", software: dict[str, str] | None = None
    ) -> Statement:
        """Return the privacy statement for what was released so far."""
        return self.plan.statement(
            delta,
            steps_taken=self.released,
            abandoned=self.abandoned,
            branches=None if self.account is None else self.account.branches,
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
