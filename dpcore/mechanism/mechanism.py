"""The running mechanism: everything between per-example vectors and moved parameters, on either backend.

It owns the clipped sum, the noise, the filter's and the update's state; callers give it rows and parameters. Both the
array API (`dpcore.minimize`) and the PyTorch edge drive this one object, so a method has one meaning.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting.branches import Branch, Branches, Rows, count
from dpcore.errors import ArgumentError, DpcoreError, PrivacyError
from dpcore.mechanism.composed_step import Composition, Normals, Observer
from dpcore.mechanism.noise_state import check_noise_range, described, is_lost, normalizer_of, rebuild
from dpcore.mechanism.parts import Part
from dpcore.mechanism.peers import Peers, by_the_first
from dpcore.mechanism.preparation import (
    check_rate,
    check_release,
    correction,
    numbers_of,
    slots_of,
    variances_in_squares,
)
from dpcore.mechanism.vectors import RunVectors
from dpcore.plan.plan import Grid, Plan, grid_of
from dpcore.plan.scales import check_joint_scale
from dpcore.sampling.base import shard
from dpcore.spec.backends import load_backend
from dpcore.spec.check import dtype_name
from dpcore.spec.check_rows import check_roundings
from dpcore.spec.grid import step_of
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import SECOND_MOMENT, Backend, NoiseRow, Slot, UpdateSettings
from dpcore.spec.repeating import repeat as once
from dpcore.spec.stream import Stream
from dpcore.stages.clipping.adaptive import RunningNorm
from dpcore.stages.clipping.blocks import Block, as_blocks, as_rows, scaled
from dpcore.stages.clipping.clipped_sum import add_clipped, roundings_of
from dpcore.stages.method import Method
from dpcore.stages.queries import Phase, Point
from dpcore.stages.updates import SECOND_MOMENTS
from dpcore.stages.updates.averaging import Averaging
from dpcore.stages.updates.schedules import is_adaptive
from dpcore.statement.build import state
from dpcore.statement.statement import Statement

# Turns: which thread may add to a run's sum, and step.
#
# Each row of noise may be added to one sum only, and that sum may hold only the examples drawn for its step. So calls
# run one at a time; a signal's handler cannot make one during another; one thread sums and steps each batch; and a
# forked process must build or load its own run before it draws.


class Turns:
    """Whose turn it is.

    Every call that computes takes one, so each enters `place` here: a context in which the backend's new arrays are on
    the run's device.
    """

    def __init__(self, place: Callable[[], AbstractContextManager[None]]) -> None:
        self._place = place
        self._process, self._adding = os.getpid(), 0
        self.between = False  #: whether a load was cut short: keys, step and vectors may be of two states
        self._renew()

    def _renew(self) -> None:
        self._locked_in, self._busy = os.getpid(), False
        self._lock, self._drawn = threading.RLock(), threading.local()

    @property
    def lock(self) -> Any:
        """Held by the thread that is in a call, or that makes several calls one: a `threading.RLock`."""
        if os.getpid() != self._locked_in:  # a fork: the parent's threads are gone, and so must be their lock
            self._renew()
        return self._lock

    @contextmanager
    def alone(self, call: str, *, draws: bool = True) -> Iterator[None]:
        """Keep other threads out of the call named `call`, and handlers of signals that interrupt it.

        `draws` is whether it has to do with noise, which two processes must not share. Raises `PrivacyError` in a
        forked process, inside of another call, and after a load that was cut short, for all but the next load.
        """
        if draws and os.getpid() != self._process:
            raise PrivacyError(
                f"{call}: this process was forked from the one that built the run, and both would draw the same noise: "
                "build the run here, or load its state here, which forks the keys"
            )
        with self.lock:
            if self._busy:
                raise PrivacyError(f"{call}: called while a step is under way, as by a signal's handler; call it after")
            if self.between and call != "load_state_dict":
                raise PrivacyError(
                    f"{call}: loading a state failed or was interrupted; load one, or build the run anew"
                )
            try:
                self._busy = True
                with self._place():
                    yield
            finally:
                self._busy = False

    def drew(self, step: int | None) -> None:
        """Note that this thread has the batch of a step; None if it has none any more."""
        self._drawn.step = step

    def check(self, step: int) -> None:
        """Refuse to mix the sums or the batches of two threads in a step."""
        if self._adding not in (0, threading.get_ident()):
            raise PrivacyError("another thread is summing this step: let one thread take each step, or hold `lock`")
        if getattr(self._drawn, "step", None) not in (None, step):
            raise PrivacyError("another thread took the step that this batch was drawn for: draw the next one")

    def adding(self) -> None:
        """Note that the sum is this thread's."""
        self._adding = threading.get_ident()

    def dropped(self) -> None:
        """Note that there is no sum."""
        self._adding = 0

    def restart(self) -> None:
        """Begin again in this process, which has its own keys now: no thread has a batch."""
        self._process, self._drawn = os.getpid(), threading.local()


