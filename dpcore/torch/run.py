"""A private run: what `make_private` hands to the training loop."""

from __future__ import annotations

import math
from typing import NoReturn

import torch
from torch import nn

from dpcore import accounting
from dpcore.errors import ArgumentError, PrivacyError
from dpcore.plan import Plan
from dpcore.report.statement import Statement
from dpcore.torch.batches import Tree
from dpcore.torch.check_module import check_still_frozen
from dpcore.torch.engine import Engine
from dpcore.torch.loader import PrivateLoader
from dpcore.torch.optimizer import PrivateOptimizer


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
        model: nn.Module,
        optimizer: PrivateOptimizer,
        loader: PrivateLoader,
        engine: Engine,
        frozen: tuple[nn.Module, ...],
        target_delta: float | None,
        caveats: tuple[str, ...] = (),
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loader = loader
        self._engine = engine
        self._frozen = frozen
        self._target_delta = target_delta
        self._caveats = caveats

    @property
    def plan(self) -> Plan:
        """The plan: method with its noise multiplier, sampler, steps."""
        return self._engine.mechanism.plan

    @property
    def steps_taken(self) -> int:
        """Steps released so far."""
        return self._engine.mechanism.step

    @property
    def microbatch_size(self) -> int:
        """Examples differentiated at once."""
        return self._engine.microbatch_size

    def step(self, batch: Tree) -> None:
        """Take one private step on a batch from the loader.

        Per-example gradients, clip, sum, noise, filter, update. The loss is not computed: it is a private diagnostic.

        Parameters
        ----------
        batch : tree of torch.Tensor
            The batch just drawn, whole; its values may have been changed (augmented) example by example.

        Raises
        ------
        PrivacyError
            If the batch is not the one drawn: none was, it was stepped already, or it has another number of examples;
            also beyond the plan's last step.
        ArgumentError
            If the model changed so that it no longer is the one that was checked.
        """
        check_still_frozen(self.model, self._frozen)
        self.optimizer.take(batch)

    def epsilon(self, delta: float | None = None, *, accountant: str | None = None) -> float:
        """Return the epsilon spent by all that was released so far, abandoned steps included.

        Parameters
        ----------
        delta : float, optional
            By default the target delta.
        accountant : str, optional
            By default the smallest value of all accountants that cover the run: each of them is an upper bound.
        """
        chosen = self._delta(delta)
        mechanism = self._engine.mechanism
        event = self.plan.event_after(mechanism.step, mechanism.abandoned)
        if accountant is not None:
            return accounting.epsilon(event, chosen, accountant)
        names = accounting.accountants_for(event)
        return min((accounting.epsilon(event, chosen, name) for name in names), default=math.inf)

    def statement(self, delta: float | None = None, *, note: str = "") -> Statement:
        """Return the privacy statement for all that was released so far."""
        return self._engine.mechanism.statement(
            self._delta(delta), caveats=self._caveats, note=note, software={"torch": torch.__version__}
        )

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled: what a run holds includes its keys."""
        raise PrivacyError("a private run is not pickled or copied: save private.optimizer.state_dict() instead")

    def _delta(self, delta: float | None) -> float:
        chosen = self._target_delta if delta is None else delta
        if chosen is None:
            raise ArgumentError("delta=None: must be given, since make_private got no target_delta")
        return chosen
