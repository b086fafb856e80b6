"""One private step of a torch model: from a batch to the mechanism's sum, and from its release to the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.sampling import UserSampler
from dpcore.sampling.users import portions
from dpcore.spec.ops import UpdateSettings
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.per_example import PerExampleGradient
from dpcore.torch.parameter_views import Working
from dpcore.torch.randomness import step_seed
from dpcore.torch.recorder import Recorder
from dpcore.torch.watch import Watch


class Engine:
    """Joins per-example gradients, working arrays and the mechanism.

    Parameters
    ----------
    gradient : PerExampleGradient
    mechanism : Mechanism
    working : Working
    microbatch_size : int
        Examples differentiated at once. Changes the order of summation, and which example gets which dropout mask.

    Attributes
    ----------
    recorder : Recorder or None
        Keeps coordinates of what is released.
    diagnostics : list of float or None
        ``clipped_mean_norm`` of each step where somebody asked for it. **Secret.**
    watch : Watch or None
        Notices, for a ledger, what changes a sum from step to step.
    """

    def __init__(
        self, gradient: PerExampleGradient, mechanism: Mechanism, working: Working, microbatch_size: int
    ) -> None:
        self.gradient = gradient
        self.mechanism = mechanism
        self.working = working
        self.microbatch_size = microbatch_size
        self.recorder: Recorder | None = None
        self.diagnostics: list[float] | None = None
        self.watch: Watch | None = None
        self._public: list[Any] | None = None
        self._swapped = False

    def accumulate(self, batch: Tree, public: Tree | None = None) -> None:
        """Clip every example's vector and add it to the mechanism's sum; nothing leaves it yet.

        After an exception the same batch may be tried once more: the noise of a step depends on its number only, and
        nothing of this step was released.
        """
        self._check_parameters()
        self.working.refresh()
        self._public = None if public is None else self._public_gradient(public)
        # An attempt that failed midway left a part of its sum; on top of it an example would count twice.
        self.mechanism.discard()
        points = self.mechanism.points()
        arrays = self.working.arrays()
        # All points are fresh values handed to functional_call; the model's parameters are not moved for them.
        values = [self._point(self.mechanism.at(arrays, point)) for point in points]
        weights = [point.weight for point in points]
        begun: list[torch.Tensor] | None = None  # the sum so far of a user larger than a micro-batch
        for start, stop, sizes, more in self._portions(batches.size(batch)):
            micro = batches.tree_map(lambda t: t[start:stop], batch)  # noqa: B023
            seed = step_seed(self.mechanism.keys, "dropout", self.mechanism.step, start)
            rows = self._rows(micro, weights, values, seed)
            if sizes is not None:
                rows = [_unit_sums(row, sizes) for row in rows]
            if begun is not None:
                rows = [row.add_(earlier) for row, earlier in zip(rows, begun, strict=True)]
            begun = rows if more else None
            if not more:
                self.mechanism.add([self.working.to_array(row.reshape(row.shape[0], -1)) for row in rows])

    def _portions(self, count: int) -> Iterator[tuple[int, int, list[int] | None, bool]]:
        """Yield the rows of each micro-batch; for users how many rows each has, and whether its user goes on."""
        sampler, most = self.mechanism.plan.sampler, self.microbatch_size
        if isinstance(sampler, UserSampler):
            yield from portions(sampler.units(self.mechanism.keys.sampling, self.mechanism.step), most)
            return
        for start in range(0, count, most):
            yield start, min(start + most, count), None, False

    def release(self, settings: Sequence[UpdateSettings]) -> None:
        """Let the mechanism add noise, filter and move the parameters."""
        norm = None if self.diagnostics is None else self.mechanism.clipped_mean_norm()
        number = self.mechanism.step
        seen: list[Any] = []
        try:
            self.mechanism.release(
                self.working.arrays(),
                settings,
                public=self._public,
                observe=None if self.recorder is None else lambda *both: seen.extend(map(self._picked, both)),
            )
        finally:
            self._public = None
            self.working.store()
            if self.watch is not None:
                self.watch.note()
            if norm is not None and self.diagnostics is not None and self.mechanism.step > number:
                self.diagnostics.append(norm)
        if self.recorder is not None:
            released, filtered = seen
            self.recorder.keep(released, filtered, self.mechanism.negative_share())

    def _picked(self, arrays: Sequence[Any]) -> Any:
        assert self.recorder is not None
        return self.recorder.pick([self.working.to_tensor(array) for array in arrays])

    def check_public(self, public: Tree | None) -> None:
        """Refuse a public batch that is missing, not wanted, or empty."""
        wanted = self.mechanism.plan.method.update.second_moment == "public"
        if wanted and public is None:
            raise ArgumentError(
                "public=None: must be a batch of public data, since the method's second moment is made of its gradient"
            )
        if not wanted and public is not None:
            raise ArgumentError(
                "public: must be None for this method; only second_moment='public' (dp_adam's and dp_adagrad's variant "
                "'side_information') uses public data"
            )
        if public is not None and batches.size(public) == 0:
            raise ArgumentError("public: must have at least one example")

    def _public_gradient(self, public: Tree) -> list[Any]:
        """Return the mean gradient of a public batch at the present parameters, neither clipped nor noised."""
        values = self._point(self.working.arrays())
        device, count = values[0].device, batches.size(public)
        total = [torch.zeros_like(tensor) for tensor in self.working.tensors()]
        for start in range(0, count, self.microbatch_size):
            micro = batches.tree_map(lambda t: t[start : start + self.microbatch_size].to(device), public)  # noqa: B023
            # Masks of their own: those of the private batch's places stay unknown.
            seed = step_seed(self.mechanism.keys, "public dropout", self.mechanism.step, start)
            for sum_so_far, rows in zip(total, self.gradient(values, micro, seed, synthetic=True), strict=True):
                sum_so_far.add_(rows.to(self.working.dtype).sum(0))
        return [self.working.to_array(tensor.div_(count)) for tensor in total]

    def check_not_swapped(self, call: str) -> None:
        """Refuse what needs the training values while `averaged` shows others."""
        if self._swapped:
            raise PrivacyError(
                f"{call}: the model holds its averaged values, not those it is trained at; leave private.averaged() "
                "first"
            )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the method's output into the model's parameters for the length of the block."""
        method = self.mechanism.plan.method
        if self._swapped or (method.averaging is None and method.update.rule != "accelerated"):
            yield
            return
        self._check_parameters()
        self.working.refresh()
        output = [self.working.to_tensor(array) for array in self.mechanism.output(self.working.arrays())]
        kept = [parameter.detach().clone() for parameter in self.working.parameters]
        watch = self.watch if self.watch is not None and self.watch.untouched else None
        self._swapped = True
        try:
            self._put(output)
            yield
        finally:
            self._put(kept)
            self._swapped = False
            if watch is not None:
                watch.note_trained()

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.working.parameters, values, strict=True):
                parameter.copy_(value)

    def _rows(
        self, micro: Tree, weights: list[float], values: list[list[torch.Tensor]], seed: bytes
    ) -> list[torch.Tensor]:
        """Return every example's vector: its gradients at the points of the query, combined."""
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
        return rows

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


def _unit_sums(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return the sum of each unit's rows, in a fixed order of summation."""
    if len(sizes) == rows.shape[0]:
        return rows
    return torch.stack([unit.sum(0) for unit in torch.split(rows, sizes)])
