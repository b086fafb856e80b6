"""Per-example gradients by torch.func, at any number of parameter points.

For one example i and a point x the gradient is that of ``loss(model(inputs_i[None]), *targets_i[None])``: the model
sees a batch of one, so no module can mix examples here, whatever it does to a batch. vmap then runs a micro-batch of
such examples at once. Points are separate parameter values handed to ``functional_call``; the model's own parameters
are never changed and nothing is stored on them (adding a displacement in place and subtracting it again drifts).

Convolutions rewritten by unfold and bmm, and weight gradients of our own, were tried for cnn-5 on a CPU (torch 2.13):
neither was reliably faster than vmap's own grouped convolution, so there is no such special case. What a step costs
now: ``make bench``, `asv_benchmarks/benchmarks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.randomness import TRIAL, seeded

Loss = Callable[..., torch.Tensor]


class PerExampleGradient:
    """Gradients of one model's loss, example by example, for its parameters that require gradients.

    Parameters
    ----------
    model : torch.nn.Module
        Any model that torch.func can differentiate per example.
    loss : callable
        ``loss(output, *targets)`` for a batch; called with batches of one example, so a mean and a sum over the batch
        are the same.
    vectorize : bool
        Run a micro-batch through vmap. False takes the examples one by one: slow, for modules that vmap cannot batch
        (torch's GRU on a CPU).

    Attributes
    ----------
    names : tuple of str
        The parameters' names in `named_parameters` order; tied parameters stand once, under their first name.
    """

    def __init__(self, model: torch.nn.Module, loss: Loss, vectorize: bool = True) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
        if not callable(loss):
            raise ArgumentTypeError(f"loss={loss!r}: must be a function of (output, *targets)")
        self.model = model
        self.loss = loss
        self.vectorize = vectorize
        self.names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        if not self.names:
            raise ArgumentError(
                "model without a parameter that requires gradients: set requires_grad_(True) on the ones to train"
            )

    def parameters(self) -> list[torch.Tensor]:
        """Return the model's own parameters, detached and sharing memory, in the order of `names`."""
        named = dict(self.model.named_parameters())
        return [named[name].detach() for name in self.names]

    def __call__(
        self, point: Sequence[torch.Tensor], batch: Tree, seed: bytes = TRIAL, synthetic: bool = False
    ) -> list[torch.Tensor]:
        """Return the gradients of every example of a micro-batch at one point.

        Parameters
        ----------
        point : sequence of torch.Tensor
            A value for each of `names`, of its shape; need not be the model's present parameters.
        batch : tree of torch.Tensor
            A batch (see `dpcore.torch.data.batches`) of b >= 1 examples.
        seed : bytes
            Of the dropout masks (see `dpcore.torch.randomness`). The same seed gives the same masks for the same batch
            at another point, as two-point queries need. The state of the user's generators is put back.
        synthetic : bool
            The batch is made up, so that an error may quote torch's words; of private data they may show values.

        Returns
        -------
        list of torch.Tensor
            For each of `names`, the gradients, of shape (b, *shape) and the parameter's dtype.

        Raises
        ------
        ArgumentError
            If torch.func cannot differentiate the model, or the loss does not return one number for one example.
        """
        inputs, targets = batches.normalize(batch)
        rest = self._constants()

        def example_loss(values: tuple[torch.Tensor, ...], one: Tree, its_targets: tuple[Tree, ...]) -> torch.Tensor:
            state = {**rest, **dict(zip(self.names, values, strict=True))}
            arguments = batches.tree_map(lambda t: t.unsqueeze(0), (one, *its_targets))
            output = batches.call(lambda *a, **k: functional_call(self.model, state, a, k), arguments[0])
            return _scalar(self.loss(output, *arguments[1:]))

        gradient = grad(example_loss)
        point = tuple(value.detach() for value in point)
        try:
            # Fused attention kernels have no batching rule; vmap would run them example by example.
            with seeded(point[0].device, seed), sdpa_kernel(SDPBackend.MATH):
                if self.vectorize:
                    mapped = vmap(gradient, in_dims=(None, 0, 0), randomness="different")
                    return list(mapped(point, inputs, targets))
                rows = [
                    gradient(point, *batches.tree_map(lambda t: t[i], (inputs, targets)))  # noqa: B023
                    for i in range(batches.size(batch))
                ]
                return [torch.stack(column) for column in zip(*rows, strict=True)]
        except (torch.OutOfMemoryError, DpcoreError):
            raise
        except (RuntimeError, NotImplementedError, ValueError, TypeError, LookupError) as cause:
            if not synthetic:
                raise ArgumentError(
                    f"model={type(self.model).__name__}: failed on a drawn batch, though not on synthetic inputs; "
                    "check labels and inputs for values out of range (the reason is this exception's __cause__, not "
                    "quoted because it may show private values)"
                ) from cause
            raise ArgumentError(
                f"model={type(self.model).__name__}: torch.func cannot differentiate it example by example "
                f"({first_line(cause)}); rewrite the operation without .item(), data-dependent Python control flow or "
                "in-place changes, or set vectorize=False to take the examples one by one"
            ) from cause

    def _constants(self) -> dict[str, torch.Tensor]:
        """The parameters that stay as they are, and the buffers."""
        mine = set(self.names)
        held = {name: p.detach() for name, p in self.model.named_parameters() if name not in mine}
        return {**held, **dict(self.model.named_buffers())}


def _scalar(value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ArgumentError(
            f"loss returned {shape} for a batch of one example: it must return one number (reduction='mean' or 'sum')"
        )
    return value.reshape(())


def first_line(cause: BaseException) -> str:
    """Return the first line of an exception's text, for a sentence of our own."""
    text = str(cause).strip()
    return text.splitlines()[0][:200] if text else type(cause).__name__
