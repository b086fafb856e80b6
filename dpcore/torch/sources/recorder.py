"""A run of the model that is only watched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from dpcore.torch.sources.losses import LOSSES, example_losses_inside
from dpcore.torch.sources.places import Call, Site, tensors
from dpcore.torch.sources.written_out import WRITTEN_OUT


class Recorder(TorchFunctionMode):
    """Notes every operation of a run on so many examples; each draws from the same state of torch's generator.

    `losses` says by place in the run which loss functions give one number for each example, and where these lie.
    """

    def __init__(self, examples: int, state: torch.Tensor, losses: Mapping[int, Site]) -> None:
        super().__init__()
        self.examples = examples
        self.calls: list[Call] = []
        self._state = state
        self._losses = losses

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[function](*args, **(kwargs or {}))
        # Each operation draws the same in all runs of learning, whatever else of other sizes was drawn before it.
        torch.default_generator.set_state(self._state)
        site, result = self._losses.get(len(self.calls)), None
        if site is not None and function in LOSSES:
            result = example_losses_inside(function, args, kwargs or {}, self.examples, site.took)
        if result is None:
            result = function(*args, **(kwargs or {}))
        took = tuple(t.shape for t in tensors((args, kwargs)))
        self.calls.append(Call(function, took, tuple(t.shape for t in tensors(result))))
        return result
