"""What the tables share: a model of the suite, and those of a layer, a function and a head on inputs of any kind."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
Tree = Any
"""A tensor, or mappings and sequences of tensors."""

Built = tuple[nn.Module, Tree, Tree | None, Callable[..., Any] | None]
"""The model, its inputs, targets or None, and the loss or None for dpcore's default; of BATCH + 1 examples."""

BATCH = 12
"""Examples in a batch. `Case.build` returns one more: the spare one, with which others are replaced."""


@dataclass(frozen=True)
class Case:
    """One model of the suite.

    `build` is called under ``torch.manual_seed``. `kind` is "apart" for a model that must be accepted, by whichever way;
    "mixer" for one that treats examples together, so that it must be refused or bounded; "either" for all else.
    """

    name: str
    build: Callable[[], Built]
    kind: str


Function = Callable[[Any, Any], Any]
"""Of the hidden values, examples first, and the model, whose parameters and attributes it may use."""

ROWS, CLASSES = BATCH + 1, 3
ROW, SEQUENCE, IMAGE, TOKENS = (6,), (5, 6), (4, 6, 6), (5,)


def labels() -> Tensor:
    return torch.randint(CLASSES, (ROWS,))


class Between(nn.Module):
    """A layer, a function of what it gives, and a linear layer on all of that: so that every gradient passes it."""

    def __init__(self, shape: tuple[int, ...], function: Function, second: bool = False, **parts: Any) -> None:
        super().__init__()
        self.shape, self.function, self.second = shape, function, second
        self.first: nn.Module = nn.Conv2d(4, 4, 3, padding=1) if shape == IMAGE else nn.Linear(6, 6)
        if shape == TOKENS:
            self.first = nn.Embedding(9, 6)
        self.scale, self.square = nn.Parameter(torch.ones(6)), nn.Parameter(torch.randn(6, 6) / 3)
        self.one = nn.Parameter(torch.ones(()))
        for name, part in parts.items():
            setattr(self, name, part)
        self.last = nn.LazyLinear(CLASSES)

    def hidden(self, x: Tensor) -> Any:
        h = self.first(x)
        if self.second:
            return self.function(h.transpose(0, 1), self).transpose(0, 1)
        return self.function(h, self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.hidden(x).flatten(1))


def inputs(shape: tuple[int, ...]) -> Tensor:
    return torch.randint(9, (ROWS, *shape)) if shape == TOKENS else torch.randn(ROWS, *shape)


def between(
    shape: tuple[int, ...], function: Function, second: bool = False, **parts: Callable[[], Any]
) -> Callable[[], Built]:
    """Return the build of a model in which `function` runs; `parts` make modules that it finds in the model."""

    def build() -> Built:
        model = Between(shape, function, second, **{name: make() for name, make in parts.items()})
        x = inputs(shape)
        features = {IMAGE: 144, ROW: 6}.get(shape, 30)
        set_head(model, x, features)
        return model, x, labels(), None

    return build


def set_head(model: Between, x: Tensor, features: int) -> None:
    """Give the head the size that the function's result has; a mixer may fail on so few examples."""
    kept = torch.get_rng_state()
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            features = model.eval().hidden(x).flatten(1).shape[1]
    finally:
        torch.set_rng_state(kept)
        for module, training in modes:
            module.training = training
    model.last = nn.Linear(features, CLASSES)


def table(
    kind: str, group: str, shape: tuple[int, ...], functions: Mapping[str, Function], **options: Any
) -> list[Case]:
    """Return a case for each function."""
    return [Case(f"{group}: {name}", between(shape, f, **options), kind) for name, f in functions.items()]


def built(make: Callable[[], nn.Module], data: Callable[[], Any], loss: Any = None) -> Callable[[], Built]:
    """Return the build of a model on inputs, with class labels unless `data` gives a tuple of inputs and targets."""

    def build() -> Built:
        model, found = make(), data()
        x, targets = found if isinstance(found, tuple) else (found, labels())
        return model, x, targets, loss

    return build
