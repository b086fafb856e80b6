"""Per-example gradients of a model, at any number of parameter points, by one of two ways.

"pairs": the graph of the model's operations runs on a whole micro-batch; it was proved to keep the examples apart
(`dpcore.torch.gradients.proved`). "one-by-one": the model sees one example after the other, and a row of every gradient is
formed. For an example i and a point x both give the gradient of ``loss(model(inputs_i[None]), *targets_i[None])``.
`torch.func.vmap` of the model is not used: its rounding depends on the number of examples. Where rounding decides a
result (the eigenvectors of equal eigenvalues), one example would change the gradients of all others. A point's values
are arguments of the call; the model's own parameters are never changed and nothing is stored on them (adding a
displacement in place and subtracting it again drifts).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError, SpeedWarning
from dpcore.spec.validate import choice
from dpcore.stages.clipping.blocks import Block, Rows
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree, trial_batch
from dpcore.torch.gradients.capture import as_written, uncollected
from dpcore.torch.gradients.errors import Mixes, NotProved
from dpcore.torch.gradients.losses import Calls, ExampleLoss, check_scalar, check_targets, in_float32, loss_failed
from dpcore.torch.gradients.proved import ProvedGradient
from dpcore.torch.gradients.repeated import RepeatedPasses
from dpcore.torch.memory import is_out_of_memory
from dpcore.torch.model import precision
from dpcore.torch.model.functional import (
    FAILURES,
    Leaves,
    State,
    Values,
    first_line,
    in_mode,
    places,
    refuse_foreign,
    slots,
    untouched,
    within,
)
from dpcore.torch.model.joint import split, trained_parameters
from dpcore.torch.model.state_probe import GLOBAL_HOOKS, Snapshot, keeps
from dpcore.torch.randomness import TRIAL, seeded

T = TypeVar("T")

Loss = Callable[..., torch.Tensor]

WAYS = ("pairs", "one-by-one")
"""The fast one, and the one that works for every model."""


class PerExampleGradient:
    """Gradients of one model's loss, example by example, for its parameters that require gradients.

    ``loss(output, *targets)`` is called with batches of one example, so a mean and a sum over the batch are the same.
    `way` is one of `WAYS`; `dpcore.torch.gradients.per_example` chooses it, and proves what "pairs" needs.

    `names` are the parameters' names in `named_parameters` order, tied ones once. `draws` says whether model or loss
    drew random numbers in a call on synthetic examples. `roots` are searched for state that model and loss keep;
    `passed_over` are large objects that are not searched, such as the data. `example` may be the caller's public
    examples.
    """

    free = True  # may run the model's code at any time; not for a sharded model, all of whose parameters no process has

    def __init__(self, model: torch.nn.Module, loss: Loss, way: str = "pairs") -> None:
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
        self.reasons: dict[str, str] = {}  # why "pairs" was not taken
        self.repeated: RepeatedPasses | None = None
        self.classes: int | None = None  # of the model's output, under a loss over classes
        self._calls = 0
        self._synthetic = False
        self._device = next(model.parameters(), torch.empty(0)).device
        self.autocast = precision.around(self._device)  # of the forward pass
        self._given = False  # whether the caller chose it; the surrounding autocast then does not count
        self.names = tuple(trained_parameters(model))
        if not self.names:
            raise ArgumentError(
                "model without a parameter that requires gradients: set requires_grad_(True) on the ones to train"
            )
        self.values = self._values()
        self.proved = ProvedGradient(model, loss, self._loss_of, self.values, self.held)
        self.one_by_one = OneByOne(model, self._loss_of, self.values)

    def _values(self) -> Values:
        return Values(self.model, self.names)

    def set_precision(self, dtype: torch.dtype | None) -> None:
        """Let forward passes and losses run in this precision, see `dpcore.torch.model.precision`."""
        self.proved.precision = self.one_by_one.precision = dtype
        if dtype is not None:
            self.autocast, self._given = dtype, True

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
        made up, so an error may quote torch's words, which may show values. If passes are `repeated`, the blocks of a
        `regular` micro-batch lie where those of the next one of the same name will be.
        """
        self._calls += not synthetic
        # With a proved graph no Python code runs that could keep anything.
        if synthetic or self._calls & (self._calls - 1) or self.way == "pairs":
            return self._gradients(point, batch, seed, synthetic, regular)
        # Calls 1, 2, 4, 8, ... are checked: real examples may provoke what synthetic ones did not.
        before = self.held()
        result = self._gradients(point, batch, seed, synthetic)
        after = self.held()
        if before.changed(after) is not None:
            before.restore()
            # State that follows from parameters and shapes alone is also left by made-up examples.
            self._gradients(point, self._made_up(batch), seed, synthetic=True)
            path = after.changed(self.held())
            if path is not None:
                before.restore()
                # No more of the path: a key may be a value of a drawn example.
                raise ArgumentError(keeps(".".join(path.split("[")[0].split(".")[:2])))
        return result

    def _made_up(self, batch: Tree) -> Tree:
        """Return a batch of the same form and size, without the values."""
        if isinstance(self.example, batches.Public):
            return batches.synthetic(self.example, batches.size(batch))
        return batches.tree_map(torch.zeros_like, batch)

    def operations(self, place: int) -> tuple[str, ...]:
        """Return the operations in which the examples' gradients of this parameter are added up, under "pairs"."""
        programs = self.proved.programs.values() if self.way == "pairs" else ()
        return tuple(dict.fromkeys(source.operation for program in programs for source in program.sources[place]))

    def held(self) -> Snapshot:
        """Return the present state of model and loss, parameters excluded."""
        return Snapshot(self.roots, [*self.model.parameters(), *self.passed_over])

    def _gradients(
        self, point: Sequence[Any], batch: Tree, seed: bytes, synthetic: bool, regular: Hashable = None
    ) -> list[Block]:
        around = precision.around(self._device)
        if not self._given and around != self.autocast:
            raise ArgumentError(
                f"autocast {precision.words(around)} around private.step, {precision.words(self.autocast)} around "
                "make_private: call both inside the same torch.autocast, or neither, or make_private with precision="
            )
        values = [value.detach() for value in point]

        def guarded(work: Callable[[], T]) -> T:
            return self.guarded(work, seed, synthetic)

        if self.way != "pairs":
            with as_written():
                return guarded(lambda: self.one_by_one(values, batch))
        try:
            program, inputs = guarded(lambda: self.proved.current(values, batch, not synthetic))
        except NotProved as reason:  # of a batch of another form, or of a model that changed
            raise ArgumentError(reason.sentence(self.model)) from None
        if self.repeated is not None and regular is not None:
            return self.repeated(program, regular, inputs, guarded)
        return guarded(lambda: program(*inputs))

    def guarded(self, function: Callable[[], T], seed: bytes, synthetic: bool) -> T:
        """Call a function with the generators set from `seed`; its errors become sentences of ours."""
        self._synthetic = synthetic
        try:
            # A proved graph draws nothing by NumPy or Python.
            with seeded(self._device, seed, others=synthetic or self.way != "pairs") as drew:
                result = function()
                if synthetic:
                    self.draws = self.draws or bool(drew())
        except (DpcoreError, NotProved):  # a proof reads no values
            raise
        except Exception as cause:
            if is_out_of_memory(cause) or (synthetic and not isinstance(cause, FAILURES)):
                raise
            # Words of torch or of the model may show values of private data.
            raise ArgumentError(self._failure(cause, synthetic)) from (cause if synthetic else None)
        return result

    def _loss_of(self, output: Any, targets: tuple[Tree, ...]) -> torch.Tensor:
        check_targets(self.loss, targets)
        output = output if self.autocast is None else in_float32(output)
        try:
            value: Any = self.loss(output, *targets)
        except FAILURES as cause:
            if not self._synthetic or isinstance(cause, DpcoreError) or is_out_of_memory(cause):
                raise
            raise ArgumentError(loss_failed(self.loss, len(targets), first_line(cause))) from cause
        return check_scalar(value)

    def _failure(self, cause: Exception, synthetic: bool) -> str:
        where = f"model={type(self.model).__name__}"
        if not synthetic:
            return (
                f"{where}: failed on a drawn batch, though not on synthetic inputs; check labels and inputs for values "
                "out of range (torch's own words are not shown, since they may hold private values)"
            )
        return (
            f"{where}: failed on inputs that are public, or made up in the data's shape and dtype ({first_line(cause)}); "
            "check the model and the data against each other, or give example_batch= where made-up values are out of "
            "range"
        )


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model, or a part of it, was given to torch.compile."""
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        for module in model.modules()
    )


class OneByOne:
    """Rows of the gradients of a model's loss for its trained parameters, which have the names of `values`.

    autograd takes the examples one after the other, as batches of one: no other example is present when a gradient is
    made, and number and order of the examples do not matter.
    """

    def __init__(self, model: nn.Module, loss: ExampleLoss, values: Values) -> None:
        self.model = model
        self.loss = loss
        self.values = values
        self.precision: torch.dtype | None = None

    def __call__(self, point: Sequence[torch.Tensor], batch: Tree) -> list[Block]:
        """Return one block for each of `names`."""
        rows = [value.new_empty(batches.size(batch), value.numel()) for value in point]
        for i, one in enumerate(self.each(point, batch)):
            for row, gradient in zip(rows, one, strict=True):
                row[i] = gradient.reshape(-1)
        return [Rows(row) for row in rows]

    def each(self, point: Sequence[torch.Tensor], batch: Tree) -> Iterator[list[torch.Tensor]]:
        """Yield the gradients of one example after the other. Model and loss may write to their copy of it only."""
        trained = places(self.model, self.values.names)
        others = [(name, tensor) for name, tensor in slots(self.model) if name not in trained]
        rest = {name: t.detach() if isinstance(t, nn.Parameter) else t.clone() for name, t in others}
        with untouched(self.model, [*zip(self.values.names, point, strict=True), *rest.items()]):
            for i in range(batches.size(batch)):
                one = batches.tree_map(lambda t: t[i : i + 1].clone(), batch)  # noqa: B023
                yield self._one(point, trained, rest, *split(self.model, one))

    def _one(
        self,
        point: Sequence[torch.Tensor],
        trained: dict[str, int],
        rest: State,
        inputs: Tree,
        targets: tuple[Tree, ...],
    ) -> list[torch.Tensor]:
        leaves = [value.detach().requires_grad_() for value in point]
        given = rest | {name: leaves[place] for name, place in trained.items()}
        device = point[0].device

        def both() -> None:
            with Leaves() as own:
                with precision.forward(self.precision, device):
                    loss = self.loss(batches.call(self.model, inputs), targets)
                if loss.requires_grad:
                    refuse_foreign(loss, [*leaves, *own.leaves])
                    torch.autograd.backward(loss)

        with torch.enable_grad(), precision.apart(self.precision, device):
            within(self.model, given, both)
        # An embedding's gradient may be sparse.
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense() for leaf in leaves]


@uncollected()
def try_out(gradient: PerExampleGradient, example: Tree, frozen: tuple[nn.Module, ...] = (), way: str = "auto") -> None:
    """Take the requested way, by default the fastest that works for this model; refuse the model if none does.

    Only shapes, dtypes and devices of the batch `example` are read, unless it is `batches.Public`. The model is tried
    in training mode and then in its present mode, except for `frozen` modules. It is left as it was.
    """
    gradient.example = example
    check_hooks(gradient.model)
    start = gradient.held()
    try:
        if way in ("auto", "pairs"):
            try:
                prove(gradient, example, frozen)
                return
            except NotProved as reason:
                gradient.reasons["pairs"] = reason.sentence(gradient.model)
                if way == "pairs" or isinstance(reason, Mixes):
                    raise ArgumentError(gradient.reasons["pairs"]) from None
            start.restore()
        gradient.way = WAYS[-1]
        for _ in modes(gradient.model, frozen):
            try_state(gradient, example)
    finally:
        start.restore()


def prove(gradient: PerExampleGradient, example: Tree, frozen: tuple[nn.Module, ...] = ()) -> None:
    """Capture the model in all modes, and prove that its graphs keep the examples apart.

    Raises
    ------
    NotProved
        If there is no proof, with the operation and the line of code.
    ArgumentError
        If the model writes to its own tensors, keeps anything, or gives no gradient.
    """
    proved, gradient.way = gradient.proved, "pairs"
    for _ in modes(gradient.model, frozen):
        gradient.classes = proved.prove(example).classes
    gradient.draws = gradient.draws or proved.draws
    if not gradient.free:
        return
    made = trial_batch(example, 2)
    try:
        blocks = gradient(gradient.parameters(), made, synthetic=True)
    except ArgumentError as refusal:
        if not proved.compiled:
            raise
        proved.compiled = False
        proved.forget()
        blocks = gradient(gradient.parameters(), made, synthetic=True)
        warnings.warn(
            f"compile: not done, and the run continues without ({refusal.__cause__})", SpeedWarning, stacklevel=2
        )
    # The smallest first: each example has many rows of a table.
    if proved.changes_state or not any(b.rows().any() for b in sorted(blocks, key=lambda b: math.prod(b.shape))):
        # Filling a cache once is no fault; only the model's own code shows whether it was one.
        gradient.way = WAYS[-1]
        try_state(gradient, example)
        gradient.way = "pairs"


def modes(model: nn.Module, frozen: tuple[nn.Module, ...]) -> Iterator[None]:
    """Put a model into training mode, and then into its present mode, which may differ between its parts."""
    if not model.training:
        with in_mode(model, True, frozen):
            yield
    yield


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters' gradients, which a private run does not form."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ArgumentError(
                f"parameter {name!r} has a hook on its gradient, which a private run does not form: remove the hook, "
                "and change gradients inside of the model"
            )


def try_state(gradient: PerExampleGradient, example: Tree) -> None:
    """Differentiate unlike examples, from one start and one after the other: all must leave the same state.

    A cache filled once, from shapes alone, passes. The first example must not be treated otherwise than later ones,
    either.
    """
    whole = Snapshot(gradient.roots, gradient.passed_over)  # parameters included, since the model's own code runs here
    try:
        _compare(gradient, example)
    finally:
        whole.restore()


def _compare(gradient: PerExampleGradient, example: Tree) -> None:
    point = [parameter.clone() for parameter in gradient.parameters()]
    one = trial_batch(example, 1)
    start = gradient.held()
    with Calls():
        first = gradient(point, one, synthetic=True)
    left = gradient.held()
    start.restore()
    try:
        others = gradient(point, trial_batch(example, 3, other=True, label=1), synthetic=True)
    except ArgumentError:  # 1 may be no label of this loss; any other error comes up again
        others = gradient(point, trial_batch(example, 3, other=True), synthetic=True)
    if not any(block.rows().any() for block in (*first, *others)):
        raise ArgumentError(
            "loss whose gradient is 0 in all parameters, for four made-up examples, so that a run would spend its "
            "epsilon on noise alone: forward must neither detach nor run under no_grad, the loss must have a gradient, "
            "and say something of one example alone, as a contrast within a batch does not; if made-up values are the "
            "reason, give example_batch="
        )
    by_others = gradient.held()
    later = gradient(point, one, synthetic=True)
    path = left.changed(by_others) or by_others.changed(gradient.held())
    if path is not None:
        raise ArgumentError(keeps(path))
    for name, now, once in zip(gradient.names, later, first, strict=True):
        then, before = now.rows(), once.rows()
        largest = before.nan_to_num(0, 0, 0).abs().max().item() if before.numel() else 0.0
        if not torch.allclose(then, before, rtol=1e-3, atol=1e-3 * largest, equal_nan=True):
            why = "depends on whether others came before it; model and loss must not tell the first from later ones"
            raise ArgumentError(f"gradient of {name!r} of one example: {why}")
