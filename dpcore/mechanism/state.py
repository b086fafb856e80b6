"""The state of a running mechanism: sums, moments, noise, keys and branches; saving and loading."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting.branches import Branch, Branches, Rows, count
from dpcore.errors import ArgumentError
from dpcore.mechanism.noise_state import check_noise_range, rebuild
from dpcore.mechanism.turns import Turns
from dpcore.mechanism.vectors import RunVectors
from dpcore.plan.plan import Plan
from dpcore.plan.scales import check_joint_scale
from dpcore.spec.check import dtype_name
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import SECOND_MOMENT, Backend, UpdateSettings
from dpcore.spec.stream import Stream
from dpcore.stages.clipping.running import RunningNorm
from dpcore.stages.queries import Phase

if TYPE_CHECKING:
    from dpcore.mechanism.ledger_account import LedgerAccount

STATE_FORMAT = 3


class MechanismState:
    """The state of a run; its steps are those of `Mechanism`, whose arguments and attributes these are."""

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
        self.branches = Branches(os.urandom(8).hex())
        self.account: LedgerAccount | None = None
        self.turns = Turns()
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

    def _second_moments(self) -> list[Any]:
        """The bias-corrected second moment of each tensor, before the noise's share is taken off; a fresh array."""
        place = SECOND_MOMENT[self.plan.method.update.rule]
        if self.step == 0:
            return [moments[place] + 0 for moments in self.vectors.moments]
        return [m[place] / c for m, c in zip(self.vectors.moments, self._corrections, strict=True)]

    def _prepare_scale(self) -> None:
        """Make the next step's scale ``1 / (sqrt(nuhat) + eps)`` where that step begins a scaled phase."""
        query = self.plan.method.preconditioning
        if query is None or self.vectors.scales is None or query.phase(self.step) is not Phase.REFRESHED:
            return
        for scale, nu in zip(self.vectors.scales, self._second_moments(), strict=True):
            scale[...] = 1 / (nu**0.5 + query.scale_eps)

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

    def _discard(self) -> None:
        self.turns.dropped()
        for total in self.vectors.totals:
            total[...] = 0
        if self._running is not None:
            self._running.forget()

    def state_dict(self, *, begin: bool = True) -> dict[str, Any]:
        """Return the state as plain values and NumPy arrays, in a public and a **secret** part.

        The secret part (keys, states of correlated noise) must be kept as safe as the data; without it the state is
        safe to publish.

        Parameters
        ----------
        begin : bool
            Whether an account begins the run, so that it knows the state.
        """
        with self.turns.alone("state_dict", draws=False):
            return self._state_dict(begin)

    def _state_dict(self, begin: bool) -> dict[str, Any]:
        self._mend_noise()
        known = self.account.saved if begin and self.account is not None else None
        branches = self._branches()

        def arrays(vectors: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
            return {name: self.backend.to_numpy(vector) for name, vector in vectors.items()}

        return {
            "format": STATE_FORMAT,
            "public": {
                "step": self.step,
                "branch": branches.present,
                "branches": {name: list(branch) for name, branch in branches.known.items()},
                "ledger": known,
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, and go on from it on a branch of its own.

        Rows of noise before the state's step keep their keys; from there on noise is fresh, and so are batches where
        they are drawn anew at every step: what was released after the state was saved never shares noise with what
        follows.

        Parameters
        ----------
        state : mapping
            From `state_dict`.

        Notes
        -----
        Releases that this object made and now goes back behind stay counted (`abandoned`). What other processes
        released after the state was saved only a ledger can know; without one the statement says so.

        Raises
        ------
        ArgumentError
            If the state is of another format, layout, or method.
        DataError, PrivacyError
            If the account refuses; nothing was changed then.
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
        mine = self.vectors.public(self.layout), self.vectors.secret(self.layout)
        saved = public["arrays"], secret["arrays"]
        if any(set(theirs) != set(vectors) for vectors, theirs in zip(mine, saved, strict=True)):
            raise ArgumentError("state: it was saved by a method with other filter or update state than this run's")
        if ("clip_norms" in public) != (self._running is not None):
            raise ArgumentError("state: must hold the clip norms of its run where the clip is adaptive, and only there")
        self._fork(RunKeys.from_dict(secret), public, int(public["step"]))
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
        self.rng = str(public["rng"])
        self._discard()

    def _fork(self, keys: RunKeys, public: Mapping[str, Any], row: int) -> None:
        """Go on from row `row` of a state's branch under keys of its own; nothing is changed if the account refuses."""
        others = {name: Branch(*saved) for name, saved in public["branches"].items()}
        branches = self._branches().joined(others)
        found = None if self.account is None else self.account.resume(public["ledger"], row)
        name, number = found or (os.urandom(8).hex(), None)
        keep = self.plan.sampler.keeps_order
        self.keys = keys.fork(keep_sampling=keep, forks=self.keys.forks, row=row, number=number)
        self.branches = branches.forked(public["branch"], name, row)
        self.step = row
        self.turns.anew()
        if self.account is not None:  # last: if it cannot be written, the keys are other ones all the same
            self.account.use_key(self.keys.digest)

    def _branches(self) -> Branches:
        """The branches with the rows of the present one, and with what the account knows of others."""
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
