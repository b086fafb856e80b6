"""Per-example gradients formed one by one or by vmap: for models without a proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpcore.errors import ArgumentError
from dpcore.stages.clipping.blocks import Block, Rows
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients.losses import ExampleLoss
from dpcore.torch.model.functional import (
    FOREIGN,
    Leaves,
    Values,
    call_with,
    check_versions,
    places,
    refuse_foreign,
    within,
)


class ExplicitGradient:
    """Rows of the gradients of a model's loss for its trained parameters, which have the names of `values`.

    With `vectorize` a batch runs through vmap, in which the model sees batches of one and can mix nothing; without, the
    examples are taken one after the other, which every model bears, and which is slow.
    """

    def __init__(self, model: nn.Module, loss: ExampleLoss, values: Values, vectorize: bool) -> None:
        self.model = model
        self.loss = loss
        self.values = values
        self.vectorize = vectorize

    def __call__(self, point: Sequence[torch.Tensor], batch: Tree) -> list[Block]:
        """Return one block for each of `names`. Model and loss may write to the batch: give a copy."""
        if not self.vectorize:
            rows = [list(gradients) for gradients in self.one_by_one(point, batch)]
            if not rows:
                return [Rows(value.new_zeros(0, value.numel())) for value in point]
            return [Rows(torch.stack(column).reshape(len(rows), -1)) for column in map(list, zip(*rows, strict=True))]
        tensors = list(batches.leaves(batch))
        trained, rest = places(self.model, self.values.names)

        def example_loss(values: tuple[torch.Tensor, ...], one: list[torch.Tensor]) -> torch.Tensor:
            state = {**rest, **{name: values[place] for name, place in trained.items()}}
            row = iter(one)  # vmap knows fewer containers than a batch may have
            inputs, targets = batches.normalize(batches.tree_map(lambda _: next(row).unsqueeze(0), batch))
            return self.loss(call_with(self.model, state, inputs), targets)

        given = {**dict(zip(self.values.names, point, strict=True)), **rest}
        versions = {name: tensor._version for name, tensor in given.items()}
        # Fused attention kernels have no batching rule; vmap would run them example by example.
        with sdpa_kernel(SDPBackend.MATH):
            mapped = vmap(grad(example_loss), in_dims=(None, 0), randomness="different")
            found = mapped(tuple(point), tensors)
        check_versions(self.model, given, versions)
        if any(row.requires_grad for row in found):
            raise ArgumentError(FOREIGN)
        return [Rows(row.reshape(row.shape[0], -1)) for row in found]

    def one_by_one(self, point: Sequence[torch.Tensor], batch: Tree) -> Iterator[list[torch.Tensor]]:
        """Yield the gradients of one example after the other, by autograd on a batch of one."""
        for i in range(batches.size(batch)):
            one = batches.tree_map(lambda t: t[i : i + 1].clone(), batch)  # noqa: B023
            yield self._one(point, *batches.normalize(one))

    def _one(self, point: Sequence[torch.Tensor], inputs: Tree, targets: tuple[Tree, ...]) -> list[torch.Tensor]:
        leaves, given = self.values.at(point)
        versions = {name: tensor._version for name, tensor in given.items()}

        def both() -> None:
            with Leaves() as own:
                loss = self.loss(batches.call(self.model, inputs), targets)
            if loss.requires_grad:
                refuse_foreign(loss, [*leaves, *own.leaves])
                torch.autograd.backward(loss)

        with torch.enable_grad():
            within(self.model, given, both)
        check_versions(self.model, given, versions)
        return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
