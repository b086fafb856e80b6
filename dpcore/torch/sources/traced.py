"""Per-example gradients by one batched forward pass and one backward pass for activations only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.functional import State, Values, call_with, check_versions, refuse_foreign, within
from dpcore.torch.sources.losses import LOSSES, Outputs, example_losses
from dpcore.torch.sources.places import FEW, MORE, Call, Site, UnknownLayout, sites
from dpcore.torch.sources.recorder import Recorder
from dpcore.torch.sources.rules import rule_of
from dpcore.torch.sources.sites import Learning, Sites
from dpcore.torch.sources.tracer import Phase, Tracer

ExampleLoss = Callable[[Any, tuple[Tree, ...]], torch.Tensor]
"""The loss of one example: its output and its targets, each as a batch of one; a scalar."""


class TracedGradient:
    """Blocks of the gradients of a model's loss for its trained parameters, which have the names of `values`.

    It must `learn` first. `one_by_one`: the losses are taken one after the other, where vmap cannot.
    """

    def __init__(self, model: nn.Module, loss: ExampleLoss, values: Values) -> None:
        self.model = model
        self.loss = loss
        self.values = values
        self.one_by_one = False
        self.low_precision = False  # whether an operation on a parameter gave 16 bits
        self.sites = Sites()
        self.outputs: Outputs | None = None

    def learn(self, made: Callable[[int], Tree], point: Sequence[torch.Tensor], keep: bool = False) -> None:
        """Find the examples in all that the model computes; ``made(n)`` is a made-up batch of n examples.

        With `keep`, what was learned before stays known: for another branch of the model, as with and without padding.

        Raises
        ------
        UnknownLayout
            If they cannot be found, or the operation on a parameter has no rule.
        """
        batch, state = made(MORE), torch.default_generator.get_state()
        losses: dict[int, Site] = {}
        for last in (False, False, True):
            (few, first), (more, second) = (self._recorded(point, batch, n, state, losses) for n in (FEW, MORE))
            try:
                learning = sites(few, more)
            except UnknownLayout:  # a model may do something in its first call alone
                if last:
                    raise
                continue
            found = {k: site for k, (call, site) in enumerate(learning) if call.function in LOSSES and site is not None}
            if found.keys() == losses.keys():
                break
            losses = found
        self.sites, self.outputs = self.sites if keep else Sites(), Outputs(first, second)
        self(point, batches.tree_map(torch.clone, batch), Learning(learning, state))
        torch.default_generator.set_state(state)

    def _recorded(
        self, point: Sequence[torch.Tensor], batch: Tree, count: int, state: torch.Tensor, losses: dict[int, Site]
    ) -> tuple[list[Call], Any]:
        inputs, _ = batches.normalize(batches.tree_map(lambda t: t[:count].clone(), batch))
        recorder = Recorder(count, state, losses)
        with self.values.at(point) as (_, state_there), torch.enable_grad(), _eager(), recorder:
            output = call_with(self.model, state_there, inputs)
        return recorder.calls, output

    def __call__(self, point: Sequence[torch.Tensor], batch: Tree, learning: Learning | None = None) -> list[Block]:
        """Return one block for each parameter. Model and loss may write to the batch: give a copy."""
        with self.values.at(point) as (leaves, state):
            return self._blocks(leaves, state, batch, learning)

    def _blocks(self, leaves: list[torch.Tensor], state: State, batch: Tree, learning: Learning | None) -> list[Block]:
        inputs, targets = batches.normalize(batch)
        examples, outputs = batches.size(batch), self.outputs
        tracer = Tracer(leaves, examples, self.sites, rule_of, learning)
        if examples == 0:
            return tracer.blocks()
        assert outputs is not None, "learn first"

        def both() -> None:
            output = batches.call(self.model, inputs)
            tracer.phase = Phase.LOSS
            losses = example_losses(self.loss, output, outputs, targets, examples, self.one_by_one)
            tracer.phase = Phase.BACKWARD
            if losses.requires_grad:
                if learning is not None:
                    refuse_foreign(losses, [*leaves, tracer.dummy, *tracer.made_leaves])
                _backward(losses.sum())

        # Gradient checkpoints run parts of the model again in the backward pass: it needs tracer and state, too.
        versions = {name: tensor._version for name, tensor in state.items()}
        with torch.enable_grad(), _eager(), tracer:
            within(self.model, state, both)
        check_versions(self.model, state, versions)
        self.low_precision = self.low_precision or tracer.low_precision
        return tracer.blocks()


def _backward(total: torch.Tensor) -> None:
    """Run the backward pass as ``total.backward()`` does, which would hide the modes that are active."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((total,), (torch.ones_like(total),), False, False, (), True, True)


def _eager() -> AbstractContextManager[Any]:
    """Compiled modules run as they were written: a compiled one shows none of its operations."""
    # Nothing is compiled before torch's compiler is loaded, which takes seconds.
    compiled = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
