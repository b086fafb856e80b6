"""Saving and loading a running mechanism; every load begins a branch of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpcore.accounting.branches import Branch, Branches, Rows, count
from dpcore.errors import ArgumentError
from dpcore.mechanism.noise_state import described, is_lost
from dpcore.mechanism.parts import Part
from dpcore.mechanism.peers import by_the_first
from dpcore.mechanism.state import MechanismState
from dpcore.spec.check import dtype_name
from dpcore.spec.keys import RunKeys

STATE_FORMAT = 4


class SavedMechanism(MechanismState):
    """The state of a run as plain values, and back."""

    def state_dict(self, *, begin: bool = True, own: bool = False) -> dict[str, Any]:
        """Return the state as plain values and NumPy arrays, in a public and a **secret** part.

        The secret part (keys, states of correlated noise) must be kept as safe as the data; without it the state is
        safe to publish. With `begin` an account begins the run, so that it knows the state. With `own` each process
        gets a `Part` of each vector, its own one, and nothing is gathered.
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
        """Return what this process has of whole vectors, one for each tensor, from its own pieces."""
        dtype, alone = dtype_name(parts[0]), self.peers.world_size == 1
        # Alone, a vector may be shorter than its tensor: a projected one.
        sizes = map(len, parts) if alone else (entry.size for entry in self.layout.entries)
        found = [Part(None, 0, size, dtype) for size in sizes]
        for part, (tensor, start, _) in zip(parts, self.pieces, strict=True):
            found[tensor] = Part(part, start, found[tensor].size, dtype)
        return found

    def _all_held(self, vectors: Sequence[Any]) -> list[Any]:
        """Put together what is held of each tensor, where that is not all of it."""
        return self._whole(vectors) if self.peers.shards else list(vectors)

    def _own_parts(self, vectors: Sequence[Any]) -> list[Part]:
        return self._parts(self._own(vectors))

    def _arrays(self, vectors: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: vector.map(self.backend.to_numpy) if isinstance(vector, Part) else self.backend.to_numpy(vector)
            for name, vector in vectors.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state, and go on from it on a branch of its own.

        Rows of noise before the state's step keep their keys; from there on noise is fresh, and so are batches where
        they are drawn anew at every step: what was released after the save never shares noise with what follows.
        Vectors of correlated noise that the state lacks, or kept for another way of streaming, are made anew. Releases
        that this object made and now goes back behind stay counted (`abandoned`). What other processes released after
        the state was saved only a ledger can know; without one the statement says so.

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
            raise ArgumentError("state: must hold the clip norms of its run where the clip is adaptive, and only there")
        # Read before the fork: what a state lacks must not leave the run between two.
        statistics, corrections, rng = tuple(public["statistics"]), list(public["corrections"]), str(public["rng"])
        caller_noise, norms = bool(public["caller_noise"]), [float(norm) for norm in public.get("clip_norms", ())]
        self._fork(RunKeys.from_dict(secret), public, int(public["step"]))
        for vectors, theirs in zip(mine, saved, strict=True):
            for name, vector in vectors.items():
                if isinstance(vector, Part):
                    vector.take(theirs[name], self.backend.from_numpy)
                else:
                    vector[...] = self.backend.from_numpy(np.asarray(theirs[name]))
        if self._running is not None:
            self._running.norms = norms
        self.__dict__.pop("_variances", None)  # the plan may have taken over the saved noise multiplier
        self._statistics, self._corrections, self._caller_noise = statistics, corrections, caller_noise
        self._numbers = None
        self._torn = lost  # made anew before it is needed
        self.rng = rng
        self._discard()

    def _fork(self, keys: RunKeys, public: Mapping[str, Any], row: int) -> None:
        """Go on from row `row` of a state's branch under keys of its own; nothing is changed if the account refuses."""
        others = {name: Branch(*saved) for name, saved in public["branches"].items()}
        branches = self._agreed_branches().joined(others)
        found = None if self.account is None else self.account.resume(public["ledger"], row)
        name, number = found or (self.peers.same(os.urandom(8).hex()), None)
        keep = self.plan.sampler.keeps_order
        forked = keys.fork(keep_sampling=keep, forks=self.keys.forks, row=row, number=number)
        self.keys = RunKeys.from_dict(self.peers.same(forked.to_dict()))
        self.branches = branches.forked(public["branch"], name, row)
        self.step = row
        self.turns.anew()
        if self.account is not None:  # last: if it cannot be written, the keys are other ones all the same
            self.account.use_key(self.keys.digest)

    def _agreed_branches(self) -> Branches:
        """The first process's branches: it has the account. All processes must ask."""
        found = by_the_first(self.peers, self._branches)
        assert found is not None
        return found

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
