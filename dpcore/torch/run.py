"""A private run, and one step of it: a batch is summed (`Engine`), then `PrivateOptimizer.step` releases the sum."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.errors import ArgumentError, DataError, DpcoreError, PrivacyError
from dpcore.mechanism.recorder import Recorder
from dpcore.plan.plan import Plan
from dpcore.spec import validate
from dpcore.spec.ops import UpdateSettings
from dpcore.statement.statement import Statement
from dpcore.statement.text import counted, format_epsilon, format_number
from dpcore.torch import checkpoint, groups
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.engine import Engine
from dpcore.torch.explain import Explanation, Rehearsal, explain
from dpcore.torch.model.check_module import Modes
from dpcore.torch.model.functional import whole_state
from dpcore.torch.peers import check_alone


class PrivateRun:
    """A model, its data and a plan, joined by `dpcore.torch.make_private`.

    Attributes
    ----------
    model : torch.nn.Module
        The caller's own, not wrapped.
    optimizer : PrivateOptimizer
        For learning-rate schedulers and checkpoints.
    loader : PrivateLoader
        Yields one epoch of drawn batches per iteration.
    """

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        loader: PrivateLoader,
        rehearsal: Rehearsal,
        modes: Modes,
        target_delta: float | None,
        caveats: tuple[str, ...],
    ) -> None:
        engine = rehearsal.engine
        self.model = engine.gradient.model
        self.optimizer, self.loader = optimizer, loader
        self._engine, self._rehearsal, self._modes = engine, rehearsal, modes
        self._target_delta, engine.caveats = target_delta, caveats

    def __repr__(self) -> str:
        """Return model, method, epsilon spent and planned, steps, sampling and backend, all of it public."""
        plan, mechanism, delta = self.plan, self._engine.mechanism, self._target_delta
        spent, processes = "see private.epsilon(delta); no target_delta was given", mechanism.peers.world_size
        if delta is not None:
            spent = "rank 0 knows it"
            if self.loader.in_first_process:
                try:
                    so_far = format_epsilon(self.epsilon(delta))
                except DataError:  # a printed object is no place for it to end
                    so_far = "unknown (the ledger cannot be read)"
                planned = format_epsilon(plan.epsilon(delta))
                spent = f"{so_far} spent of {planned} planned, at delta {format_number(delta)}"
        lines = {
            "model": f"{type(self.model).__name__}, {mechanism.layout.dimension:,} trained parameters",
            "method": f"{plan.method.name}, noise multiplier {format_number(round(plan.noise_multiplier, 4))}",
            "epsilon": spent,
            "steps": f"{mechanism.step:,} of {plan.steps:,} done",
            "sampling": f"{type(plan.sampler).__name__}, batches of {plan.batch_size:,g} of "
            f"{plan.sampler.dataset_size:,} expected",
            "backend": f"{mechanism.backend.name}, {processes} process{'es' * (processes > 1)}",
        }
        return "\n".join(["PrivateRun(", *(f"  {name}: {words}" for name, words in lines.items()), ")"])

    @property
    def engine(self) -> Engine:
        """The engine that takes the steps. Its parts may change with any version, and some are secret."""
        return self._engine

    @property
    def plan(self) -> Plan:
        """The plan: method with its noise multiplier, sampler, steps."""
        return self._engine.mechanism.plan

    @property
    def stopped_by_results(self) -> bool:
        """Whether results decided to stop before the plan's end: `epsilon` and statements are then the whole plan's.

        Set it in a loop that stops by rules of its own; a saved state keeps it.
        """
        return self._engine.mechanism.stopped_by_results

    @stopped_by_results.setter
    def stopped_by_results(self, stopped: bool) -> None:
        self._engine.mechanism.stopped_by_results = stopped

    @property
    def steps_taken(self) -> int:
        """Steps released so far."""
        return self._engine.mechanism.step

    def event_after(self, steps: int) -> Event:
        """Return the event of all releases up to a step, abandoned steps included.

        `steps` is the number of steps that lead to the parameters. For everything that may be known now, give at least
        `steps_taken`.
        """
        return self.plan.event_after(steps, self._engine.mechanism.abandoned)

    @property
    def microbatch_size(self) -> int:
        """Examples differentiated at once."""
        return self._engine.microbatch_size

    def explain(self) -> Explanation:
        """Return how steps are taken: way, micro-batch, memory, and a table of tensors with rule and bytes.

        It follows from sizes: nothing is drawn, computed or released. ``print(private.explain())`` shows it.
        """
        return explain(self._rehearsal)

    def step(self, batch: Tree, public: Tree | None = None) -> None:
        """Take one private step on a batch from the loader.

        A step is per-example gradients, clip, sum, noise, filter, update. The loss, a private diagnostic, is not
        computed.

        Parameters
        ----------
        batch : tree of torch.Tensor
            The whole batch that was just drawn; its values may have been changed (augmented) example by example.
        public : tree of torch.Tensor, optional
            A batch of **public** data in the form of `batch`, with any number of examples. Only for a method whose
            second moment is made of its mean gradient (`second_moment="public"`). It gets no clip, no noise and no
            guarantee.

        Raises
        ------
        PrivacyError
            If no batch was drawn, if it was stepped already, if it has another number of examples, or if the plan has
            no step left.
        ArgumentError
            If the model is no longer the one that was checked; if `public` is missing or not wanted.
        """
        engine, mechanism = self._engine, self._engine.mechanism
        with mechanism.turns.lock:  # a whole step of one thread
            if engine.stepping:
                raise PrivacyError("private.step: called while a step is under way, as by a signal's handler")
            engine.stepping, mechanism.asked = True, False
            # Processes with shards gather the model's parameters first, when no answer is possible.
            begun = not mechanism.peers.shards
            try:
                self._modes.check()
                engine.check_not_swapped("private.step")
                engine.check_public(public)
                self.optimizer.settings()  # refused before the sum is paid for
                batch, begun = self.loader.consume(batch), True
                if public is not None and batches.memory(public) & batches.memory((batch, self.loader.data.tree)):
                    raise ArgumentError("public: must be separate data, but shares memory with the private data")
                engine.accumulate(batch, public)
                engine.summed = True
                self.optimizer.step()
            except Exception:
                if begun and not mechanism.asked:  # the others wait for an answer
                    with suppress(PrivacyError):  # the error here says more
                        mechanism.peers.agree(failed=True)
                raise
            finally:
                engine.stepping = engine.summed = False

    def averaged(self) -> AbstractContextManager[None]:
        """Put the method's output into the model inside the block, and restore the training values after it.

        The output is the average of the parameters if the method keeps one, and y for the accelerated method; for other
        methods the block changes nothing. It is a function of released vectors and costs no privacy. Inside, steps,
        saving and loading are refused, and anything else written to the trained parameters is lost. It begins and ends
        between the steps of other threads.
        """
        return self._engine.averaged()

    def output_state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state dict with the method's output in it, for evaluation and export."""
        with self.averaged():
            return whole_state(self.model)

    def negative_share(self) -> float:
        """Return the share of negative debiased second moments after the last step; NaN if there is no such moment."""
        return self._engine.mechanism.negative_share()

    def record_gradients(self, coordinates: int) -> None:
        """Record some coordinates of the releases from the next step on. The record is public; see `recorded`.

        Steps then run as separate operations, which is slower and may round differently. A second call with the same
        number changes nothing, even after loading a state, whose record continues. Another number begins a new record.

        Parameters
        ----------
        coordinates : int
            Largest number of coordinates, evenly spaced over all parameters.
        """
        check_alone(self._engine.mechanism.peers, record_gradients=True)
        recorder = Recorder(self._engine.mechanism.layout, validate.integer(minimum=1, coordinates=coordinates))
        present = self._engine.recorder
        if present is None or present.coordinates != recorder.coordinates:
            self._engine.recorder = recorder

    @property
    def recorded(self) -> dict[str, Any]:
        """The record, as keywords of `dpcore.cli.gradients.save_gradients`.

        Released averages and filter outputs, (T, m) float32; the negative share of the second moments, (T,); the number
        of parameters; the standard deviation of the seed noise on the average; and whether all steps and coordinates
        have noise of that standard deviation.
        """
        recorder, plan = self._engine.recorder, self.plan
        if recorder is None:
            raise ArgumentError("recorded: is empty; call private.record_gradients(coordinates) before the steps")
        colored = (plan.method.noise.strategy, plan.method.preconditioning, plan.adaptive_clip)
        return {
            **recorder.arrays(),
            "dimension": self._engine.mechanism.layout.dimension,
            "noise_std": plan.noise_standard_deviation() / plan.batch_size,
            "white_noise": all(cause is None for cause in colored),
        }

    @property
    def clip_norms(self) -> list[float] | None:
        """The released clip norms of all steps so far and of the next one; None if the clip norm is not adapted."""
        return self._engine.mechanism.clip_norms

    def epsilon(self, delta: float | None = None, *, accountant: str | None = None, planned: bool = False) -> float:
        """Return the epsilon of all releases so far, abandoned steps included; of the plan if results decided to stop.

        Parameters
        ----------
        delta : float, optional
            By default the target delta.
        accountant : str, optional
            By default the smallest value of all accountants that cover the run: each of them is an upper bound.
        planned : bool
            Return the epsilon of the whole plan instead, which holds even if results decide when to stop.
        """
        planned = planned or self.stopped_by_results
        chosen, event = self._delta(delta), self.event_after(self.plan.steps if planned else self.steps_taken)
        if accountant is not None:
            return accounting.epsilon(event, chosen, accountant)
        return accounting.smallest_epsilon(event, chosen)[0]

    def statement(self, delta: float | None = None, *, note: str = "") -> Statement:
        """Return the privacy statement for all that was released so far."""
        chosen = self._delta(delta)
        statement = self._engine.mechanism.statement(
            chosen,
            caveats=self._engine.caveats,
            note=" ".join(part for part in (note, self._stop(), self._rates()) if part),
            software={"torch": torch.__version__},
        )
        return replace(statement, date=datetime.now(UTC).date().isoformat())

    def _rates(self) -> str:
        """Return a note on the present learning rates if they differ from the method's, which the statement lists."""
        present = sorted({float(group["lr"]) for group in self.optimizer.param_groups})
        if present == [self.plan.method.update.settings().learning_rate]:
            return ""
        return (
            "The learning rate was set beside the method, by groups, a scheduler or a loaded state: at last "
            f"{' and '.join(f'{rate:.6g}' for rate in present)}. The guarantee does not depend on it."
        )

    def _stop(self) -> str:
        """Return a note on why a stop that results decided costs the whole plan."""
        if not self.stopped_by_results or self.steps_taken >= self.plan.steps:
            return ""
        return (
            f"Results decided to stop after {self.steps_taken:,} of {counted(self.plan.steps, 'planned step')}, so "
            "epsilon counts all planned steps: the epsilon of fewer requires that their number was fixed beforehand."
        )

    def any_process(self, condition: bool) -> bool:
        """Return whether the condition holds in any process, so that all stop together. All processes must call it."""
        return self._engine.mechanism.peers.added([float(condition)])[0] > 0

    def begin(self) -> None:
        """Begin the run in its ledger now rather than at the first batch. Without a ledger, do nothing.

        Raises
        ------
        BudgetError
            If the ledger's budget does not allow one step.
        """
        if (account := self._engine.mechanism.account) is not None:
            account.begin()

    def close(self) -> None:
        """End the run's account: the ledger gets back the budget that was reserved and not spent.

        Without a ledger, do nothing. A process that ends normally does this by itself.
        """
        if (account := self._engine.mechanism.account) is not None:
            account.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, since a run contains its keys."""
        raise PrivacyError("a private run is not pickled or copied: save private.optimizer.state_dict() instead")

    def _delta(self, delta: float | None) -> float:
        if (chosen := self._target_delta if delta is None else delta) is None:
            raise ArgumentError("delta=None: must be given, since make_private got no target_delta")
        return chosen


class PrivateOptimizer(torch.optim.Optimizer):
    """The run's optimizer: parameter groups, schedulers, hooks and state_dict as in torch.

    Made by `dpcore.torch.make_private`, not by hand. ``private.step(batch)`` calls `step` once the batch's sum is
    complete. Learning rate, weight decay, momentum or betas and eps are read from the groups at every step.

    Notes
    -----
    Nothing is stored on parameters: ``p.grad`` does not change (neither per-example gradients nor the noisy average
    are written there), `state` stays empty, and the mechanism stores the moments.
    """

    def __init__(self, params: Any, engine: Engine) -> None:
        self._engine, self._sealed = engine, False
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
        """Release the sum that ``private.step(batch)`` collected, and update the parameters.

        Raises
        ------
        PrivacyError
            If no batch was summed: call ``private.step(batch)`` instead.
        """
        if closure is not None:
            raise ArgumentError("closure: must be None; the gradients are taken per example by private.step(batch)")
        if not self._engine.summed:
            raise PrivacyError(
                "optimizer.step(): no batch was summed; call private.step(batch), which ends in this step"
            )
        self._engine.release(self.settings())

    def settings(self) -> list[UpdateSettings]:
        """Return the present settings of each trained parameter."""
        by_group = [groups.settings(group, self._update) for group in self.param_groups]
        return [by_group[group] for group in self._group_of]

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: torch would write only the groups, from which no run can resume."""
        raise PrivacyError(
            "a private optimizer is not pickled or copied: save its state_dict(), which has a secret part"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state (parameter groups) and dpcore's under "dpcore", in a public and a **secret** part.

        The secret part is the keys of noise and sampling, the earlier noise that correlated noise still needs, and the
        cursor. Keep it as safe as the data: whoever has it can subtract the noise. `dpcore.torch.save_state` writes it
        so that only its owner can read it, and `dpcore.torch.public_state` returns a copy without it.
        """
        self._engine.check_not_swapped("optimizer.state_dict")
        return {**super().state_dict(), "dpcore": checkpoint.save(self._engine)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state. Load the model's own state, too.

        Later steps draw fresh noise, and fresh batches if the sampler draws each step independently: steps taken after
        the checkpoint may have been seen, and the same noise on another sum would reveal both. These steps stay counted
        in epsilon: those of this run object always, those of other processes with a ledger.

        Parameters
        ----------
        state_dict : mapping
            From `state_dict`, of a run with the same method, data size, sampler, planned steps and tensors.

        Raises
        ------
        ArgumentError
            If the state is of another run's settings, or damaged; nothing was changed then.
        DataError, PrivacyError
            If the state's run has a ledger and this one has not, or if the ledger does not allow it; nothing was
            changed then.
        """
        if "dpcore" not in state_dict:
            raise ArgumentError("state_dict without 'dpcore': must come from the state_dict() of a private optimizer")
        checkpoint.check_one_state(self._engine.mechanism.peers, state_dict)
        with self._engine.mechanism.turns.lock:
            self._engine.check_not_swapped("optimizer.load_state_dict")
            before = super().state_dict()
            with checkpoint.undamaged():
                own = checkpoint.save(self._engine, begin=False, own=True)
                read = checkpoint.checked(self._engine, state_dict["dpcore"], own)
            with checkpoint.undamaged(secret=False):
                needed = groups.defaults(self._update)  # torch adds its own to `self.defaults` as it loads a state
                for group in state_dict["param_groups"]:
                    if not needed.keys() <= group.keys():
                        key = next(key for key in needed if key not in group)
                        raise ArgumentError(
                            f"state_dict['param_groups']: a group lacks {key!r}, which the update needs"
                        )
                    groups.settings(group, self._update)
                # torch checks the number of groups and of their parameters before it changes them. After that only a
                # ledger can refuse, and then the groups are restored.
                super().load_state_dict({key: value for key, value in state_dict.items() if key != "dpcore"})
            try:
                checkpoint.load(self._engine, read)
            except DpcoreError:
                super().load_state_dict(before)
                raise
            self._engine.summed = False

    def save_sharded(self, folder: str | os.PathLike[str]) -> None:
        """Write the state into a folder, each process its own part; see `state_dict`. All processes must call it.

        Nothing is gathered: of W processes each writes 1/W of the vectors, the first one also the rest. A crash leaves
        the earlier state or the new one.

        Parameters
        ----------
        folder : path
            A folder that all processes see. It is created if necessary; files of an earlier state in it are replaced.

        Raises
        ------
        DataError
            If a process could not write. The earlier state is kept then.
        """
        self._engine.check_not_swapped("optimizer.save_sharded")
        state = {**super().state_dict(), "dpcore": checkpoint.save(self._engine, own=True)}
        checkpoint.write_parts(Path(folder), state, self._engine.mechanism.peers)

    def load_sharded(self, folder: str | os.PathLike[str]) -> None:
        """Continue from a state that `save_sharded` wrote, in any number of processes; see `load_state_dict`.

        All processes must call it. Each reads its own coordinates.

        Raises
        ------
        DataError
            If files are missing or damaged; nothing was changed then.
        ArgumentError, PrivacyError
            As `load_state_dict` does.
        """
        self.load_state_dict(checkpoint.read_parts(Path(folder), self._engine.mechanism.peers))
