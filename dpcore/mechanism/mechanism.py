"""The running mechanism: everything between per-example vectors and moved parameters, on either backend.

It owns the clipped sum, the noise, the filter's and the update's state; callers give it rows and parameters. Both the
array API (`dpcore.minimize`) and the PyTorch edge drive this one object, so a method has one meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from dpcore.errors import ArgumentError
from dpcore.mechanism.composed_step import Composition, Normals, Observer
from dpcore.mechanism.drawing import DrawnBatches
from dpcore.mechanism.peers import Peers
from dpcore.mechanism.preparation import check_release, numbers_of, slots_of
from dpcore.spec.backends import load_backend
from dpcore.spec.ops import Backend, NoiseRow, Slot, UpdateSettings
from dpcore.spec.repeating import repeat as once
from dpcore.spec.stream import Stream
from dpcore.stages.clipping.blocks import Block, as_blocks, scaled
from dpcore.stages.clipping.clipped_sum import add_clipped
from dpcore.stages.clipping.rows import as_rows
from dpcore.stages.method import Method
from dpcore.stages.queries import Point
from dpcore.stages.updates import SECOND_MOMENTS
from dpcore.stages.updates.averaging import Averaging
from dpcore.statement.build import state
from dpcore.statement.statement import Statement


class Mechanism(DrawnBatches):
    """One run's private steps: any number of `add` and then one `release` each.

    The sum belongs to the private data and never leaves this object un-noised. Threads take turns call by call
    (`dpcore.mechanism.state`); hold `turns.lock` to make several calls one.

    Parameters
    ----------
    plan : Plan
        With a noise multiplier.
    layout : Layout
        The run's tensors, in the order of `plan.tensors`.
    parameters : sequence of arrays
        Of `backend`; read here for their sizes and dtype (float32 or float64), changed by `release`.
    backend : Backend
    keys : RunKeys
        Secret.
    rng : str
        "chacha20", or "philox" for simulations.
    peers : Peers, optional
        The processes that take the steps together; by default this one is alone. `add` takes this process's share of
        the batch, and `release` is all processes' together.
    """

    def points(self) -> tuple[Point, ...]:
        """Return where this step's gradients are taken, and with which weights they are combined."""
        return self.plan.method.query.points(self.step)

    def at(self, parameters: Sequence[Any], point: Point) -> list[Any]:
        """Return a point's parameters, not to be written to: the present, kept earlier, or displaced copies."""
        return self.vectors.at(parameters, point, self.step)

    def add(self, blocks: Sequence[Any]) -> None:
        """Scale the examples' vectors where the query does, clip them, and add them to the step's sum.

        Parameters
        ----------
        blocks : sequence of `Block` or (B, d_l) arrays
            One for each tensor, of its dtype; B is the same for all and may be 0.
        """
        if len(blocks) != (count := len(self.vectors.totals)):
            raise ArgumentError(f"len(blocks)={len(blocks)}: must be {count}, one block for each tensor")
        checked = as_rows(blocks, self.layout.sizes) or as_blocks(blocks, self.layout.sizes)
        with self.turns.alone("add"):
            self.turns.check(self.step)
            self._drop_earlier_sum()
            self.turns.adding()
            self._dirty = True
            self._add(checked)

    def _add(self, blocks: list[Block]) -> None:
        now = self.step, self.clip_norm
        clip, grouping = self.plan.clip_at(*now), self.plan.grouping_at(*now)
        scales: list[Any] = [None] * len(blocks)
        if self.vectors.scales is not None and self.plan.scaled(self.step):
            blocks, scales = scaled(blocks), self.vectors.scales
        repeat = once if self.peers.shards else self.backend.repeat  # they keep what is added, to send it
        norms = repeat(
            add_clipped, self.backend, blocks, clip.rule, grouping, self._sizes, self.vectors.totals, scales,
            self.peers.add_sums,
        )  # fmt: skip
        if self._running is not None:
            self._running.add(norms)

    def join(self) -> None:
        """End a micro-batch, after any number of `add`; all processes do so equally often."""
        with self.turns.alone("join"):
            # A process that has added nothing gets the others' sums all the same.
            self._drop_earlier_sum()
            self._dirty = True
            self.peers.join(self.vectors.totals, self.layout, self.backend)

    def clipped_mean_norm(self) -> float:
        """Return ``||sum of clipped vectors|| / (B C_eff)``: **private**, publishing it gives up the guarantee."""
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
            ``normals(row, stream)`` returns standard normals, (d_l,) for each tensor (of the clip norm's stream the
            very first is used), instead of the stream's: for tests and study. The statement then says: not private.
        public : sequence of arrays, optional
            A gradient of public data, where the update's second moment is made of one.
        observe : callable, optional
            Given the released averages and what the filter made of them, one flat array for each tensor.

        Raises
        ------
        ArgumentError, PrivacyError
            If `public` is out of place; beyond the last planned step, in a forked process, for a row released before.
        """
        with self.turns.alone("release"):
            self.turns.check(self.step)
            row, method, scaled = self.step, self.plan.method, self.plan.scaled(self.step)
            check_release(self.plan, row, public)
            if self.peers.world_size > 1 and (normals is not None or observe is not None):
                raise ArgumentError(
                    f"normals, observe (private.record_gradients): must be None in a run of {self.peers.world_size} "
                    "processes, each of which sees its own piece of a release"
                )
            self._agree(settings)
            if self.account is not None:
                self.account.before_release(row)
            variances = self._variances if method.update.bias_corrected else None
            numbers = numbers_of(self.plan, row, settings, parameters, variances)
            if method.update.rule == "accelerated" and row == 0:
                self.vectors.start_moments(parameters, self.inside)
            self._drop_earlier_sum()
            self._mend_noise()
            # Before the draw, so that an interruption at any moment leaves the row spent: noise that may have been seen
            # is never added to another sum.
            self.step += 1
            self._caller_noise |= normals is not None
            norm = self.clip_norm
            own_numbers = [numbers[piece.tensor] for piece in self.pieces]
            self._torn = True
            try:
                self.keys.begin(row)
                self.vectors.keep_history(parameters)
                contribution = self.plan.sensitivity_at(row, norm).contribution
                totals = self.peers.reduced(self.vectors.totals, self.pieces, contribution)
                slots = slots_of(self.vectors, self.own, self.inside, totals, parameters, public, scaled)
                self._take(slots, row, own_numbers, normals, observe)
                self._torn = False
                constrain(self.backend, method, slots, own_numbers, self.peers)
                self._spread(parameters)
                norm = self._following_norm(row, normals)
            finally:  # after an interruption, too: the next step may be a scaled one
                self._end_step(row, numbers, norm)
            if method.averaging is not None and self.vectors.averages is not None:
                average(method.averaging, self.vectors.averages, self._outcome(parameters), row)

    def _following_norm(self, row: int, normals: Normals | None) -> float | None:
        """Return the next step's clip norm, where it is adapted: the second release of this step.

        Its one normal number is the float64 definition's on every backend, and no other draw's: a stream of its own.
        """
        if self._running is None:
            return None
        self._running.add_up(self.peers.added)
        if normals is not None:
            return self._running.following(float(normals(row, Stream.CLIP_BOUND)[0][0]))
        reference = load_backend("numpy")
        z = reference.normal(self.keys.noise, row, Stream.CLIP_BOUND, 0, 1, dtype="float64", rng=self.rng)
        return self._running.following(float(z[0]))

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
        composition = Composition(
            self.backend, method, plan.batch_size, self.keys, self.own, self.vectors, self.rng,
            self.peers, self.layout.dimension,
        )  # fmt: skip
        self._statistics = composition.step(
            slots, noise, square, square_noise, self._statistics, numbers, normals, observe
        )

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


def constrain(
    backend: Backend[Any],
    method: Method,
    slots: Sequence[Slot[Any]],
    numbers: Sequence[UpdateSettings],
    peers: Peers,
) -> None:
    """Project onto the ball of the method's `radius` around 0 after an update, in place; the displacements too.

    What is projected are the parameters, or both sequences of the accelerated method, of which they are a mean;
    `numbers` are those that the update used.
    """
    if method.radius is None:
        return
    accelerated = method.update.rule == "accelerated"
    parameters = [[slot.parameter for slot in slots]]
    sequences: Iterable[Sequence[Any]] = zip(*(s.moments for s in slots), strict=True) if accelerated else parameters
    before = [None if slot.displacement is None else slot.parameter + 0 for slot in slots]
    for vectors in sequences:
        own = float(backend.row_norms([vector.reshape(1, -1) for vector in vectors])[0])
        norm = own if peers.world_size == 1 else math.sqrt(peers.added([own**2])[0])
        if norm > method.radius:
            for vector in vectors:
                vector *= method.radius / norm
    for slot, used, earlier in zip(slots, numbers, before, strict=True):
        if accelerated:
            z, y = slot.moments
            slot.parameter[...] = (1 - used.coupling) * y + used.coupling * z
        if slot.displacement is not None:
            slot.displacement[...] = slot.displacement + (slot.parameter - earlier)


def average(averaging: Averaging, averages: Sequence[Any], outcome: Sequence[Any], step: int) -> None:
    """Take the method's outcome after step `step` into the averages, in place."""
    weight = averaging.weight(step)
    for kept, x in zip(averages, outcome, strict=True):
        kept[...] = kept + weight * (x.reshape(-1) - kept) if weight < 1 else x.reshape(-1)
