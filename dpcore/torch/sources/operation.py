"""One operation on trained parameters and examples, as a rule sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.sources.derived import Derived, name_of
from dpcore.torch.sources.places import Layout, Site, UnknownLayout, tensors

if TYPE_CHECKING:
    from dpcore.torch.sources.tracer import Tracer

Collect = Callable[[torch.Tensor, Sequence[torch.Tensor]], Iterable[tuple[Derived, Block]]]
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
        self.function = _as_now(function)
        self.examples = tracer.examples
        self.gave = site.gave
        self._taken = tensors((args, kwargs))
        self._layouts = dict(zip(map(id, self._taken), site.took, strict=True))
        self._derived: dict[int, Derived] = {}
        self.args, self.kwargs = self._cut(args), self._cut(kwargs)

    def _cut(self, tree: Any) -> Any:
        """Return a tree as `tensors` sees it, with values in the place of derived tensors."""
        derived = self.tracer.derived(tree)
        if derived is not None:
            self._derived[id(derived.value)] = derived
            return derived.value
        if isinstance(tree, (tuple, list)):
            values = [self._cut(value) for value in tree]
            return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
        return {key: self._cut(value) for key, value in tree.items()} if isinstance(tree, dict) else tree

    def derived(self, tensor: Any) -> Derived | None:
        """Return what a value in the arguments stands for, if it is a derived tensor's."""
        return self._derived.get(id(tensor))

    def layout(self, tensor: torch.Tensor) -> Layout | None:
        """Return where the examples lie in one of the arguments."""
        return self._layouts.get(id(tensor))

    def run(self) -> Any:
        """Do the operation with the values."""
        versions = [tensor._version for tensor in self._taken]
        result = self.function(*self.args, **self.kwargs)
        if versions != [tensor._version for tensor in self._taken]:
            # A rule would save the changed tensor in place of the one that the operation took.
            raise UnknownLayout(f"{name_of(self.function)} with a parameter changes a tensor in place")
        return result

    def examples_first(self, tensor: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        """Return a view (B, T, ...) of a tensor whose examples lie along `layout`; T = 1 where each has one row."""
        if layout is None or tensor.shape[layout.dim] != self.examples * layout.rows:
            raise UnknownLayout(f"no examples in a tensor of shape {tuple(tensor.shape)}")
        first = tensor.movedim(layout.dim, 0)
        view: torch.Tensor = first.unflatten(0, (self.examples, layout.rows))  # type: ignore[no-untyped-call]
        return view

    def tap(self, output: torch.Tensor, saved: Sequence[torch.Tensor], collect: Collect) -> torch.Tensor:
        """Return the output, which tells `collect` its gradient in the backward pass, together with `saved`."""
        return self.tracer.tap(output, saved, collect, name_of(self.function))


def _as_now(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as it is under the present autocast, for the backward pass, which is outside of it."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return function
    dtype = torch.get_autocast_dtype(kinds[0])

    def as_now(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kinds[0], dtype, cache_enabled=False):
            return function(*args, **kwargs)

    as_now.__name__ = name_of(function)
    return as_now
