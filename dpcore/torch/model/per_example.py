"""Per-example gradients by torch.func, at any number of parameter points.

For one example i and a point x the gradient is that of ``loss(model(inputs_i[None]), *targets_i[None])``: the model
sees a batch of one, so no module can mix examples here, whatever it does to a batch. vmap then runs a micro-batch of
such examples at once. Points are separate parameter values handed to ``functional_call``; the model's own parameters
are never changed and nothing is stored on them (adding a displacement in place and subtracting it again drifts). Model
and loss get copies of the buffers and of the batch: what they write there is gone after the call.

Convolutions by unfold and bmm, and weight gradients of our own, were not reliably faster for cnn-5 on a CPU (torch
2.13) than vmap's grouped convolution. What a step costs: ``make bench``, `asv_benchmarks/benchmarks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.functional import FAILURES, call_with, check_versions, first_line, slots
from dpcore.torch.model.state_probe import GLOBAL_HOOKS, Snapshot, keeps
from dpcore.torch.randomness import TRIAL, seeded

Loss = Callable[..., torch.Tensor]


class PerExampleGradient:
    """Gradients of one model's loss, example by example, for its parameters that require gradients.

    ``loss(output, *targets)`` is called with batches of one example, so a mean and a sum over the batch are the same.
    With `vectorize` a micro-batch runs through vmap; without, the examples are taken one by one: slow, for modules that
    vmap cannot batch (torch's RNN and GRU, and all recurrent cells).

    `names` are the parameters' in `named_parameters` order, tied ones once; `draws` says whether model or loss drew
    random numbers in a call on synthetic examples; `roots` are looked at for state that model and loss keep, and
    `passed_over` are large objects that are not, such as the data. `example` may be the caller's public examples.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, vectorize: bool = True) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
        if not callable(loss):
            raise ArgumentTypeError(f"loss={loss!r}: must be a function of (output, *targets)")
        self.model = model
        self.loss = loss
        self.vectorize = vectorize
        self.draws = False
        self.roots = {"model": model, "loss": loss, **GLOBAL_HOOKS}
        self.passed_over: list[Any] = []
        self.example: Tree = None
        self._calls = 0
        self.names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        if not self.names:
            raise ArgumentError(
                "model without a parameter that requires gradients: set requires_grad_(True) on the ones to train"
            )

    def parameters(self) -> list[torch.Tensor]:
        """Return the model's own parameters, detached and sharing memory, in the order of `names`."""
        return [parameter.detach() for parameter in self._trained()]

    def __call__(
        self, point: Sequence[torch.Tensor], batch: Tree, seed: bytes = TRIAL, synthetic: bool = False
    ) -> list[torch.Tensor]:
        """Return the gradients of every example of a micro-batch at one point: (b, *shape) for each of `names`.

        `point` has a value for each of `names`; it need not be the model's present parameters. The same `seed` gives
        the same dropout masks for the same batch at another point, as two-point queries need. A `synthetic` batch is
        made up, so that an error may quote torch's words; of private data they may show values.
        """
        self._calls += not synthetic
        if synthetic or self._calls & (self._calls - 1):
            return self._gradients(point, batch, seed, synthetic)
        # Calls 1, 2, 4, 8, ... are looked at: what synthetic examples did not provoke shows on the first real ones.
        before = self.held()
        result = self._gradients(point, batch, seed, synthetic)
        after = self.held()
        if before.changed(after) is not None:
            # What follows from the parameters and the shapes alone is left by made-up examples as well.
            before.restore()
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

    def held(self) -> Snapshot:
        """Return what model and loss hold at this moment, beside parameters."""
        return Snapshot(self.roots, [*self.model.parameters(), *self.passed_over])

    def _gradients(self, point: Sequence[Any], batch: Tree, seed: bytes, synthetic: bool) -> list[torch.Tensor]:
        # Whatever model or loss write to the batch, another point and the caller see it as it was.
        batch = batches.tree_map(torch.clone, batch)
        tensors = list(batches.leaves(batch))
        point = tuple(value.detach() for value in point)
        trained = {id(p): place for place, p in enumerate(self._trained())}
        places, rest = {}, {}
        for name, tensor in slots(self.model):
            if id(tensor) in trained:
                places[name] = trained[id(tensor)]
            else:
                rest[name] = tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor.clone()

        def example_loss(values: tuple[torch.Tensor, ...], one: list[torch.Tensor]) -> torch.Tensor:
            state = {**rest, **{name: values[place] for name, place in places.items()}}
            row = iter(one)  # vmap knows fewer containers than a batch may have
            inputs, targets = batches.normalize(batches.tree_map(lambda _: next(row).unsqueeze(0), batch))
            return self._loss_of(call_with(self.model, state, inputs), targets, synthetic)

        gradient = grad(example_loss)
        given = {**dict(zip(self.names, point, strict=True)), **rest}
        versions = {name: tensor._version for name, tensor in given.items()}
        others = synthetic or not self.vectorize
        try:
            # Fused attention kernels have no batching rule; vmap would run them example by example.
            with seeded(point[0].device, seed, others=others) as drew, sdpa_kernel(SDPBackend.MATH):
                if self.vectorize:
                    mapped = vmap(gradient, in_dims=(None, 0), randomness="different")
                    result = list(mapped(point, tensors))
                else:
                    rows = [gradient(point, [tensor[i] for tensor in tensors]) for i in range(batches.size(batch))]
                    result = [torch.stack(column) for column in zip(*rows, strict=True)]
                if synthetic:
                    self._note(drew())
        except (torch.OutOfMemoryError, DpcoreError):
            raise
        except FAILURES as cause:
            raise ArgumentError(self._failure(cause, synthetic)) from cause
        check_versions(self.model, given, versions)
        if any(row.requires_grad for row in result):
            raise ArgumentError(
                "the loss depends on a tensor that requires gradients and is no parameter of the model: register it in "
                "the model, so that it is trained, or call its requires_grad_(False)"
            )
        return result

    def _trained(self) -> list[torch.nn.Parameter]:
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.names]

    def _loss_of(self, output: Any, targets: tuple[Tree, ...], synthetic: bool) -> torch.Tensor:
        try:
            value: Any = self.loss(output, *targets)
        except FAILURES as cause:
            if not synthetic or isinstance(cause, (DpcoreError, torch.OutOfMemoryError)):
                raise
            name = getattr(self.loss, "__name__", type(self.loss).__name__)
            raise ArgumentError(
                f"loss={name}{' (the default)' if self.loss is F.cross_entropy else ''}: failed on the model's output "
                f"and {len(targets)} targets ({first_line(cause)}); give loss= a function of (output, *targets) that "
                "fits the data and that torch.func can differentiate, or set vectorize=False to take the examples one "
                "by one"
            ) from cause
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ArgumentError(
                f"loss returned {shape} for a batch of one example: it must return one number (reduction='mean' or "
                "'sum'); give the loss as loss= to make_private if it is another than the default cross_entropy"
            )
        return value.reshape(())

    def _note(self, drawn: list[Any]) -> None:
        self.draws = self.draws or bool(drawn)
        if self.vectorize and not all(isinstance(generator, torch.Generator) for generator in drawn):  # noqa: TID251
            raise ArgumentError(
                "model or loss draws random numbers by NumPy or Python, one for a whole micro-batch, whose members "
                "depend on who else was drawn: draw by torch, or set vectorize=False to take the examples one by one"
            )

    def _failure(self, cause: Exception, synthetic: bool) -> str:
        where = f"model={type(self.model).__name__}"
        if not synthetic:
            return (
                f"{where}: failed on a drawn batch, though not on synthetic inputs; check labels and inputs for values "
                "out of range (the reason is this exception's __cause__, not quoted because it may show private values)"
            )
        return (
            f"{where}: torch.func cannot differentiate it example by example ({first_line(cause)}); rewrite the "
            "operation without .item(), data-dependent Python control flow or in-place changes, or set vectorize=False "
            "to take the examples one by one (torch's RNN, GRU and recurrent cells need it)"
        )
