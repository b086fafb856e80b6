"""One private step of a torch model: from a batch to the mechanism's sum, and from its release to the parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dpcore.errors import ArgumentError
from dpcore.mechanism import Mechanism
from dpcore.spec.ops import UpdateSettings
from dpcore.torch import batches
from dpcore.torch.batches import Tree
from dpcore.torch.per_example import PerExampleGradient
from dpcore.torch.randomness import step_seed
from dpcore.torch.working import Working


class Engine:
    """Joins per-example gradients, working arrays and the mechanism.

    Parameters
    ----------
    gradient : PerExampleGradient
    mechanism : Mechanism
    working : Working
    microbatch_size : int
        Examples differentiated at once. Changes the order of summation, and which example gets which dropout mask.
    """

    def __init__(
        self,
        gradient: PerExampleGradient,
        mechanism: Mechanism,
        working: Working,
        microbatch_size: int,
    ) -> None:
        self.gradient = gradient
        self.mechanism = mechanism
        self.working = working
        self.microbatch_size = microbatch_size

    def accumulate(self, batch: Tree) -> None:
        """Clip every example's vector and add it to the mechanism's sum; nothing leaves it yet.

        After an exception the same batch may be tried once more: the noise of a step depends on its number only, and
        nothing of this step was released.
        """
        self._check_parameters()
        self.working.refresh()
        # An attempt that failed midway left a part of its sum; on top of it an example would count twice.
        self.mechanism.discard()
        points = self.mechanism.points()
        arrays = self.working.arrays()
        # All points are fresh values handed to functional_call; the model's parameters are not moved for them.
        values = [self._point(self.mechanism.at(arrays, point)) for point in points]
        weights = [point.weight for point in points]
        for start in range(0, batches.size(batch), self.microbatch_size):
            micro = batches.tree_map(lambda t: t[start : start + self.microbatch_size], batch)  # noqa: B023
            seed = step_seed(self.mechanism.keys, "dropout", self.mechanism.step, start)
            self._add(micro, weights, values, seed)

    def release(self, settings: Sequence[UpdateSettings]) -> None:
        """Let the mechanism add noise, filter and move the parameters."""
        try:
            self.mechanism.release(self.working.arrays(), settings)
        finally:
            self.working.store()

    def _add(self, micro: Tree, weights: list[float], values: list[list[torch.Tensor]], seed: bytes) -> None:
        rows: list[torch.Tensor] | None = None
        for weight, value in zip(weights, values, strict=True):
            gradients = [g.to(self.working.dtype) for g in self.gradient(value, micro, seed)]
            # The combination is formed in float32 or wider and clipped once: its sensitivity is one clip norm.
            weighted = gradients if len(values) == 1 and weight == 1 else [g * weight for g in gradients]
            if rows is None:
                rows = weighted
            else:
                for row, more in zip(rows, weighted, strict=True):
                    row.add_(more)
        assert rows is not None
        count = rows[0].shape[0]
        self.mechanism.add([self.working.to_array(row.reshape(count, -1)) for row in rows])

    def _point(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        return [
            self.working.to_tensor(array).to(parameter.dtype)
            for array, parameter in zip(arrays, self.working.parameters, strict=True)
        ]

    def _check_parameters(self) -> None:
        """Refuse a model whose set of trained parameters is no longer the run's."""
        named = {name: p for name, p in self.gradient.model.named_parameters() if p.requires_grad}
        for name, parameter in zip(self.working.names, self.working.parameters, strict=True):
            if named.pop(name, None) is not parameter:
                raise ArgumentError(
                    f"parameter {name!r} was replaced, removed or frozen after make_private: call make_private again"
                )
        if named:
            raise ArgumentError(
                f"parameter {next(iter(named))!r} was added or unfrozen after make_private: call make_private again"
            )
