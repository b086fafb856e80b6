"""The state of a running mechanism: sums, moments, noise, keys and branches."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting.branches import Branches
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.noise_state import check_noise_range, rebuild
from dpcore.mechanism.peers import Alone, Peers
from dpcore.mechanism.preparation import check_rate, variances_in_squares
from dpcore.mechanism.vectors import RunVectors
from dpcore.plan.plan import Plan
from dpcore.plan.scales import check_joint_scale
from dpcore.sampling.sharding import shard
from dpcore.spec.check import dtype_name
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import SECOND_MOMENT, Backend, UpdateSettings
from dpcore.spec.stream import Stream
from dpcore.stages.clipping.running import RunningNorm
from dpcore.stages.queries import Phase

if TYPE_CHECKING:
    from dpcore.mechanism.ledger_account import LedgerAccount
    from dpcore.mechanism.shared_account import SharedAccount


class MechanismState:
    """The state of a run; its steps are those of `Mechanism`, whose arguments these are."""

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
        self.peers: Peers = Alone() if peers is None else peers
        #: What this process owns of the tensors, and draws noise for.
        self.pieces = self.peers.pieces(layout)
        #: Where these pieces lie in the vectors that are held here: whole ones, or the pieces themselves.
        self.inside = tuple(Piece(i, 0, stop - start) for i, start, stop in self.pieces)
        if not self.peers.shards:
            self.inside = self.pieces
        self.own = layout.of_pieces(self.pieces)
        self.share = shard(plan.sampler, self.peers.rank, self.peers.world_size)
        self.step = 0  #: steps taken on the way to the present parameters
        #: Which rows left on which branch, as far as this object and the states that it loaded know.
        self.branches = Branches(self.peers.same(os.urandom(8).hex()))
        #: Told of every batch before it is drawn and of every release before it is made.
        self.account: LedgerAccount | SharedAccount | None = None
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
        self._dirty = False  # whether the totals may hold a sum
        self._caller_noise = False
        self.asked = False  #: whether the others were asked for the release that this step has come to
        self._statistics = self._filter.initial() if self._filter.adaptive else ()
        self._corrections = [0.0] * len(parameters)
        self._numbers: list[UpdateSettings] | None = None
        self._prepare_scale()

    def _place(self) -> AbstractContextManager[None]:
        """Return the context in which the backend makes arrays beside the run's own."""
        return self.backend.beside(self.vectors.totals[0])

    @property
    def _filter(self) -> Any:
        return self.plan.method.filter

    @cached_property
    def _variances(self) -> NDArray[np.float64]:
        return variances_in_squares(self.plan)

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

    def _second_moments(self) -> list[Any]:
        """The bias-corrected second moment of each piece, before the noise's share is taken off; a fresh array."""
        place = SECOND_MOMENT[self.plan.method.update.rule]
        if self.step == 0:
            return [moments[place] + 0 for moments in self.vectors.moments]
        pairs = zip(self.vectors.moments, self.pieces, strict=True)
        return [moments[place] / self._corrections[piece.tensor] for moments, piece in pairs]

    def _prepare_scale(self) -> None:
        """Make the next step's scale ``1 / (sqrt(nuhat) + eps)`` where that step begins a scaled phase."""
        query = self.plan.method.preconditioning
        if query is None or self.vectors.scales is None or query.phase(self.step) is not Phase.REFRESHED:
            return
        for scale, nu in zip(self.vectors.scales, self._held(self._second_moments()), strict=True):
            scale[...] = 1 / (nu**0.5 + query.scale_eps)

    def _mend_noise(self) -> None:
        """Make the states of correlated noise anew where an interruption cut short what advances them.

        In a tensor whose state missed a step, the noise would go on as if that step had never been: rows of another
        matrix than the one that is accounted.
        """
        strategy = self.plan.method.noise.strategy
        if self._torn and strategy is not None and strategy.order:
            arguments = self.backend, strategy, self.keys, self.own, self.rng, self.step
            rebuild(self.vectors.noise_state, Stream.GRADIENT, *arguments)
            rebuild(self.vectors.square_noise_state, Stream.SECOND_MOMENT, *arguments)
        self._torn = False

    def _agree(self, settings: Sequence[UpdateSettings] | None) -> None:
        """Raise in all processes where one would not take the step that is to be released, or by other settings.

        Each process has its own number of the step, keys, clip norm and noise, of which the sum's sensitivity and the
        noise follow: after loading other states they could differ.
        """
        self.asked = True
        if self.peers.world_size > 1 or self.peers.shards:
            now = self.step, self.keys.digest, self.clip_norm, self.plan.noise_multiplier
            self.peers.agree(failed=False, state=repr(now), settings=repr(settings))

    def _drop_earlier_sum(self) -> None:
        """Begin the sum of a step with nothing, also where an interruption left the sum of the step before."""
        if self._summed != self.step:
            self._discard()
            self._summed = self.step

    def discard(self) -> None:
        """Forget the sum of an unfinished step."""
        with self.turns.alone("discard"):
            self._discard()

    def _discard(self) -> None:
        self.turns.dropped()
        self.peers.drop()
        if self._dirty:
            self.backend.clear(self.vectors.totals)
            self._dirty = False
        if self._running is not None:
            self._running.forget()

    def _end_step(self, row: int, numbers: list[UpdateSettings], norm: float | None) -> None:
        self._discard()
        self.turns.drew(None)
        if self._running is not None and norm is not None:
            self._running.keep(row + 1, norm)
        self._numbers = numbers
        betas, corrected = [used.beta2 for used in numbers], "adam" in self.plan.method.update.rule
        corrections = {beta: 1 - beta ** (row + 1) if corrected else 1.0 for beta in set(betas)}
        self._corrections = [corrections[beta] for beta in betas]
        self._prepare_scale()

    def negative_share(self) -> float:
        """Return the share of coordinates whose debiased second moment is negative; NaN where there is none.

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

    def _held(self, parts: Sequence[Any]) -> list[Any]:
        """Return what a process holds of vectors: whole ones, or its own pieces, which it has."""
        return list(parts) if self.peers.shards else self._whole(parts)

    def _spread(self, parameters: Sequence[Any]) -> None:
        """Give all processes the pieces that each has moved, where they hold all of them."""
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
        """Return own pieces of the parameters, or of y where the accelerated method has taken a step."""
        if self.plan.method.update.rule != "accelerated" or self.step == 0:
            return self._own(parameters)
        return [y for _, y in self.vectors.moments]

    def output(self, parameters: Sequence[Any]) -> list[Any]:
        """Return the method's answer: the average where one is kept, y of the accelerated method, or the parameters.

        Arrays of the given parameters' shapes, not to be written to. All processes must ask.
        """
        kept = None if self.step == 0 else self.vectors.averages
        found = self._held(self._outcome(parameters) if kept is None else kept)
        return [vector.reshape(p.shape) for vector, p in zip(found, parameters, strict=True)]


# Turns: which thread may add to a run's sum, and step.
#
# A row of noise must meet one sum, and the sum the examples that were drawn for the row. So calls come one at a time,
# no call comes inside of another (from a signal's handler), no two threads add to one sum, none steps on a batch whose
# step another has taken, and a process that was forked from the one that built the run draws nothing.


class Turns:
    """Whose turn it is.

    Every call that computes takes one, so this is where each enters `place`: a context in which the backend's new
    arrays go where the run's are.
    """

    def __init__(self, place: Callable[[], AbstractContextManager[None]]) -> None:
        self._place = place
        self._process, self._adding = os.getpid(), 0
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
    def alone(self, what: str, *, draws: bool = True) -> Iterator[None]:
        """Let no other thread into the call `what`, and no handler of a signal that interrupts it.

        `draws` is whether it has to do with noise, which two processes must not share. Raises `PrivacyError` in a
        forked process, and inside of another call.
        """
        if draws and os.getpid() != self._process:
            raise PrivacyError(
                f"{what}: this process was forked from the one that built the run, and both would draw the same noise: "
                "build the run here, or load its state here, which forks the keys"
            )
        with self.lock:
            if self._busy:
                raise PrivacyError(f"{what}: called while a step is under way, as by a signal's handler; call it after")
            try:
                self._busy = True
                with self._place():
                    yield
            finally:
                self._busy = False

    def drew(self, step: int | None) -> None:
        """Note that this thread has the batch of a step; None where it has none any more."""
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

    def anew(self) -> None:
        """Begin again in this process, which has keys of its own now: nobody has a batch."""
        self._process, self._drawn = os.getpid(), threading.local()
