"""A torch optimizer whose step is a private release."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from dpcore.errors import ArgumentError, DpcoreError, PrivacyError
from dpcore.spec.ops import UpdateSettings
from dpcore.torch import groups
from dpcore.torch.data import batches
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.engine import Engine
from dpcore.torch.state import checkpoint, sharded
from dpcore.torch.state.check_state import check


class PrivateOptimizer(torch.optim.Optimizer):
    """The run's optimizer: parameter groups, schedulers, hooks and state_dict as in torch.

    Made by `dpcore.torch.make_private`, not by hand. `step` is called by ``private.step(batch)`` once the batch's sum
    is complete. Learning rate, weight decay, momentum or betas and eps are read from the groups at every step.

    Notes
    -----
    Nothing is stored on parameters: ``p.grad`` stays what it was (per-example gradients never go there, and neither
    does the noisy average), `state` stays empty, and the moments live in the mechanism.
    """

    def __init__(self, params: Any, engine: Engine, loader: PrivateLoader) -> None:
        self._engine = engine
        self._loader = loader
        self._ready = self._taking = self._sealed = False
        self._update = engine.mechanism.plan.method.update
        known = groups.defaults(self._update)
        # Groups saved by an older state, or by torch's own schedulers, may carry more; a new one may not.
        listed = groups.as_groups(params)
        for group in listed:
            groups.check_keys(group, known)
        super().__init__(listed, known)
        self._sealed = True
        self._group_of = groups.matched(self.param_groups, engine.working.names, engine.working.parameters)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a new group: the run's tensors are fixed when it is built (torch calls this for the first ones)."""
        if self._sealed:
            raise PrivacyError(
                "add_param_group: the tensors of a private run are fixed when it is built; call make_private again"
            )
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Release the sum that ``private.step(batch)`` collected, and move the parameters.

        Raises
        ------
        PrivacyError
            If no sum is waiting: call ``private.step(batch)`` instead.
        """
        if closure is not None:
            raise ArgumentError("closure: must be None; the gradients are taken per example by private.step(batch)")
        if not self._ready:
            raise PrivacyError(
                "optimizer.step(): no batch was summed; call private.step(batch), which ends in this step"
            )
        settings = self.settings()
        self._ready = False
        self._engine.release(settings)

    def take(self, batch: Any, public: Any = None) -> None:
        """Sum one drawn batch and step: what ``private.step`` calls."""
        self._engine.check_not_swapped("private.step")
        with self._engine.mechanism.turns.lock:  # a whole step of one thread
            if self._taking:
                raise PrivacyError("private.step: called while a step is under way, as by a signal's handler")
            mechanism, self._taking = self._engine.mechanism, True
            number, mechanism.asked = mechanism.step, False
            # Processes that hold shards gather a model's parameters first, where no answer can be given.
            begun = not mechanism.peers.shards
            try:
                self._engine.check_public(public)
                self.settings()  # refused before the sum is paid for
                batch, begun = self._loader.consume(batch), True
                if public is not None and batches.memory(public) & batches.memory((batch, self._loader.data.tree)):
                    raise ArgumentError("public: must be data of its own, and lies in the memory of the private data")
                self._engine.accumulate(batch, public)
                self._ready = True
                self.step()
            except Exception:
                if begun and not mechanism.asked:  # the others wait for an answer
                    with suppress(PrivacyError):  # what failed here says more
                        mechanism.peers.agree(failed=True)
                raise
            finally:
                self._ready = self._taking = False
                if mechanism.step > number:  # released, even if what came after it failed
                    self._loader.forget()

    def settings(self) -> list[UpdateSettings]:
        """Return the present settings of each trained parameter."""
        found = [groups.settings(group, self._update) for group in self.param_groups]
        return [found[group] for group in self._group_of]

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: torch would write the groups alone, which nothing could go on from."""
        raise PrivacyError(
            "a private optimizer is not pickled or copied: save its state_dict(), which has a secret part"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state (parameter groups) and dpcore's under "dpcore", in a public and a **secret** part.

        The secret part holds the keys of noise and sampling, what correlated noise still holds of earlier steps, the
        cursor, and private diagnostics where they are taken. Keep it as safe as the data: whoever has it can subtract
        the noise. `dpcore.torch.save_state` writes it so that its owner alone can read it, `dpcore.torch.public_state`
        returns a copy without it.
        """
        self._engine.check_not_swapped("optimizer.state_dict")
        return {**super().state_dict(), "dpcore": checkpoint.save(self._engine)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state. Load the model's own state beside it.

        What follows draws fresh noise, and fresh batches where every step draws anew: steps taken after the checkpoint
        may have been seen, and the same noise on another sum would give both away. They stay counted in epsilon: those
        of this run object always, those of other processes with a ledger.

        Parameters
        ----------
        state_dict : mapping
            From `state_dict`, of a run with the same method, data size, sampler, planned steps and tensors.

        Raises
        ------
        ArgumentError
            If the state is of another run's settings, or damaged; nothing was changed then.
        DataError, PrivacyError
            If the ledger does not allow it; nothing was changed then.
        """
        if "dpcore" not in state_dict:
            raise ArgumentError("state_dict without 'dpcore': must come from the state_dict() of a private optimizer")
        self._engine.check_not_swapped("optimizer.load_state_dict")
        checkpoint.check_one_state(self._engine.mechanism.peers, state_dict)
        with self._engine.mechanism.turns.lock:
            check(self._engine, state_dict["dpcore"], checkpoint.save(self._engine, begin=False, own=True))
            needed = groups.defaults(self._update)  # torch adds its own to `self.defaults` as it loads a state
            for group in state_dict["param_groups"]:
                if not needed.keys() <= group.keys():
                    key = next(key for key in needed if key not in group)
                    raise ArgumentError(f"state_dict['param_groups']: a group lacks {key!r}, which the update needs")
                groups.settings(group, self._update)
            # torch checks the number of groups and of their parameters before it changes them; only a ledger may still
            # refuse what comes after, and then the groups are put back.
            before = super().state_dict()
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "dpcore"})
            try:
                checkpoint.load(self._engine, state_dict["dpcore"])
            except DpcoreError:
                super().load_state_dict(before)
                raise
            self._ready = False
            self._loader.forget()

    def save_sharded(self, folder: str | os.PathLike[str]) -> None:
        """Write the state into a folder, each process its own part; see `state_dict`. All processes must call it.

        Nothing is gathered: a process writes 1/W of the vectors, and the first one the rest. A crash leaves the state
        that was there or the new one.

        Parameters
        ----------
        folder : path
            Which all processes see. Made if it does not exist; of an earlier state in it the files are replaced.

        Raises
        ------
        DataError
            If a process could not write; the earlier state is still there then.
        """
        self._engine.check_not_swapped("optimizer.save_sharded")
        state = {**super().state_dict(), "dpcore": checkpoint.save(self._engine, own=True)}
        sharded.write(Path(folder), state, self._engine.mechanism.peers)

    def load_sharded(self, folder: str | os.PathLike[str]) -> None:
        """Go on from a state that `save_sharded` wrote, in any number of processes; see `load_state_dict`.

        All processes must call it. Each reads its own coordinates.

        Raises
        ------
        DataError
            If files are missing or damaged; nothing was changed then.
        ArgumentError, PrivacyError
            As `load_state_dict` does.
        """
        self.load_state_dict(sharded.read(Path(folder), self._engine.mechanism.peers))
