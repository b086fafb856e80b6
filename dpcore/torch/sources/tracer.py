"""Watches the operations of a model on its trained parameters, and learns the gradient of each one's output.

A parameter meets the examples in few operations (the product of a linear layer, the lookup of an embedding). There the
parameter is replaced by its value, so that autograd computes no gradient for it, and the output passes through `Tap`,
which receives the output's gradient in the backward pass. Both together give each example's gradient without forming
it (`dpcore.torch.sources.rules`). What is made of parameters alone, as a transposed or a normalized weight, is
`Derived`: a small graph of its own, through which the examples' gradients are carried back in the end.

Notes
-----
What makes a silent error impossible. A part of an example's gradient is lost only if autograd carries it to a
parameter past the tracer: then the parameter's leaf has a ``grad``, and `blocks` refuses. A part is counted twice, or
for another loss, only if a tap is reached by another backward pass than the loss's: `record` refuses. Where the
examples lie is taken from `sites`, which demands the very shapes that were learned, times the number of examples; a
tensor that was changed in place, by a rule's operation or after parameters made it, is noticed by its version. Rows in
another order than the examples', and examples that mix, have right shapes: operations that may order rows by values are
refused (`dpcore.torch.sources.choices`), all else is found on values (`dpcore.torch.model.compare`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from dpcore.stages.clipping.blocks import Block, Rows, joined
from dpcore.torch.model.functional import FAILURES
from dpcore.torch.sources.choices import CHOICES, among_examples, chooses
from dpcore.torch.sources.derived import Derived, carry_back, in_place, made, name_of, out_of_place
from dpcore.torch.sources.losses import LOSSES, example_losses_inside
from dpcore.torch.sources.operation import Collect, Operation
from dpcore.torch.sources.places import Shapes, Site, UnknownLayout, tensors
from dpcore.torch.sources.sites import Learning, Sites
from dpcore.torch.sources.tap import Tap
from dpcore.torch.sources.written_out import WRITTEN_OUT

_MADE_LEAF = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_SPECIAL = frozenset(WRITTEN_OUT) | LOSSES | CHOICES | _MADE_LEAF

Rule = Callable[[Operation], Any]


class Phase(Enum):
    """What runs at the moment. In the backward pass checkpoints run parts of the model again."""

    MODEL, LOSS, BACKWARD = range(3)


class Tracer(TorchFunctionMode):
    """Follows one forward and backward pass of `examples` examples at one point.

    `sites` says by operation and parameters where the examples lie. While `learning`, it is filled.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        examples: int,
        sites: Sites,
        rules: Callable[[Any], Rule],
        learning: Learning | None = None,
    ) -> None:
        super().__init__()
        self.examples = examples
        self.sites = sites
        self.phase = Phase.MODEL
        self.low_precision = False
        self.made_leaves: list[torch.Tensor] = []  # by the model itself, as it does for gradient checkpoints
        self._rules = rules
        self._learning = learning
        self._number = 0
        self.dummy = torch.zeros((), requires_grad=True, device=leaves[0].device)
        self._leaves = [Derived(leaf, (place,), place) for place, leaf in enumerate(leaves)]
        self._derived = {id(derived.tensor): derived for derived in self._leaves}
        self._every = list(self._leaves)
        self._without_grad: dict[int, Derived] = {}

    def derived(self, tensor: torch.Tensor) -> Derived | None:
        """Return what is known of a tensor that depends on parameters and on no example."""
        return self._derived.get(id(tensor))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = self._found(args, kwargs)
        if self._learning is None and not found and function not in _SPECIAL:
            return function(*args, **(kwargs or {}))  # nearly all operations of a model
        kwargs = kwargs or {}
        if function in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[function](*args, **kwargs)
        took = tuple(t.shape for t in tensors((args, kwargs)))
        if self.phase is Phase.LOSS:  # what it takes of a parameter shows in `blocks`
            return function(*args, **kwargs)
        choice = function in CHOICES and chooses(function, args, kwargs)
        if self._learning is not None and self.phase is Phase.MODEL:
            found = self._learn(function, took, found, args, kwargs)
        loss = function in LOSSES and not found
        if function in _MADE_LEAF:
            self.made_leaves.append(args[0])
        if not found and not loss and not choice:
            return function(*args, **kwargs)
        site = self.sites.find(_key(function, found), took, self.examples)
        if choice and among_examples(function, args, kwargs, site):
            raise UnknownLayout(f"{name_of(function)} chooses or orders rows of several examples by their values")
        if not found and not loss:
            return function(*args, **kwargs)
        if not torch.is_grad_enabled() and not loss:
            return self._run_without_grad(function, args, kwargs, found, site)
        if site is None:
            shapes = [tuple(shape) for shape in took]
            raise UnknownLayout(
                f"{name_of(function)} of tensors of shapes {shapes}: the examples are not found in them"
            )
        if loss:
            replaced = example_losses_inside(function, args, kwargs, self.examples, site.took)
            return function(*args, **kwargs) if replaced is None else replaced
        return self._run(function, args, kwargs, found, site)

    def _found(self, args: Any, kwargs: Any) -> list[Derived]:
        known, found, nested = self._derived, [], bool(kwargs)
        for a in args:
            if id(a) in known:
                found.append(known[id(a)])
            elif type(a) is tuple or type(a) is list:
                nested = True
        if nested:
            found = [known[id(t)] for t in tensors((args, kwargs)) if id(t) in known]
        if found and not all(derived.current for derived in found):
            # Parameters and constants alone were written into it (`_run`); only its graph tells what it is now.
            for derived in found:
                if not derived.current:
                    self._describe(Derived(derived.tensor, tuple(range(len(self._leaves)))))
            return self._found(args, kwargs)
        return found

    def _describe(self, derived: Derived) -> None:
        self._derived[id(derived.tensor)] = derived
        self._every.append(derived)

    def _learn(self, function: Any, took: Shapes, found: list[Derived], args: Any, kwargs: Any) -> list[Derived]:
        """Note what the operation is; return the derived tensors among those that it takes."""
        assert self._learning is not None
        if not torch.is_grad_enabled():
            # A checkpoint runs without gradients what it will run again with them: it is learned here all the same.
            known = self._without_grad | self._derived
            found = [known[id(t)] for t in tensors((args, kwargs)) if id(t) in known]
        torch.default_generator.set_state(self._learning.state)
        call, site = self._learning.calls[self._number] if self._number < len(self._learning.calls) else (None, None)
        self._number += 1
        if call is None or call.function != function or call.took != took:
            raise UnknownLayout("the model does other operations when it runs again")
        if found or function in LOSSES or (function in CHOICES and chooses(function, args, kwargs)):
            self.sites.add(_key(function, found), site)
        return found

    def _run_without_grad(self, function: Any, args: Any, kwargs: Any, found: Sequence[Derived], site: Any) -> Any:
        result = function(*args, **kwargs)
        if self._learning is not None and site is not None and not any(site.gave):
            for tensor in tensors(result):
                if tensor.is_floating_point():
                    self._without_grad[id(tensor)] = made(function, args, kwargs, found, tensor)
        return result

    def _run(self, function: Any, args: Any, kwargs: Any, found: Sequence[Derived], site: Site) -> Any:
        if any(site.gave) and not name_of(function).startswith("new_"):
            rule = self._rules(function)
            if not in_place(function) or rule is not self._rules(None):
                return rule(Operation(self, function, args, kwargs, site))
            apart = getattr(torch.Tensor, out_of_place(name_of(function)), None)
            if apart is None:
                raise UnknownLayout(f"{name_of(function)} with a parameter changes a tensor in place")
            # What the operation would have written, in its place: all who hold the tensor see it.
            before = (args[0].clone(), *args[1:])
            return args[0].copy_(self._rules(apart)(Operation(self, apart, before, kwargs, site)))
        # A checkpoint would drop what the way back to the parameters needs: it is small, and kept.
        dropped = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        with saved_tensors_hooks(_same, _same) if dropped else nullcontext():
            result = function(*args, **kwargs)
        given = [tensor for tensor in tensors(result) if tensor.requires_grad]
        if any(site.took) and (given or not all(derived.current for derived in found)):
            raise UnknownLayout(f"{name_of(function)} takes all examples and a parameter to one result")
        for tensor in given:
            if id(tensor) not in self._derived:
                self._describe(made(function, args, kwargs, found, tensor))
        return result

    def tap(self, output: torch.Tensor, saved: Sequence[torch.Tensor], collect: Collect, name: str) -> torch.Tensor:
        """See `Operation.tap`; the operation has this name."""
        self.low_precision = self.low_precision or output.dtype.itemsize < 4

        def record(gradient: torch.Tensor, kept: Sequence[torch.Tensor]) -> None:
            if self.phase is not Phase.BACKWARD:
                raise UnknownLayout("the model takes gradients of its own")
            try:
                with torch._C.DisableTorchFunction():
                    for derived, block in collect(gradient, [tensor.detach() for tensor in kept]):
                        derived.blocks.append(block)
            except torch.OutOfMemoryError:
                raise
            except FAILURES as cause:
                raise UnknownLayout(f"{name} cannot be differentiated example by example") from cause

        result: torch.Tensor = Tap.apply(output, self.dummy, record, *saved)  # type: ignore[no-untyped-call]
        return result

    def blocks(self) -> list[Block]:
        """Return each parameter's block, after the backward pass."""
        for derived in self._every[len(self._leaves) :]:
            if derived.of is not None:
                self._leaves[derived.of].blocks += derived.blocks
            elif derived.blocks:
                if not derived.current:
                    raise UnknownLayout("a tensor made of parameters is used and then changed in place")
                carry_back(derived, self._leaves, self.examples)
        for leaf in self._leaves:
            if leaf.tensor.grad is not None:
                raise UnknownLayout("an operation that torch does not show took a parameter")
        none = [Rows(leaf.value.new_zeros(1).expand(self.examples, leaf.value.numel())) for leaf in self._leaves]
        return [joined(leaf.blocks) if leaf.blocks else zeros for leaf, zeros in zip(self._leaves, none, strict=True)]


def _key(function: Any, found: Sequence[Derived]) -> tuple[Any, ...]:
    # Not by place in the pass: a model may leave out layers (stochastic depth), and checkpoints repeat some.
    return function, tuple(derived.roots for derived in found)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


__all__ = ["Collect", "Derived", "Operation", "Phase", "Rule", "Sites", "Tracer"]