STATE_FORMAT = 7


class Mechanism:
    """One run's private steps: any number of `add` and then one `release` each.

    The sum belongs to the private data and never leaves this object un-noised. Threads take turns call by call
    (`Turns`); hold `turns.lock` to make several calls one.

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
        The processes that take the steps together; by default only this one. `add` takes this process's share of the
        batch, and all processes `release` together.
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
        peers: Peers | None = None,
    ) -> None:
        plan.check_covered()
        if tuple(entry.name for entry in layout.entries) != plan.tensors:
            raise ArgumentError(f"layout: its tensors must be those of the plan, {', '.join(plan.tensors)}")
        check_joint_scale(plan.method.update, plan.sensitivity_at().contribution, layout.dimension)
        self.plan, self.layout, self.backend, self.keys, self.rng = plan, layout, backend, keys, rng
        self.peers = Peers() if peers is None else peers
        #: The pieces of the tensors that this process owns and draws noise for.
        self.pieces = self.peers.pieces(layout)
        #: The places of these pieces in the vectors stored here: whole ones, or the pieces themselves.
        stored = tuple(Piece(i, 0, stop - start) for i, start, stop in self.pieces)
        self.inside = stored if self.peers.shards else self.pieces
        self.own = layout.of_pieces(self.pieces)
        self.share = shard(plan.sampler, self.peers.rank, self.peers.world_size)
        self.step = 0  #: steps taken on the way to the present parameters
        #: The rows that left on each branch, as far as this object and the states that it loaded know.
        self.branches = Branches(self.peers.same(os.urandom(8).hex()))
        #: Called before every batch is drawn and before every release.
        self.account: Any = None  # a LedgerAccount or a SharedAccount
        self.turns = Turns(self._place)
        self._sizes = [sum(layout.entries[i].size for i in members) for members in plan.grouping_at().members]
        check_noise_range(plan, dtype_name(parameters[0]))
        check_rate(plan.method.update.settings().learning_rate, dtype_name(parameters[0]))
        with backend.beside(parameters[0]):
            self.vectors = RunVectors.of(plan, layout, parameters, backend, bool(self._square_noise(0)), self.peers)
        adaptive = plan.adaptive_clip
        self._running: RunningNorm | None = None
        if adaptive is not None:
            self._running = RunningNorm(adaptive, plan.clip_at().max_grad_norm, plan.batch_size)
        self._summed = 0
        self._torn = False
        self._empty = True  # whether what the totals hold does not count: the first addition overwrites it
        self._caller_noise = False
        self.stopped_by_results = False  #: whether results decided to stop: statements then count the whole plan
        self.asked = False  #: whether the others were asked for the release that this step has come to
        schedule: Any = plan.method.schedule
        learns = self._filter if self._filter.adaptive else schedule if is_adaptive(schedule) else None
        self._statistics = () if learns is None else learns.initial()
        self._corrections = [0.0] * len(parameters)
        self._numbers: list[UpdateSettings] | None = None
        self._prepare_scale()

    def points(self) -> tuple[Point, ...]:
        """Return the points of this step's gradients, and the weights that combine them."""
        return self.plan.method.query.points(self.step)

    def at(self, parameters: Sequence[Any], point: Point) -> list[Any]:
        """Return a point's parameters, not to be written to: the present, kept earlier, or displaced copies."""
        return self.vectors.at(parameters, point, self.step)

    def add(self, blocks: Sequence[Any]) -> None:
        """Scale the examples' vectors if the query does, clip them, and add them to the step's sum.

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
            self._add(checked)

    def check_grid(self, blocks: list[Block]) -> None:
        """Refuse noise whose grid is too coarse for gradients of this form; the blocks' arrays may have no values."""
        clip = self.plan.clip_at(self.step, self.clip_norm)
        grouping = self.plan.grouping_at(self.step, self.clip_norm)
        given = self.backend, blocks, clip.rule, grouping, self.unit, [None] * len(blocks)
        check_roundings(clip.rule, grouping.bounds, roundings_of(*given), self.unit)

    def _add(self, blocks: list[Block]) -> None:
        now = self.step, self.clip_norm
        clip, grouping = self.plan.clip_at(*now), self.plan.grouping_at(*now)
        scales: list[Any] = [None] * len(blocks)
        if self.vectors.scales is not None and self.plan.scaled(self.step):
            blocks, scales = scaled(blocks), self.vectors.scales
        repeat = once if self.peers.shards else self.backend.repeat  # shards keep the addends, to send them
        norms = repeat(
            add_clipped, self.backend, blocks, clip.rule, grouping, self._sizes, self.unit, self.vectors.totals,
            scales, self.peers.add_sums, self._empty,
        )  # fmt: skip
        # Not before: the next addition overwrites what an interruption leaves of this one. Shards add in `join`.
        self._empty = self._empty and self.peers.shards
        if self._running is not None:
            self._running.add(norms)

    def join(self) -> None:
        """End a micro-batch, after any number of `add`; all processes do so equally often."""
        with self.turns.alone("join"):
            # A process that has added nothing gets the others' sums all the same.
            self._drop_earlier_sum()
            self.peers.join(self._totals(), self.layout, self.backend)

    @property
    def contribution(self) -> float:
        """The norm that one example's vector adds to this step's sum at most."""
        return self.plan.sensitivity_at(self.step, self.clip_norm).contribution

    def summed(self) -> NDArray[np.float64]:
        """Return the sum of clipped vectors, (d,), before any noise: **private**, for tests."""
        totals = [self.backend.to_numpy(total).astype(np.float64).reshape(-1) for total in self._totals()]
        return self.unit * np.concatenate(totals)

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
            A gradient of public data, if the update's second moment is made of one.
        observe : callable, optional
            Called with the released averages and the filter's outputs, one flat array for each tensor.

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
            norm, unit = self.clip_norm, self._unit(row)
            own_numbers = [numbers[piece.tensor] for piece in self.pieces]
            self._caller_noise |= normals is not None
            # Before the draw, so that the row is spent even after an interruption: noise that may have been seen is
            # never added to another sum. Torn first: correlated noise must have had every row that is spent.
            self._torn = True
            self.step += 1
            try:
                self.keys.begin(row)
                self.vectors.keep_history(parameters)
                totals = self.peers.reduced(self._totals(), self.pieces)
                slots = slots_of(self.vectors, self.own, self.inside, totals, parameters, public, scaled)
                longest = getattr(method.update, "max_update_norm", None)
                before = None if longest is None else [slot.parameter + 0 for slot in slots]
                self._take(slots, row, unit, own_numbers, normals, observe)
                self._torn = False
                if before is not None and longest is not None:
                    shorten(self.backend, longest, slots, before, own_numbers, self.peers)
                constrain(self.backend, method, slots, own_numbers, self.peers)
                self._spread(parameters)
                norm = self._following_norm(row, normals)
            finally:  # after an interruption, too: the next step may be a scaled one
                self._end_step(row, numbers, norm)
            if method.averaging is not None and self.vectors.averages is not None:
                average(method.averaging, self.vectors.averages, self._outcome(parameters), row)

    def _following_norm(self, row: int, normals: Normals | None) -> float | None:
        """Return the next step's clip norm, if it is adapted: the second release of this step.

        Its one normal number is the float64 definition's on every backend, and no other draw's: a stream of its own.
        """
        if self._running is None:
            return None
        self._running.add_up(self.peers.added)
        if normals is not None:
            z = normals(row, Stream.CLIP_BOUND)[0]
        else:
            draw = load_backend("numpy").normal
            z = draw(self.keys.noise, row, Stream.CLIP_BOUND, 0, 1, bits=self.grid.bits, rng=self.rng)
        return self._running.following(float(z[0]), self.grid.bits, 1 + self.grid.raised)

    def _take(
        self,
        slots: list[Slot[Any]],
        row: int,
        unit: float,
        numbers: list[UpdateSettings],
        normals: Normals | None,
        observe: Observer | None,
    ) -> None:
        """Take the step by the fused operation, or by the plain ones if it does not cover the method."""
        plan, method = self.plan, self.plan.method
        strategy = method.noise.strategy
        scale, square_scale = self._noise(row), self._square_noise(row) * (1 + self.grid.square_raised)
        bits = self.grid.bits
        noise = NoiseRow(self.keys.noise, row, Stream.GRADIENT, scale, self.rng, bits)
        square_noise = NoiseRow(self.keys.noise, row, Stream.SECOND_MOMENT, square_scale, self.rng, bits)
        square = SECOND_MOMENTS[method.update.second_moment]
        correlation = None if strategy is None else strategy.coefficients(row)
        streamed = strategy is None or (correlation is not None and not square_scale)
        plain = normals is not None or observe is not None or bool(self._statistics) or method.galore is not None
        plain |= method.update.second_moment == "delayed"
        if streamed and not plain:
            self.backend.step(
                slots,
                noise,
                plan.batch_size,
                self._filter.coefficients(row),
                method.update.rule,
                numbers,
                row + 1,
                unit=unit,
                correlation=correlation,
                square=square,
                square_noise=square_noise if square_scale else None,
            )
            return
        composition = Composition(
            self.backend, method, plan.batch_size, self.keys, self.own, self.vectors, self.rng,
            self.peers, self.layout.dimension, plan.steps,
        )  # fmt: skip
        self._statistics = composition.step(
            slots, noise, unit, square, square_noise, self._statistics, numbers, normals, observe
        )

    def statement(
        self,
        delta: float,
        *,
        caveats: tuple[str, ...] = (),
        note: str = "",
        software: dict[str, str] | None = None,
    ) -> Statement:
        """Return the privacy statement for all releases so far, or for the whole plan if they decided to stop."""
        return state(
            self.plan,
            delta,
            steps_taken=self.step,
            abandoned=self.abandoned,
            stopped_by_results=self.stopped_by_results,
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

    def draw(self) -> NDArray[np.int64]:
        """Return this process's examples of this step, after the account has agreed to pay for it.

        Secret if the sampling is.
        """
        with self.turns.alone("draw"):
            if self.account is not None:
                self.account.before_draw(self.step)
            self.turns.drew(self.step)
            return self.share.indices(self.keys.sampling, self.step)

    def ahead(self, step: int) -> NDArray[np.int64] | None:
        """Return the draw of a later step, to read its data meanwhile; None if it is not paid for yet.

        It is no draw: that comes in its turn, and may give something else after a fork. As secret as `draw`.
        """
        with self.turns.alone("ahead"):
            unpaid = self.account is not None and not self.account.has_paid(step)
            return None if unpaid or step >= self.plan.steps else self.share.indices(self.keys.sampling, step)

    def first_example(self) -> int:
        """Return the place of this process's first example in the step's batch: 0 for the first process. Secret."""
        if self.peers.rank == 0:
            return 0
        return self.share.first(self.keys.sampling, self.step)

    def state_dict(self, *, begin: bool = True, own: bool = False) -> dict[str, Any]:
        """Return the state as plain values and NumPy arrays, in a public and a **secret** part.

        The secret part (keys, states of correlated noise) must be kept as safe as the data; without it the state is
        safe to publish. With `begin` an account begins the run, so that it can recognize the state. With `own` each
        process gets its own `Part` of each vector, and nothing is gathered.
        """
        whole, held = (self._parts, self._own_parts) if own else (self._whole, self._all_held)
        with self.turns.alone("state_dict", draws=False):
            self._mend_noise()
            known = self.account.saved if begin and self.account is not None else None
            branches = self._agreed_branches()
            return {
                "format": STATE_FORMAT,
                "public": {
                    "step": self.step,
                    "branch": branches.present,
                    "branches": {name: list(branch) for name, branch in branches.known.items()},
                    "ledger": known,
                    "layout": self.layout.to_list(),
                    "rng": self.rng,
                    "noise": described(self.plan.method.noise.strategy),
                    "caller_noise": self._caller_noise,
                    "stopped_by_results": self.stopped_by_results,
                    "statistics": list(self._statistics),
                    "corrections": list(self._corrections),
                    **({} if self.clip_norms is None else {"clip_norms": self.clip_norms}),
                    "arrays": self._arrays(self.vectors.public(self.layout, whole, held)),
                },
                "secret": {
                    **self.keys.to_dict(),
                    "arrays": self._arrays(self.vectors.secret(self.layout, whole)),
                },
            }

    def _parts(self, parts: Sequence[Any]) -> list[Part]:
        """Return this process's parts of whole vectors, one for each tensor, from its own pieces."""
        dtype, alone = dtype_name(parts[0]), self.peers.world_size == 1
        # Alone, a vector may be shorter than its tensor: a projected one.
        sizes = map(len, parts) if alone else (entry.size for entry in self.layout.entries)
        whole = [Part(None, 0, size, dtype) for size in sizes]
        for part, (tensor, start, _) in zip(parts, self.pieces, strict=True):
            whole[tensor] = Part(part, start, whole[tensor].size, dtype)
        return whole

    def _all_held(self, vectors: Sequence[Any]) -> list[Any]:
        """Join the stored pieces of each tensor, if they are not all of it."""
        return self._whole(vectors) if self.peers.shards else list(vectors)

    def _own_parts(self, vectors: Sequence[Any]) -> list[Part]:
        return self._parts(self._own(vectors))

    def _arrays(self, vectors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: vector.map(self.backend.to_numpy) if isinstance(vector, Part) else self.backend.to_numpy(vector)
            for name, vector in vectors.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, and continue from it on a branch of its own.

        Rows of noise before the state's step keep their keys; from there on noise is fresh, and so are batches if they
        are drawn afresh at every step: releases after the save never share noise with later ones. Vectors of
        correlated noise that the state lacks, or kept for another way of streaming, are reconstructed. This object's
        releases after the state's step stay counted (`abandoned`). Releases of other processes after the save are known
        only to a ledger; without one the statement says so.

        Raises
        ------
        ArgumentError, DataError, PrivacyError
            If the state is of another format, layout, or method; if the account refuses. Nothing was changed then.
        """
        with self.turns.alone("load_state_dict", draws=False):
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != STATE_FORMAT:
            raise ArgumentError(
                f"format={state.get('format')!r}: must be {STATE_FORMAT}, a state saved by this version"
            )
        public, secret = state["public"], state["secret"]
        if public["layout"] != self.layout.to_list():
            raise ArgumentError("state: its layout of tensors differs from this run's, so its noise rows would not fit")
        held = self._parts if self.peers.shards else list
        mine = self.vectors.public(self.layout, self._parts, held), self.vectors.secret(self.layout, self._parts)
        saved = public["arrays"], secret["arrays"]
        lost = is_lost(public["noise"], secret["arrays"], described(self.plan.method.noise.strategy), mine[1])
        if lost:
            mine, saved = (mine[0], {}), (saved[0], {})
        if any(set(theirs) != set(vectors) for vectors, theirs in zip(mine, saved, strict=True)):
            raise ArgumentError("state: it was saved by a method with other filter or update state than this run's")
        for vectors, theirs in zip(mine, saved, strict=True):
            for name, vector in vectors.items():
                found, own = tuple(np.shape(theirs[name])), tuple(vector.shape)
                if found != own:
                    raise ArgumentError(f"state: its vector {name!r} has shape {found}, this run's {own}")
        if ("clip_norms" in public) != (self._running is not None):
            raise ArgumentError("state: must have the clip norms of its run if the clip is adaptive, and only then")
        # Read before the fork: if the state lacks something, the run must not stay between two states.
        statistics, corrections, rng = tuple(public["statistics"]), list(public["corrections"]), str(public["rng"])
        caller_noise, norms = bool(public["caller_noise"]), [float(norm) for norm in public.get("clip_norms", ())]
        stopped = bool(public["stopped_by_results"])
        self._fork(RunKeys.from_dict(secret), public, int(public["step"]))
        for vectors, theirs in zip(mine, saved, strict=True):
            for name, vector in vectors.items():
                if isinstance(vector, Part):
                    vector.take(theirs[name], self.backend.from_numpy)
                else:
                    vector[...] = self.backend.from_numpy(np.asarray(theirs[name]))
        if self._running is not None:
            self._running.norms = norms
        for name in ("_variances", "grid"):  # the plan may have taken over the saved noise multiplier
            self.__dict__.pop(name, None)
        self._statistics, self._corrections, self._caller_noise = statistics, corrections, caller_noise
        self.stopped_by_results |= stopped
        self._numbers = None
        self._torn = lost  # reconstructed before it is needed
        self.rng = rng
        self._discard()
        self.turns.between = False

    def _fork(self, keys: RunKeys, public: Mapping[str, Any], row: int) -> None:
        """Go on from row `row` of a state's branch under keys of its own; nothing is changed if the account refuses."""
        if self.account is None and public["ledger"] is not None:
            raise PrivacyError(
                f"ledger=None: must be the ledger that pays for this run, {public['ledger']['ledger']}, which its "
                "state names: only it knows the releases after the state was saved"
            )
        others = {name: Branch(*saved) for name, saved in public["branches"].items()}
        branches = self._agreed_branches().joined(others)
        # From here on the account pays for the new branch, and no step may be taken until the load has come to its end.
        former, self.turns.between = self.turns.between, True
        try:
            resumed = None if self.account is None else self.account.resume(public["ledger"], row)
        except DpcoreError:  # a refusal, which changes nothing
            self.turns.between = former
            raise
        name, number = resumed or (self.peers.same(os.urandom(8).hex()), None)
        keep = self.plan.sampler.keeps_order
        forked = keys.fork(keep_sampling=keep, forks=self.keys.forks, row=row, number=number)
        self.keys = RunKeys.from_dict(self.peers.same(forked.to_dict()))
        self.step = row
        self.branches = branches.forked(public["branch"], name, row)
        self.turns.restart()
        if self.account is not None:  # last: if it cannot be written, the keys are other ones all the same
            self.account.use_key(self.keys.digest)

    def _agreed_branches(self) -> Branches:
        """The first process's branches, since it has the account. All processes must call it."""
        agreed = by_the_first(self.peers, self._branches)
        assert agreed is not None
        return agreed

    def _branches(self) -> Branches:
        """The branches with the rows of the present one, and with the account's record of others."""
        own, tree = self.branches.up_to(self.step), {} if self.account is None else self.account.tree
        return own.joined({name: branch for name, branch in tree.items() if name != own.present})

    @property
    def abandoned(self) -> tuple[Rows, ...]:
        """Rows that do not lead to the present parameters, (first, stop) by branch: they cost privacy all the same."""
        return self._branches().abandoned

    @property
    def releases(self) -> int:
        """All releases that are known: the steps taken, and the abandoned ones."""
        return self.step + count(self.abandoned)

    def _place(self) -> AbstractContextManager[None]:
        """Return the context in which the backend makes arrays on the device of the run's own."""
        return self.backend.beside(self.vectors.totals[0])

    @property
    def _filter(self) -> Any:
        return self.plan.method.filter

    @cached_property
    def grid(self) -> Grid:
        """The grid of the run's releases."""
        return grid_of(self.plan, self.layout.dimension)

    @property
    def unit(self) -> float:
        """The value of one unit of this step's sum: the step of the release's grid."""
        return self._unit(self.step)

    def _unit(self, row: int) -> float:
        noise = self._noise(row)
        if noise == 0:  # nothing is private: so fine that clip norms far above all gradients round none of them away
            return step_of(self.plan.sensitivity_at(row, self.clip_norm).contribution, 80)
        return step_of(noise, self.grid.bits, normalizer_of(self.plan.method.noise.strategy, row))

    def _noise(self, row: int) -> float:
        """The standard deviation of the seed noise on a step's sum, raised for the grid."""
        return self.plan.noise_standard_deviation(row, self.clip_norm) * (1 + self.grid.raised)

    @cached_property
    def _variances(self) -> NDArray[np.float64]:
        return variances_in_squares(self.plan)

    def _square_noise(self, step: int) -> float:
        return 0.0 if self.plan.noise_multiplier == 0 else self.plan.square_noise_standard_deviation(step)

    @property
    def clip_norm(self) -> float | None:
        """The present clip norm if it is adapted, else None; a function of releases."""
        return None if self._running is None else self._running.norm

    @property
    def clip_norms(self) -> list[float] | None:
        """The clip norms C_0 .. C_t on the way to the present parameters if adapted, else None; they are released."""
        return None if self._running is None else self._running.at(self.step)

    def _second_moments(self) -> list[Any]:
        """The bias-corrected second moment of each piece, before the noise's share is taken off; a fresh array."""
        place = SECOND_MOMENT[self.plan.method.update.rule]
        if self.step == 0:
            return [moments[place] + 0 for moments in self.vectors.moments]
        pairs = zip(self.vectors.moments, self.pieces, strict=True)
        return [moments[place] / self._corrections[piece.tensor] for moments, piece in pairs]

    def _prepare_scale(self) -> None:
        """Make the next step's scale ``1 / (sqrt(nuhat) + eps)`` if that step begins a scaled phase."""
        query = self.plan.method.preconditioning
        if query is None or self.vectors.scales is None or query.phase(self.step) is not Phase.REFRESHED:
            return
        for scale, nu in zip(self.vectors.scales, self._stored(self._second_moments()), strict=True):
            scale[...] = 1 / (nu**0.5 + query.scale_eps)

    def _mend_noise(self) -> None:
        """Reconstruct the states of correlated noise if an interruption cut their advance short.

        In a tensor whose state missed a step, the noise would continue as if that step had never been: its rows would
        not be those of the accounted matrix.
        """
        strategy = self.plan.method.noise.strategy
        if self._torn and strategy is not None and strategy.order:
            arguments = self.backend, strategy, self.keys, self.own, self.rng, self.step
            rebuild(self.vectors.noise_state, Stream.GRADIENT, *arguments, self.grid.bits)
            rebuild(self.vectors.square_noise_state, Stream.SECOND_MOMENT, *arguments, self.grid.bits)
        self._torn = False

    def _agree(self, settings: Sequence[UpdateSettings] | None) -> None:
        """Raise in all processes if one would not take the step to be released, or would use other settings.

        Each process has its own step number, keys, clip norm and noise, which determine the sum's sensitivity and the
        noise: after loading other states they could differ.
        """
        self.asked = True
        if self.peers.world_size > 1 or self.peers.shards:
            now = self.step, self.keys.digest, self.clip_norm, self.plan.noise_multiplier
            self.peers.agree(failed=False, state=repr(now), settings=repr(settings))

    def _drop_earlier_sum(self) -> None:
        """Begin the sum of a step with 0, even if an interruption left the sum of the step before."""
        if self._summed != self.step:
            self._discard()
            self._summed = self.step

    def _totals(self) -> list[Any]:
        """Return the totals of this step's sum: zeros if nothing was added."""
        if self._empty:
            self.backend.clear(self.vectors.totals)
            self._empty = False
        return self.vectors.totals

    def discard(self) -> None:
        """Forget the sum of an unfinished step."""
        with self.turns.alone("discard"):
            self._discard()

    def _discard(self) -> None:
        self.turns.dropped()
        self.peers.drop()
        self._empty = True
        if self._running is not None:
            self._running.forget()

    def _end_step(self, row: int, numbers: list[UpdateSettings], norm: float | None) -> None:
        self._discard()
        self.turns.drew(None)
        if self._running is not None and norm is not None:
            self._running.keep(row + 1, norm)
        self._numbers = numbers
        corrections = {beta: correction(self.plan.method, beta, row + 1) for beta in {used.beta2 for used in numbers}}
        self._corrections = [corrections[used.beta2] for used in numbers]
        self._prepare_scale()

    def negative_share(self) -> float:
        """Return the share of coordinates whose debiased second moment is negative; NaN if there is none.

        A function of released vectors.
        """
        if self.plan.method.update.rule not in SECOND_MOMENT or self._numbers is None:
            return float("nan")
        moments = self._second_moments()
        biases = (self._numbers[piece.tensor].bias for piece in self.pieces)
        negative = sum(float((u < bias).sum()) for u, bias in zip(moments, biases, strict=True))
        negative, count = self.peers.added([negative, sum(u.reshape(-1).shape[0] for u in moments)])
        return negative / count

    def _whole(self, parts: Sequence[Any]) -> list[Any]:
        """Put all processes' pieces together to whole vectors, one for each tensor."""
        return self.peers.whole(parts, self.pieces, self.layout)

    def _stored(self, parts: Sequence[Any]) -> list[Any]:
        """Return vectors as a process stores them: whole ones, or its own pieces."""
        return list(parts) if self.peers.shards else self._whole(parts)

    def _spread(self, parameters: Sequence[Any]) -> None:
        """Give all processes the pieces that each has updated, if they store all of them."""
        if self.peers.world_size == 1 or self.peers.shards:
            return
        for mine in (parameters, self.vectors.displacements):
            if mine is not None:
                for vector, whole in zip(mine, self._whole(self._own(mine)), strict=True):
                    vector.reshape(-1)[...] = whole

    def _own(self, vectors: Sequence[Any]) -> list[Any]:
        """Return views of this process's pieces of contiguous vectors."""
        return [vectors[tensor].reshape(-1)[start:stop] for tensor, start, stop in self.inside]

    def _outcome(self, parameters: Sequence[Any]) -> list[Any]:
        """Return own pieces of the parameters, or of y if the accelerated method has taken a step."""
        if self.plan.method.update.rule != "accelerated" or self.step == 0:
            return self._own(parameters)
        return [y for _, y in self.vectors.moments]

    def output(self, parameters: Sequence[Any]) -> list[Any]:
        """Return the method's answer: the average if one is kept, y for the accelerated method, or the parameters.

        Arrays of the given parameters' shapes, not to be written to. All processes must call it.
        """
        kept = None if self.step == 0 else self.vectors.averages
        vectors = self._stored(self._outcome(parameters) if kept is None else kept)
        return [vector.reshape(p.shape) for vector, p in zip(vectors, parameters, strict=True)]


def shorten(
    backend: Backend[Any],
    longest: float,
    slots: Sequence[Slot[Any]],
    before: Sequence[Any],
    numbers: Sequence[UpdateSettings],
    peers: Peers,
) -> None:
    """Shorten an update whose move over the learning rate is longer than `longest`, in place; the displacements too."""
    moves = [slot.parameter - x for slot, x in zip(slots, before, strict=True)]
    rates = [used.learning_rate or math.inf for used in numbers]  # at a rate of 0 nothing moves
    own = float(backend.row_norms([(m / rate).reshape(1, -1) for m, rate in zip(moves, rates, strict=True)])[0])
    norm = own if peers.world_size == 1 else math.sqrt(peers.added([own**2])[0])
    if norm > longest:
        for slot, x, move in zip(slots, before, moves, strict=True):
            slot.parameter[...] = x + longest / norm * move
            if slot.displacement is not None:
                slot.displacement[...] = slot.parameter - x


def constrain(
    backend: Backend[Any],
    method: Method,
    slots: Sequence[Slot[Any]],
    numbers: Sequence[UpdateSettings],
    peers: Peers,
) -> None:
    """Project onto the ball of the method's `radius` around 0 after an update, in place; the displacements too.

    It projects the parameters, or both sequences of the accelerated method, whose mean they are; `numbers` are those
    that the update used.
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
