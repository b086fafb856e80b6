"""A private run: what `make_private` hands to the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.loop import PRIVATE_DIAGNOSTICS
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.peers import Alone
from dpcore.mechanism.recorder import Recorder
from dpcore.plan.plan import Plan
from dpcore.spec import validate
from dpcore.spec.keys import RunKeys
from dpcore.statement.statement import Statement
from dpcore.statement.text import counted, format_epsilon, format_number
from dpcore.torch.assemble import assembled
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.loader import PrivateLoader
from dpcore.torch.engine import Engine
from dpcore.torch.explain import Explanation, explain
from dpcore.torch.model.check_module import Modes
from dpcore.torch.model.functional import whole_state
from dpcore.torch.optimizer import PrivateOptimizer
from dpcore.torch.parameter_views import Working
from dpcore.torch.peers import check_alone
from dpcore.torch.rehearsal import Rehearsal


class PrivateRun:
    """A model, its data and a plan, joined by `dpcore.torch.make_private`.

    Attributes
    ----------
    model : torch.nn.Module
        The caller's own, not wrapped.
    optimizer : PrivateOptimizer
        For learning-rate schedulers and checkpoints.
    loader, sampler : PrivateLoader, PrivateSampler
        Yield one epoch of drawn batches per iteration, or their indices, for a loader of your own.
    stopped_by_results : bool
        Set it where results decided to stop before the plan's end: statements then say that its epsilon holds.
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
        self.optimizer, self.loader, self.sampler = optimizer, loader, loader.sampler
        self._engine, self._rehearsal, self._modes = engine, rehearsal, modes
        self._target_delta, self._caveats = target_delta, caveats
        self.stopped_by_results = False

    def __repr__(self) -> str:
        """Say what is trained how, what was spent of what, and where."""
        return described(self, self._engine.mechanism, self._target_delta)

    @property
    def engine(self) -> Engine:
        """What takes the steps. Its parts may change with any version, and some of them are secret."""
        return self._engine

    def again(self) -> PrivateRun:
        """Return a further run of the plan, with fresh keys, no ledger, and the model's present parameters.

        For trials: its steps move the same parameters, and no account counts what they release.
        """
        engine, backend = self._engine, self._engine.mechanism.backend
        made = assembled(
            engine.gradient,
            Working(backend, engine.working.names, engine.working.parameters),
            self.loader.data,
            self.plan,
            RunKeys.new(),
            backend=backend,
            peers=Alone(),
            params=[dict(group) for group in self.optimizer.param_groups],
            microbatch_size=engine.microbatch_size,
        )
        rehearsal = Rehearsal(made[0], self._rehearsal.example)
        return PrivateRun(made[2], made[1], rehearsal, self._modes, self._target_delta, ())

    @property
    def plan(self) -> Plan:
        """The plan: method with its noise multiplier, sampler, steps."""
        return self._engine.mechanism.plan

    @property
    def steps_taken(self) -> int:
        """Steps released so far."""
        return self._engine.mechanism.step

    def event_after(self, steps: int) -> Event:
        """Return what is released once `steps` steps are taken, abandoned ones included.

        `steps` lead to the parameters; at least `steps_taken` for what may be known by now.
        """
        return self.plan.event_after(steps, self._engine.mechanism.abandoned)

    @property
    def microbatch_size(self) -> int:
        """Examples differentiated at once."""
        return self._engine.microbatch_size

    def explain(self) -> Explanation:
        """Return how steps are taken: way, micro-batch, memory, and a table of tensors with rule and share of the time.

        Measured now, on made-up examples, which takes the time of a few steps. Nothing is drawn or released: it costs
        no privacy, and the run goes on as if it had not been asked. ``print(private.explain())`` shows it.
        """
        self._engine.check_not_swapped("private.explain")
        with self._engine.mechanism.turns.lock:
            self._engine.take_up_parameters()
            return explain(self._rehearsal)

    def step(self, batch: Tree, public: Tree | None = None) -> None:
        """Take one private step on a batch from the loader, or on what `sampler.collate` made.

        Per-example gradients, clip, sum, noise, filter, update. The loss is not computed: it is a private diagnostic.

        Parameters
        ----------
        batch : tree of torch.Tensor
            The batch just drawn, whole; its values may have been changed (augmented) example by example.
        public : tree of torch.Tensor, optional
            A batch of **public** data in the form of `batch`, of any number of examples, where the method's second
            moment is made of its mean gradient (`second_moment="public"`); for no other method. It is taken as it is:
            no clip, no noise, no guarantee.

        Raises
        ------
        PrivacyError
            If the batch is not the one drawn: none was, it was stepped already, or it has another number of examples;
            also beyond the plan's last step.
        ArgumentError
            If the model changed so that it no longer is the one that was checked; if `public` is missing or not wanted.
        """
        self._modes.check()
        self.optimizer.take(batch, public)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the method's output into the model for the length of the block, and the training values back after it.

        The output is the average of the parameters where the method keeps one, and y of the accelerated method; for
        other methods the block changes nothing. It is a function of released vectors and costs no privacy. Steps,
        saving and loading are refused inside; whatever else is written to the trained parameters there is lost.
        """
        with self._engine.averaged():
            yield

    def output_state_dict(self) -> dict[str, Any]:
        """Return a copy of the model's state dict with the method's output in it: what to evaluate and to export."""
        with self.averaged():
            return whole_state(self.model)

    def negative_share(self) -> float:
        """Return the share of coordinates whose debiased second moment is negative after the last step; NaN without."""
        return self._engine.mechanism.negative_share()

    def record_gradients(self, coordinates: int) -> None:
        """Keep, from the next step on, some coordinates of what is released: a public record, see `recorded`.

        Steps then run as separate operations, which is slower and may round otherwise. Calling it again with the same
        number changes nothing, also after a state was loaded, whose record goes on; with another number a new record
        begins.

        Parameters
        ----------
        coordinates : int
            At most so many, evenly spaced over all parameters.
        """
        check_alone(self._engine.mechanism.peers, record_gradients=True)
        recorder = Recorder(self._engine.mechanism.layout, validate.integer(minimum=1, coordinates=coordinates))
        present = self._engine.recorder
        if present is None or present.coordinates != recorder.coordinates:
            self._engine.recorder = recorder

    @property
    def recorded(self) -> dict[str, Any]:
        """What was recorded, as keywords of `dpcore.cli.gradients.save_gradients`.

        Released averages and filter outputs, (T, m) float32; the negative share of the second moments, (T,); the number
        of parameters; the standard deviation of the seed noise on the average; and whether the noise is that in every
        step and coordinate.
        """
        recorder, plan = self._engine.recorder, self.plan
        if recorder is None:
            raise ArgumentError("recorded: nothing was; call private.record_gradients(coordinates) before the steps")
        colored = (plan.method.noise.strategy, plan.method.preconditioning, plan.adaptive_clip)
        return {
            **recorder.arrays(),
            "dimension": self._engine.mechanism.layout.dimension,
            "noise_std": plan.noise_standard_deviation() / plan.batch_size,
            "white_noise": all(cause is None for cause in colored),
        }

    @property
    def clip_norms(self) -> list[float] | None:
        """The clip norm of every step so far and of the next one, where it is adapted; they are released."""
        return self._engine.mechanism.clip_norms

    @property
    def private_diagnostics(self) -> dict[str, NDArray[np.float64]] | None:
        """The norm of each step's clipped average over the clip norm, where it was asked for. **Private**."""
        taken = self._engine.diagnostics
        return None if taken is None else {"clipped_mean_norm": np.array(taken, dtype=np.float64)}

    def epsilon(self, delta: float | None = None, *, accountant: str | None = None, planned: bool = False) -> float:
        """Return the epsilon spent by all that was released so far, abandoned steps included.

        Parameters
        ----------
        delta : float, optional
            By default the target delta.
        accountant : str, optional
            By default the smallest value of all accountants that cover the run: each of them is an upper bound.
        planned : bool
            Of the whole plan instead, which holds also where results decide when to stop.
        """
        chosen, event = self._delta(delta), self.event_after(self.plan.steps if planned else self.steps_taken)
        if accountant is not None:
            return accounting.epsilon(event, chosen, accountant)
        return accounting.smallest_epsilon(event, chosen)[0]

    def statement(self, delta: float | None = None, *, note: str = "") -> Statement:
        """Return the privacy statement for all that was released so far."""
        asked = self._engine.diagnostics is not None
        return stated(self, self._engine.mechanism, self._delta(delta), self._caveats, asked, note)

    def any_process(self, condition: bool) -> bool:
        """Return whether a condition, a bool that all must give, holds in any process: all may then stop together."""
        return self._engine.mechanism.peers.added([float(condition)])[0] > 0

    def begin(self) -> None:
        """Begin the run in its ledger now, and not at the first batch; without a ledger there is nothing to begin.

        Raises
        ------
        BudgetError
            If the ledger's budget does not allow one step.
        """
        if (account := self._engine.mechanism.account) is not None:
            account.begin()

    def close(self) -> None:
        """End the run's account: what its ledger reserved and the run did not release is given back.

        Without a ledger there is nothing to end. A process that ends in good order does this by itself.
        """
        if (account := self._engine.mechanism.account) is not None:
            account.close()

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: what a run holds includes its keys."""
        raise PrivacyError("a private run is not pickled or copied: save private.optimizer.state_dict() instead")

    def _delta(self, delta: float | None) -> float:
        if (chosen := self._target_delta if delta is None else delta) is None:
            raise ArgumentError("delta=None: must be given, since make_private got no target_delta")
        return chosen


def described(run: PrivateRun, mechanism: Mechanism, delta: float | None) -> str:
    """Return what is trained by which method, what was spent of what is planned, and where: all of it public."""
    plan, peers = mechanism.plan, mechanism.peers
    parameters, sampler = mechanism.layout.dimension, plan.sampler
    lines = {
        "model": f"{type(run.model).__name__}, {parameters:,} trained parameters",
        "method": f"{plan.method.name}, noise multiplier {format_number(round(plan.noise_multiplier, 4))}",
        "epsilon": _epsilon(run, delta),
        "steps": f"{mechanism.step:,} of {plan.steps:,} done",
        "sampling": f"{type(sampler).__name__}, batches of {plan.batch_size:,g} of {sampler.dataset_size:,} expected",
        "backend": f"{mechanism.backend.name}, {peers.world_size} process{'es' * (peers.world_size > 1)}",
    }
    return "\n".join(["PrivateRun(", *(f"  {name}: {words}" for name, words in lines.items()), ")"])


def _epsilon(run: PrivateRun, delta: float | None) -> str:
    if delta is None:
        return "private.epsilon(delta) says it; no target_delta was given"
    planned = run.plan.epsilon(delta)
    spent, whole = format_epsilon(run.epsilon(delta)), format_epsilon(planned)
    return f"{spent} spent of {whole} planned, at delta {format_number(delta)}"


def stated(
    run: PrivateRun, mechanism: Mechanism, delta: float, caveats: tuple[str, ...], diagnostics: bool, note: str
) -> Statement:
    """Return the privacy statement for all that was released so far."""
    taken = (PRIVATE_DIAGNOSTICS,) if diagnostics else ()
    notes = " ".join(part for part in (note, _stop(run, delta), _rates(run)) if part)
    software: dict[str, str] = {"torch": torch.__version__}
    statement = mechanism.statement(delta, caveats=(*caveats, *taken), note=notes, software=software)
    return replace(statement, date=datetime.now(UTC).date().isoformat())


def _rates(run: PrivateRun) -> str:
    """Say which learning rates are in force, where they are no longer the method's, which the statement lists."""
    present = sorted({float(group["lr"]) for group in run.optimizer.param_groups})
    if present == [run.plan.method.update.settings().learning_rate]:
        return ""
    return (
        "The learning rate was set beside the method, by groups, a scheduler or a loaded state: at last "
        f"{' and '.join(f'{rate:.6g}' for rate in present)}. The guarantee does not depend on it."
    )


def _stop(run: PrivateRun, delta: float) -> str:
    """Say which epsilon holds after a stop that results decided.

    The epsilon of a number of steps is that of a number fixed beforehand. Where it follows from what was released, what
    is known in the end is a function of the releases of the whole plan: those up to the stop decide it, and the rest is
    left out. So the epsilon of the plan holds.
    """
    if not run.stopped_by_results or run.steps_taken >= run.plan.steps:
        return ""
    return (
        f"Results decided to stop after {run.steps_taken:,} of {counted(run.plan.steps, 'planned step')}: the epsilon "
        f"that holds then is that of all planned steps, {format_epsilon(run.epsilon(delta, planned=True))}, and not "
        "that of the steps taken, which is of a number fixed beforehand."
    )
