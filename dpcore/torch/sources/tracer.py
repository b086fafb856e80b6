"""Watches the operations of a model on its trained parameters, and learns the gradient of each one's output.

A parameter meets the examples in few operations (the product of a linear layer, the lookup of an embedding). There the
parameter is replaced by its value, so that autograd computes no gradient for it, and the output passes through `_Tap`,
which receives the output's gradient in the backward pass. Both together give each example's gradient without forming
it (`dpcore.torch.sources.rules`). What is made of parameters alone, as a transposed or a normalized weight, is
`Derived`: a small graph of its own, through which the examples' gradients are carried back in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from dpcore.stages.clipping.blocks import Block, Rows, joined
from dpcore.torch.sources.derived import Derived, in_place, made
from dpcore.torch.sources.losses import example_losses_inside
from dpcore.torch.sources.places import Layout, Site, UnknownLayout, tensors
from dpcore.torch.sources.written_out import WRITTEN_OUT

Key = tuple[Any, ...]
Sites = dict[Key, Site | None]

Collect = Callable[[torch.Tensor, Sequence[torch.Tensor]], Iterable[tuple["Derived", Block]]]
"""Makes blocks of an output's gradient and of the saved tensors of an operation."""


class Operation:
    """One operation that takes derived tensors and examples: what a rule works on.

    In `args` and `kwargs` the derived tensors are replaced by their values, which autograd does not follow.
    """

    def __init__(
        self,
        tracer: Tracer,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        site: Site,
    ) -> None:
        self.tracer = tracer
        self.function = function
        self.examples = tracer.examples
        self._derived: dict[int, Derived] = {}

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            derived = tracer.derived(tensor)
            if derived is None:
                return tensor
            self._derived[id(derived.value)] = derived
            return derived.value

        self._layouts = dict(zip(map(id, tensors((args, kwargs))), site.took, strict=True))
        self.gave = site.gave
        self.args, self.kwargs = tree_map_only(torch.Tensor, cut, (args, kwargs))

    def derived(self, tensor: Any) -> Derived | None:
        """Return what a value in the arguments stands for, if it is a derived tensor's."""
        return self._derived.get(id(tensor))

    def layout(self, tensor: torch.Tensor) -> Layout | None:
        """Return where the examples lie in one of the arguments."""
        return self._layouts.get(id(tensor))

    def run(self) -> Any:
        """Do the operation with the values."""
        return self.function(*self.args, **self.kwargs)

    def examples_first(self, tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """Return a view (B, T, ...) of a tensor that holds the examples along `layout`; T = 1 where each has one row."""
        if layout is None or tensor.shape[layout.dim] != self.examples * layout.rows:
            raise UnknownLayout(f"no examples in a tensor of shape {tuple(tensor.shape)}")
        return tensor.movedim(layout.dim, 0).unflatten(0, (self.examples, layout.rows))

    def tap(self, output: torch.Tensor, saved: Sequence[torch.Tensor], collect: Collect) -> torch.Tensor:
        """Return the output, which tells `collect` its gradient in the backward pass, together with `saved`."""
        return self.tracer.tap(output, saved, collect)


Rule = Callable[[Operation], Any]


class Tracer(TorchFunctionMode):
    """Follows one forward and backward pass of `examples` examples at one point.

    `sites` says by operation and parameters where the examples lie. While `learning`, a list of what every operation of
    the pass is, in order, it is filled.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        examples: int,
        sites: Sites,
        rules: Callable[[Any], Rule],
        learning: Sequence[Site | None] | None = None,
    ) -> None:
        super().__init__()
        self.examples = examples
        self.sites = sites
        self._rules = rules
        self._learning = learning
        self.in_model = True
        self.low_precision = False
        self._number = 0
        self.dummy = torch.zeros((), requires_grad=True, device=leaves[0].device)
        self._leaves = [Derived(leaf, (place,), place) for place, leaf in enumerate(leaves)]
        self._derived = {id(derived.tensor): derived for derived in self._leaves}

    def derived(self, tensor: torch.Tensor) -> Derived | None:
        """Return what is known of a tensor that depends on parameters and on no example."""
        return self._derived.get(id(tensor))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[function](*args, **kwargs)
        self._number += 1
        enabled = torch.is_grad_enabled()
        found = [self._derived[id(t)] for t in tensors((args, kwargs)) if id(t) in self._derived]
        # Without gradients a checkpoint may run what it will run again with them: its operations are learned there.
        site = self._site(function, args, kwargs, found) if found and (enabled or self._learning is not None) else None
        if site is None or not enabled:
            replaced = example_losses_inside(function, args, kwargs, self.examples) if self.in_model else None
            return function(*args, **kwargs) if replaced is None else replaced
        if any(site.gave):
            return self._rules(function)(Operation(self, function, args, kwargs, site))
        if in_place(function):
            raise UnknownLayout(f"{function.__name__} on what is made of parameters")
        result = function(*args, **kwargs)
        for tensor in tensors(result):
            if tensor.requires_grad:
                self._derived.setdefault(id(tensor), made(function, args, kwargs, found, tensor))
        return result

    def _site(self, function: Any, args: Any, kwargs: Any, found: Sequence[Derived]) -> Site | None:
        # Not by place in the pass: a model may leave out layers (stochastic depth), and checkpoints repeat some.
        key = (function, tuple(d.roots for d in found), tuple(t.dim() for t in tensors((args, kwargs))))
        if self._learning is not None and self._number <= len(self._learning):
            site = self._learning[self._number - 1]
            if self.sites.setdefault(key, site) != site:
                self.sites[key] = None
        known = self.sites.get(key)
        if known is None and torch.is_grad_enabled():
            raise UnknownLayout(f"{getattr(function, '__name__', function)} on a parameter")
        return known

    def tap(self, output: torch.Tensor, saved: Sequence[torch.Tensor], collect: Collect) -> torch.Tensor:
        """See `Operation.tap`."""
        self.low_precision = self.low_precision or output.dtype.itemsize < 4

        def record(gradient: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
            with torch.no_grad(), torch._C.DisableTorchFunction():
                for derived, block in collect(gradient, [tensor.detach() for tensor in kept]):
                    derived.blocks.append(block)

        result: torch.Tensor = _Tap.apply(output, self.dummy, record, *saved)  # type: ignore[no-untyped-call]
        return result

    def blocks(self) -> list[Block]:
        """Return each parameter's block, after the backward pass."""
        for derived in reversed([d for d in self._derived.values() if d.of is None and d.blocks]):
            self._carry_back(derived)
        for derived in self._derived.values():
            if derived.of is not None and derived is not self._leaves[derived.of]:
                self._leaves[derived.of].blocks += derived.blocks
        for leaf in self._leaves:
            if leaf.tensor.grad is not None:
                # Nothing that has a gradient went past the tracer: else the example's vector would lack a part.
                raise UnknownLayout("an operation that torch does not show took a parameter")
        return [joined(leaf.blocks) if leaf.blocks else self._nothing(leaf.tensor) for leaf in self._leaves]

    def _carry_back(self, derived: Derived) -> None:
        rows = joined(derived.blocks).rows()
        leaves = [self._leaves[root] for root in derived.roots]
        gradients = torch.autograd.grad(
            derived.tensor,
            [leaf.tensor for leaf in leaves],
            rows.reshape(self.examples, *derived.tensor.shape),
            retain_graph=True,
            is_grads_batched=True,
            allow_unused=True,
        )
        for leaf, gradient in zip(leaves, gradients, strict=True):
            if gradient is not None:
                leaf.blocks.append(leaf.whole(gradient))

    def _nothing(self, parameter: torch.Tensor) -> Block:
        return Rows(parameter.new_zeros(1).expand(self.examples, parameter.numel()))


class _Tap(torch.autograd.Function):
    """The identity; its backward pass hands the gradient over. Saved tensors go through autograd, so that gradient
    checkpoints drop them and make them again.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, dummy: torch.Tensor, record: Any, *saved: torch.Tensor) -> torch.Tensor:
        ctx.record = record
        ctx.save_for_backward(*saved)
        # The same memory, and no view of it in autograd's eyes: what follows may change it in place, as ReLU does.
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # once: a gradient checkpoint makes them anew
        record, ctx.record = ctx.record, None
        # The blocks are views of them. Were they no others, block, graph and tracer would keep each other for ever:
        # Python does not see that a tensor holds its graph.
        record(gradient.detach(), [tensor.detach() for tensor in saved])
        return (gradient, *[None] * (2 + len(saved)))


__all__ = ["Collect", "Derived", "Operation", "Rule", "Sites", "Tracer"]
