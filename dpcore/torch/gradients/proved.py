"""Per-example gradients by the model's graph, proved to keep the examples apart.

The model's Python code runs while its graph is captured, on tensors without values, and never in a step. So nothing that
it keeps, reads or decides can carry one example's values to another one. What a user changes on purpose is followed: modes,
plain attributes and hooks of modules are looked at in every step, and another combination is another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients import cache
from dpcore.torch.gradients.capture import capture, uncollected
from dpcore.torch.gradients.check_loss import Calls
from dpcore.torch.gradients.errors import NotCaptured
from dpcore.torch.gradients.kept import Made
from dpcore.torch.gradients.losses import ExampleLoss
from dpcore.torch.gradients.program import Program
from dpcore.torch.model.functional import Values, local
from dpcore.torch.model.state_probe import Snapshot
from dpcore.torch.randomness import TRIAL, seeded

Inputs = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]
"""Values of the trained parameters, what the model holds else, and the batch's tensors."""

_FORMS = 8
"""Graphs of this many forms of batch and modes are kept at one time."""


class ProvedGradient:
    """The graphs of a model's loss, by the forms of batches and the modes of the model.

    Parameters
    ----------
    model : torch.nn.Module
    loss : callable
        The user's own, which tells equal models from others.
    loss_of : callable
        The loss of one example's output and its targets, each as a batch of one; a scalar.
    values : Values
        How the model's parameters are put in place; they name the trained ones.
    held : callable
        Returns a snapshot of what model and loss hold.

    Raises
    ------
    NotProved
        By `prove` and by `current` for a batch of another form: there is no proof, with the operation and the line.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        loss_of: ExampleLoss,
        values: Values,
        held: Callable[[], Snapshot],
    ) -> None:
        self.model, self.loss, self.values = model, loss, values
        self._loss_of, self._snapshot = loss_of, held
        self.programs: dict[Hashable, Program] = {}
        self._readers: dict[Program, list[tuple[dict[str, Any], str]]] = {}
        self._device = next(model.parameters()).device
        self._calls = 0
        self.compiled = False  # whether torch.compile makes kernels of the graphs
        self.changes_state = False  # whether the code changed anything that lasts while it was captured

    @property
    def draws(self) -> bool:
        """Whether a graph draws random numbers."""
        return any(program.draws for program in self.programs.values())

    @property
    def trains(self) -> bool:
        """Whether a graph gives any parameter a gradient."""
        return any(any(program.sources) for program in self.programs.values())

    def prove(self, example: Tree) -> Program:
        """Return the graph of the model in its present modes, for batches in the form of `example`."""
        batch = example.batch if isinstance(example, batches.Public) else example
        return self._program(self._form(batch), batch)

    def current(self, point: Sequence[torch.Tensor], batch: Tree, real: bool) -> tuple[Program, Inputs]:
        """Return the graph for a batch, and what it takes; `real`: the batch is of the data, and no made-up one."""
        form = self._form(batch)
        self._calls += real
        if real and form in self.programs and _is_power_of_four(self._calls):
            self._check_current(form, batch)
        program = self._program(form, batch)
        return program, (point, self._held(program), list(batches.leaves(batch)))

    def operations(self, place: int) -> tuple[str, ...]:
        """Return the operations in which the examples' gradients of this parameter are added up."""
        programs = self.programs.values()
        return tuple(dict.fromkeys(source.operation for program in programs for source in program.sources[place]))

    def digest(self) -> str:
        """Return what tells the model's graphs, and the values of their constants, from those of another model or loss."""
        return " ".join(program.digest for program in self.programs.values())

    def _form(self, batch: Tree) -> Hashable:
        """Return all that a graph depends on but values: the batch's form, and what the modules' Python code reads."""
        return cache.structure(batch), cache.python_state([self.model, self.loss])

    def _program(self, form: Hashable, batch: Tree) -> Program:
        known = self.programs.get(form)
        if known is None:
            key = *cache.equal_models(self.model, self.loss, self.values.names), form, self.compiled
            known = cache.get(key, lambda: self._made(batch))
            if len(self.programs) >= _FORMS:
                del self.programs[next(iter(self.programs))]
            self.programs[form] = known
        return known

    @uncollected()
    def _made(self, batch: Tree) -> Program:
        program = self._proved(batch)
        if self.compiled:
            program.compile()
        return program

    def _proved(self, batch: Tree) -> Program:
        before = self._snapshot()
        made = Made()
        try:
            with seeded(self._device, TRIAL) as drew, self.values.captured(), Calls() as calls:
                found = capture(self.model, self.values.names, self._loss_of, batch, made)
                if not all(isinstance(generator, torch.Generator) for generator in drew()):  # noqa: TID251
                    raise NotCaptured(
                        "model or loss draws random numbers by NumPy or Python, one for a whole micro-batch"
                    )
            self.changes_state = self.changes_state or _changed(before, self._snapshot)
        finally:
            before.restore()
            made.empty_caches()
        made.refuse_left(self.model)
        program = Program(found, self.values.gathered(found))
        try:
            with seeded(self._device, TRIAL), self.values.captured():
                found.check_numbers()
        finally:
            before.restore()
            made.empty_caches()
        made.refuse_left(self.model)
        program.classes = calls.classes
        return program

    def forget(self) -> None:
        """Forget all graphs."""
        self.programs, self._readers = {}, {}

    def _check_current(self, form: Hashable, batch: Tree) -> None:
        """Capture the model again, and refuse one that computes something else by then.

        It would be no leak: what runs is the graph that was proved. But it would be another model than the user's.
        """
        if self._proved(batch).digest != self.programs[form].digest:
            raise ArgumentError(
                f"model={type(self.model).__name__}: computes something else than when it was last looked at, by a value "
                "that its Python code reads; keep such a value as an attribute of a module, where every step sees it"
            )

    def _held(self, program: Program) -> list[torch.Tensor]:
        """Return what the graph reads of the model beside trained parameters, as it is now."""
        readers = self._readers.get(program)
        if readers is None:
            readers = []
            for name in program.held_names:
                owner, _, key = name.rpartition(".")
                module = self.model.get_submodule(owner)
                readers.append((module._parameters if key in module._parameters else module._buffers, key))
            self._readers[program] = readers
        return [local(held[key]) for held, key in readers]


def _is_power_of_four(number: int) -> bool:
    return number > 1 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _changed(before: Snapshot, snapshot: Callable[[], Snapshot]) -> bool:
    """Whether something lasting is otherwise; what holds tensors without values cannot be compared, and is."""
    try:
        return before.changed(snapshot()) is not None
    except Exception:  # noqa: BLE001 - such tensors raise of many kinds
        return True
