"""Per-example gradients of a model, at any number of parameter points, by one of three ways.

"pairs": the graph of the model's operations runs on a whole micro-batch; it was proved to keep the examples apart
(`dpcore.torch.gradients.proved`). "vmap" and "one-by-one": the model sees batches of one, and rows of every gradient are
formed. For one example i and a point x all three give the gradient of ``loss(model(inputs_i[None]), *targets_i[None])``.
Points are values handed over at the call; the model's own parameters are never changed and nothing is stored on them
(adding a displacement in place and subtracting it again drifts).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError
from dpcore.spec.validate import choice
from dpcore.stages.clipping.blocks import Block
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients.capture import as_written
from dpcore.torch.gradients.check_loss import check_scalar, check_targets, loss_failed
from dpcore.torch.gradients.errors import NotProved
from dpcore.torch.gradients.explicit import ExplicitGradient
from dpcore.torch.gradients.proved import ProvedGradient
from dpcore.torch.gradients.repeated import RepeatedPasses
from dpcore.torch.model.functional import FAILURES, Values, first_line
from dpcore.torch.model.memory import is_out_of_memory
from dpcore.torch.model.state_probe import GLOBAL_HOOKS, Snapshot, keeps
from dpcore.torch.randomness import TRIAL, seeded

T = TypeVar("T")

Loss = Callable[..., torch.Tensor]

WAYS = ("pairs", "vmap", "one-by-one")
"""From the fastest to the one that every model bears."""


class Unfit(ArgumentError):
    """A model or loss that one of `WAYS` cannot take, and another one may."""


class PerExampleGradient:
    """Gradients of one model's loss, example by example, for its parameters that require gradients.

    ``loss(output, *targets)`` is called with batches of one example, so a mean and a sum over the batch are the same.
    `way` is one of `WAYS`; `dpcore.torch.gradients.trial` chooses it, and proves what "pairs" needs.

    `names` are the parameters' in `named_parameters` order, tied ones once; `draws` says whether model or loss drew
    random numbers in a call on synthetic examples; `roots` are looked at for state that model and loss keep, and
    `passed_over` are large objects that are not, such as the data. `example` may be the caller's public examples.
    """

    free = True  # to run the model's code when it likes: of a sharded model no process has all parameters

    def __init__(self, model: torch.nn.Module, loss: Loss, way: str = "pairs") -> None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
        if isinstance(loss, type):
            raise ArgumentTypeError(f"loss={loss.__name__}: is a class; give an object of it, loss={loss.__name__}()")
        if not callable(loss):
            raise ArgumentTypeError(f"loss={loss!r}: must be a function of (output, *targets)")
        self.model = model
        self.loss = loss
        self.way = choice(WAYS, gradients=way)
        self.draws = False
        self.roots = {"model": model, "loss": loss, **GLOBAL_HOOKS}
        self.passed_over: list[Any] = []
        self.example: Tree = None
        self.reasons: dict[str, str] = {}  # why faster ways were not taken
        self.repeated: RepeatedPasses | None = None
        self.classes: int | None = None  # of the model's output, under a loss over classes
        self._calls = 0
        self._synthetic = False
        self._autocast = autocast_of(model)
        self.names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        if not self.names:
            raise ArgumentError(
                "model without a parameter that requires gradients: set requires_grad_(True) on the ones to train"
            )
        self.values = self._values()
        self.proved = ProvedGradient(model, loss, self._loss_of, self.values, self.held)
        self.explicit = {
            way: ExplicitGradient(model, self._loss_of, self.values, way == "vmap") for way in WAYS if way != "pairs"
        }

    def _values(self) -> Values:
        return Values(self.model, self.names)

    def parameters(self) -> list[torch.Tensor]:
        """See `Values.parameters`."""
        return self.values.parameters()

    def __call__(
        self,
        point: Sequence[torch.Tensor],
        batch: Tree,
        seed: bytes = TRIAL,
        synthetic: bool = False,
        regular: Hashable = None,
    ) -> list[Block]:
        """Return the gradients of every example of a micro-batch at one point: a block for each of `names`.

        `point` has a value for each of `names`; it need not be the model's present parameters. The same `seed` gives
        the same dropout masks for the same batch at another point, as two-point queries need. A `synthetic` batch is
        made up, so that an error may quote torch's words; of private data they may show values. Where passes are
        `repeated`, the blocks of a `regular` micro-batch lie where those of the next one of the same name will be.
        """
        self._calls += not synthetic
        # Where a proved graph runs, no Python code does that could keep anything.
        if synthetic or self._calls & (self._calls - 1) or self.way == "pairs":
            return self._gradients(point, batch, seed, synthetic, regular)
        # Calls 1, 2, 4, 8, ... are looked at: what synthetic examples did not provoke shows on the first real ones.
        before = self.held()
        result = self._gradients(point, batch, seed, synthetic)
        after = self.held()
        if before.changed(after) is not None:
            before.restore()
            # What follows from parameters and shapes alone is left by made-up examples as well.
            self._gradients(point, self._made_up(batch), seed, synthetic=True)
            path = after.changed(self.held())
            if path is not None:
                before.restore()
                raise ArgumentError(keeps(path))
        return result

    def _made_up(self, batch: Tree) -> Tree:
        """Return a batch of as many examples with none of its values."""
        if isinstance(self.example, batches.Public):
            return batches.synthetic(self.example, batches.size(batch))
        return batches.tree_map(torch.zeros_like, batch)

    def operations(self, place: int) -> tuple[str, ...]:
        """Return the operations in which the examples' gradients of this parameter are added up, under "pairs"."""
        return self.proved.operations(place) if self.way == "pairs" else ()

    def held(self) -> Snapshot:
        """Return what model and loss hold at this moment, beside parameters."""
        return Snapshot(self.roots, [*self.model.parameters(), *self.passed_over])

    def _gradients(
        self, point: Sequence[Any], batch: Tree, seed: bytes, synthetic: bool, regular: Hashable = None
    ) -> list[Block]:
        if autocast_of(self.model) != self._autocast:
            raise ArgumentError(
                f"autocast {_words(autocast_of(self.model))} around private.step, {_words(self._autocast)} around "
                "make_private: call both inside the same torch.autocast, or neither"
            )
        values = [value.detach() for value in point]

        def guarded(work: Callable[[], T]) -> T:
            return self.guarded(work, seed, synthetic)

        if self.way != "pairs":
            given = batches.tree_map(torch.clone, batch)  # whatever model or loss write to it
            with as_written():
                return guarded(lambda: self.explicit[self.way](values, given))
        try:
            program, inputs = guarded(lambda: self.proved.current(values, batch, not synthetic))
        except NotProved as reason:  # of a batch of another form, or of a model that changed
            raise ArgumentError(reason.sentence(self.model)) from None
        if self.repeated is not None and regular is not None:
            return self.repeated(program, regular, inputs, guarded)
        return guarded(lambda: program(*inputs))

    def guarded(self, function: Callable[[], T], seed: bytes, synthetic: bool) -> T:
        """Call a function with the generators set from `seed`; what it raises becomes a sentence of ours."""
        self._synthetic = synthetic
        device = next(self.model.parameters()).device
        others = synthetic or self.way == "one-by-one"
        try:
            with seeded(device, seed, others=others) as drew:
                result = function()
                if synthetic:
                    self._note(drew())
        except DpcoreError:
            raise
        except FAILURES as cause:
            if is_out_of_memory(cause):
                raise
            if synthetic:
                raise Unfit(self._failure(cause, synthetic)) from cause
            raise ArgumentError(self._failure(cause, synthetic)) from None  # its words may show values of the data
        return result

    def _loss_of(self, output: Any, targets: tuple[Tree, ...]) -> torch.Tensor:
        check_targets(self.loss, targets)
        try:
            value: Any = self.loss(output, *targets)
        except FAILURES as cause:
            if not self._synthetic or isinstance(cause, DpcoreError) or is_out_of_memory(cause):
                raise
            raise Unfit(loss_failed(self.loss, len(targets), first_line(cause))) from cause
        return check_scalar(value)

    def _note(self, drawn: list[Any]) -> None:
        self.draws = self.draws or bool(drawn)
        if self.way != "one-by-one" and not all(isinstance(g, torch.Generator) for g in drawn):  # noqa: TID251
            raise Unfit(
                "model or loss draws random numbers by NumPy or Python, one for a whole micro-batch, whose members "
                "depend on who else was drawn: draw by torch, or set gradients='one-by-one'"
            )

    def _failure(self, cause: Exception, synthetic: bool) -> str:
        where = f"model={type(self.model).__name__}"
        if not synthetic:
            return (
                f"{where}: failed on a drawn batch, though not on synthetic inputs; check labels and inputs for values "
                "out of range (torch's own words are not shown, since they may hold private values)"
            )
        if self.way != "vmap":
            return (
                f"{where}: failed on synthetic inputs of the data's shape and dtype ({first_line(cause)}); check the model "
                "and the data against each other, or give example_batch= where made-up values are out of range"
            )
        return (
            f"{where}: cannot be differentiated example by example with torch.func ({first_line(cause)}); rewrite the "
            "operation without .item(), data-dependent Python control flow or in-place changes; set gradients='auto' or "
            "'one-by-one' to take the examples one by one"
        )


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model, or a part of it, was given to torch.compile."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


def autocast_of(model: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype of the autocast that a model would run under now, None where it is off."""
    kind = next(model.parameters()).device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _words(dtype: torch.dtype | None) -> str:
    return "off" if dtype is None else f"to {str(dtype).removeprefix('torch.')}"
