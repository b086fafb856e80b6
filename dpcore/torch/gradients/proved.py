"""Per-example gradients by the model's graph, proved to keep the examples apart.

The model's Python code runs while its graph is captured, on tensors without values, and never in a step. So nothing that
it keeps, reads or decides can carry one example's values to another one. What a user changes on purpose is followed: modes,
plain attributes and hooks of modules are looked at in every step, and another combination is another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.stages.clipping.blocks import Block, Rows
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients import cache
from dpcore.torch.gradients.capture import Written, capture
from dpcore.torch.gradients.errors import NotCaptured, NotProved
from dpcore.torch.gradients.losses import ExampleLoss
from dpcore.torch.gradients.program import Program
from dpcore.torch.model.state_probe import Snapshot
from dpcore.torch.randomness import TRIAL, seeded

_FORMS = 8
"""Graphs of this many forms of batch and modes are kept at one time."""


class ProvedGradient:
    """Blocks of the gradients of a model's loss for its trained parameters, which have these `names`.

    Parameters
    ----------
    model : torch.nn.Module
    loss : callable
        The user's own, which tells equal models from others.
    loss_of : callable
        The loss of one example's output and its targets, each as a batch of one; a scalar.
    names : sequence of str
    held : callable
        Returns a snapshot of what model and loss hold.

    Raises
    ------
    NotProved
        By `prove` and by calls with a batch of another form: there is no proof, with the operation and the line.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        loss_of: ExampleLoss,
        names: Sequence[str],
        held: Callable[[], Snapshot],
    ) -> None:
        self.model, self.loss, self.names = model, loss, tuple(names)
        self._loss_of, self._snapshot = loss_of, held
        self.example: Tree = None
        self.programs: dict[Hashable, Program] = {}
        self._readers: dict[Program, list[tuple[dict[str, Any], str]]] = {}
        self._device = next(model.parameters()).device
        self._autocast = _autocast(self._device)
        self._calls = 0
        self.changes_state = False  # whether the code changed anything that lasts while it was captured

    @property
    def draws(self) -> bool:
        """Whether a graph draws random numbers."""
        return any(program.draws for program in self.programs.values())

    def prove(self, example: Tree) -> Program:
        """Return the graph of the model in its present modes, for batches in the form of `example`."""
        self.example = example.batch if isinstance(example, batches.Public) else example
        return self._program(self._form(self.example))

    def __call__(self, point: Sequence[torch.Tensor], batch: Tree, real: bool = True) -> list[Block]:
        """Return one block for each parameter; `real`: the batch is of the data, and no made-up one."""
        if _autocast(self._device) != self._autocast:
            raise ArgumentError(
                f"autocast {_words(_autocast(self._device))} around private.step, {_words(self._autocast)} around "
                "make_private: call both inside the same torch.autocast, or neither"
            )
        if batches.size(batch) == 0:
            return [Rows(value.new_zeros(0, value.numel())) for value in point]
        form = self._form(batch)
        self._calls += real
        if real and form in self.programs and _is_power_of_four(self._calls):
            self._check_current(form)
        program = self._program(form)
        with _without_autocast(self._device, self._autocast):
            return program(point, self._held(program), list(batches.leaves(batch)))

    def operations(self, place: int) -> tuple[str, ...]:
        """Return the operations in which the examples' gradients of this parameter are added up."""
        programs = self.programs.values()
        return tuple(dict.fromkeys(source.operation for program in programs for source in program.sources[place]))

    def digest(self) -> str:
        """Return what tells the model's graphs from those of another model or loss."""
        return " ".join(program.digest for program in self.programs.values())

    def _form(self, batch: Tree) -> Hashable:
        """Return all that a graph depends on but values: the batch's form, and what the modules' Python code reads."""
        return cache.structure(batch), cache.python_state([self.model, self.loss])

    def _program(self, form: Hashable) -> Program:
        known = self.programs.get(form)
        if known is None:
            known = cache.get((*cache.equal_models(self.model, self.loss, self.names), form), self._proved)
            if len(self.programs) >= _FORMS:
                del self.programs[next(iter(self.programs))]
            self.programs[form] = known
        return known

    def _proved(self) -> Program:
        before = self._snapshot()
        try:
            with seeded(self._device, TRIAL) as drew:
                found = capture(self.model, self.names, self._loss_of, self.example)
                if not all(isinstance(generator, torch.Generator) for generator in drew()):  # noqa: TID251
                    raise NotCaptured(
                        "model or loss draws random numbers by NumPy or Python, one for a whole micro-batch"
                    )
            self.changes_state = self.changes_state or _changed(before, self._snapshot)
        except Written as written:
            raise NotCaptured(f"the model writes to {written} in forward") from None
        finally:
            before.restore()
        return Program(found)

    def _check_current(self, form: Hashable) -> None:
        """Capture the model again, and refuse one that computes something else by then.

        It would be no leak: what runs is the graph that was proved. But it would be another model than the user's.
        """
        if self._proved().digest != self.programs[form].digest:
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
        return [held[key].detach() for held, key in readers]


def _is_power_of_four(number: int) -> bool:
    return number > 1 and number & (number - 1) == 0 and number.bit_length() % 2 == 1


def _changed(before: Snapshot, snapshot: Callable[[], Snapshot]) -> bool:
    """Whether something lasting is otherwise; what holds tensors without values cannot be compared, and is."""
    try:
        return before.changed(snapshot()) is not None
    except Exception:  # noqa: BLE001 - such tensors raise of many kinds
        return True


def _autocast(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _words(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"to {str(dtype).removeprefix('torch.')}"


@contextmanager
def _without_autocast(device: torch.device, autocast: torch.dtype | None) -> Iterator[None]:
    """Run a graph, whose casts are operations of its own, as it is."""
    if autocast is None:
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


__all__ = ["NotProved", "ProvedGradient"]
