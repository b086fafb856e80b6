"""A step of a torch model: the sum of clipped per-example gradients, and its release."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dpcore.errors import ArgumentError, PrivacyError, SpeedWarning
from dpcore.mechanism.loop import Blocks, Loop
from dpcore.mechanism.mechanism import Mechanism
from dpcore.spec.ops import UpdateSettings
from dpcore.stages.clipping.clipped_sum import add_sums, norms_of
from dpcore.stages.queries import Point
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.gradients.per_example import PerExampleGradient
from dpcore.torch.memory import Limit, is_out_of_memory
from dpcore.torch.model.functional import local
from dpcore.torch.model.joint import trained_parameters
from dpcore.torch.parameter_views import Working
from dpcore.torch.randomness import step_seed


class Engine(Loop):
    """The sum of a step of a torch model, and its release.

    It joins per-example gradients, parameters and the mechanism. `summed` says that a whole sum waits for its release,
    `stepping` that a step is under way, and `caveats` are the statement's sentences on the run and those it continues.
    `microbatch_size` changes the order of summation, and which example gets which dropout mask. After a step that ran
    out of memory it is smaller than `planned_microbatch_size`.

    A proved graph always runs on `microbatch_size` rows: a micro-batch with fewer examples is filled up, and what
    follows from the filling is cut off. A library chooses its kernels by the sizes of arrays, and another kernel rounds
    otherwise. So no size may tell how many other examples there are.
    """

    def __init__(
        self, gradient: PerExampleGradient, mechanism: Mechanism, working: Working, microbatch_size: int
    ) -> None:
        super().__init__(mechanism, microbatch_size)
        self.gradient = gradient
        self.working = working
        self.plan_microbatches(microbatch_size)
        self.limit: Limit | None = None
        self.microbatch_given = False  #: whether the caller determined it: a loaded state then leaves it as it is
        self.caveats: tuple[str, ...] = ()
        self.summed = self.stepping = False
        self._shown, self._kept = 0, list[torch.Tensor]()  # blocks of `averaged`, and the training values meanwhile

    def plan_microbatches(self, size: int) -> None:
        """Take `size` examples at once, or fewer if memory runs out."""
        self.microbatch_size: int = size
        self.planned_microbatch_size = size

    def accumulate(self, batch: Tree, public: Tree | None = None) -> None:
        """Clip every example's vector and add it to the mechanism's sum; nothing leaves it yet.

        After an exception the same batch may be tried again: a step's noise depends on its number only, and none was
        released. If memory runs out, this function itself tries again with half the micro-batch.

        Notes
        -----
        The sum starts from zero again, so that no example counts twice. Dropout masks follow from the place of a
        micro-batch's first example, so the second attempt has other masks. Nothing of the first attempt was released,
        and the memory of a step follows from shapes, not from the masks' values. So the masks of the last split,
        whichever it is, are independent and identically distributed. `dpcore.torch.randomness` requires no more. A lack
        of memory may reveal the size of the batch, which is secret under Poisson sampling. So the warning names no size
        that follows from it, and a checkpoint stores the planned micro-batch.
        """
        self.take_up_parameters()
        first = self.mechanism.first_example() * self.views

        def blocks_at(values: list[Any], point: Point) -> Blocks:
            # Fresh values handed to functional_call; the model's parameters are not moved for a point.
            at = self.tensors_at(values)

            def rows(part: slice) -> list[Any]:
                micro = batches.tree_map(lambda t: t[part], batch)
                own = batches.size(micro)
                if own and self.gradient.way == "pairs":
                    micro = batches.filled(micro, self.microbatch_size)
                seed = step_seed(self.mechanism.keys, "dropout", self.mechanism.step, first + part.start)
                # They identify the point; its weight may change from step to step, and moves no gradient.
                regular = point.displacement, point.lag
                blocks = self.gradient(at, micro, seed, regular=regular)
                return [block.map(lambda t: self.to_array(t[:own])) for block in blocks]

            return rows

        public_gradient = None if public is None else lambda: self._public_gradient(public)
        while True:
            try:
                self.sum_clipped(self.working.arrays(), blocks_at, batches.size(batch), public_gradient)
                return
            except Exception as cause:
                if not is_out_of_memory(cause):
                    raise
                if self.mechanism.peers.shards:
                    raise ArgumentError(
                        f"microbatch_size={self.microbatch_size}: is too much for the memory that is free, and the "
                        "processes of a sharded model cannot try a step again: begin with a smaller one"
                    ) from cause
                if self.microbatch_size == 1:
                    raise ArgumentError(
                        "microbatch_size=1: even one example at a time is too much for the memory that is free; make "
                        "the model or its inputs smaller, or free memory"
                    ) from cause
            # Out of the handler, whose exception keeps the attempt's tensors alive.
            self._halve()

    def _halve(self) -> None:
        if self.microbatch_size == self.planned_microbatch_size:
            warnings.warn(
                f"out of memory: takes half of the micro-batch of {self.microbatch_size} examples from now on, or "
                "less, which is slower; set microbatch_size or max_memory to begin with less",
                SpeedWarning,
                stacklevel=2,
            )
        self.microbatch_size //= 2
        if self.gradient.repeated is not None:
            self.gradient.repeated.passes.forget()
        if self.working.parameters[0].is_cuda:
            torch.cuda.empty_cache()

    def release(self, settings: Sequence[UpdateSettings]) -> None:
        """Let the mechanism add noise, filter, and move the parameters."""
        self.summed = False
        try:
            self.release_sum(self.working.arrays(), settings)
        finally:
            self.working.store()

    def check_public(self, public: Tree | None) -> None:
        """Refuse a public batch that is missing, not wanted, or empty."""
        wanted = self.mechanism.plan.method.update.second_moment == "public"
        if wanted and public is None:
            problem = "=None: must be a batch of public data, since the method's second moment is made of its gradient"
        elif not wanted and public is not None:
            problem = ": must be None for this method; only second_moment='public' (dp_adam's and dp_adagrad's variant "
            problem += "'side_information') uses public data. A batch is one argument: private.step((inputs, labels))"
        elif public is not None and batches.size(public) == 0:
            problem = ": must have at least one example"
        else:
            return
        raise ArgumentError(f"public{problem}")

    def _public_gradient(self, public: Tree) -> list[Any]:
        """Return the mean gradient of a public batch at the present parameters, neither clipped nor noised."""
        values, backend = self.tensors_at(self.working.arrays()), self.mechanism.backend
        device, count = values[0].device, batches.size(public)
        totals = [backend.zeros_like(array.reshape(-1), "float64") for array in self.working.arrays()]
        for start in range(0, count, self.microbatch_size):
            micro = batches.tree_map(lambda t: t[start : start + self.microbatch_size].to(device), public)  # noqa: B023
            # Masks of their own: those of the private batch's places stay unknown.
            seed = step_seed(self.mechanism.keys, "public dropout", self.mechanism.step, start)
            gradients = self.gradient(values, micro, seed, synthetic=True)
            blocks = [block.map(self.to_array) for block in gradients]
            none = [None] * len(blocks)
            norms = norms_of(backend, blocks, [range(len(blocks))], none)[0]
            largest = float(norms.max())
            # Sums are of integers: finer than float32 relative to the largest gradient.
            weight = 2.0**40 / (largest if 0 < largest < math.inf else 1.0)
            weights, sums = backend.zeros_like(norms) + weight, [backend.zeros_like(total) for total in totals]
            add_sums(backend, blocks, [weights] * len(blocks), sums, none)
            totals = [total + added / weight for total, added in zip(totals, sums, strict=True)]
        means = (self.working.to_tensor(total) / count for total in totals)
        return [self.working.to_array(mean.to(self.working.dtype)) for mean in means]

    def to_array(self, tensor: torch.Tensor) -> Any:
        """Return a block's tensor as the backend's array, indices as they are."""
        kept = self.working.kept(tensor.dtype)
        if tensor.dtype != kept or tensor.requires_grad or tensor.is_neg():
            tensor = tensor.detach().resolve_neg().to(kept)  # NumPy has no lazily negated arrays
        return self.working.to_array(tensor)

    def check_not_swapped(self, call: str) -> None:
        """Refuse a call that needs the training values while `averaged` shows others."""
        if self._shown:
            raise PrivacyError(
                f"{call}: the model holds its averaged values, not those it is trained at; leave private.averaged() "
                "first"
            )

    def take_up_parameters(self) -> None:
        """Take up the user's changes of the parameters; refuse another model, or one that was moved or cast."""
        self.gradient.values.settle()
        named = trained_parameters(self.gradient.model)
        pairs = zip(self.working.names, self.working.parameters, strict=True)
        changed = [name for name, parameter in pairs if named.pop(name, None) is not parameter]
        if changed or named:
            what = "replaced, removed or frozen" if changed else "added or unfrozen"
            name = [*changed, *named][0]
            raise ArgumentError(f"parameter {name!r} was {what} after make_private: call make_private again")
        self.working.refresh()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Put the method's output into the model's parameters for the length of the block.

        Of several blocks, in any threads, the first puts it in, and the last one to end restores the training values.
        """
        method = self.mechanism.plan.method
        if method.averaging is None and method.update.rule != "accelerated":
            yield
            return
        self._show()
        try:
            yield
        finally:
            with self.mechanism.turns.lock:
                self._shown -= 1
                if not self._shown:
                    self._put(self._kept)
                    self._kept = []

    def _show(self) -> None:
        with self.mechanism.turns.lock:  # waits for another thread's step, whose update would be lost
            if self.stepping:
                raise PrivacyError("private.averaged: called while a step is under way, as by a signal's handler")
            if not self._shown:
                self.take_up_parameters()
                output = [self.working.to_tensor(array) for array in self.mechanism.output(self.working.arrays())]
                self._kept = [local(parameter).clone() for parameter in self.working.parameters]
                try:
                    self._put(output)
                except BaseException:
                    self._put(self._kept)
                    raise
            self._shown += 1

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        self.gradient.values.settle()
        with torch.no_grad():
            for parameter, value in zip(self.working.parameters, values, strict=True):
                local(parameter).copy_(value)

    def tensors_at(self, arrays: Sequence[Any]) -> list[torch.Tensor]:
        """Return a point's arrays as tensors of the parameters' dtypes."""
        pairs = zip(arrays, self.working.parameters, strict=True)
        return [self.working.to_tensor(array).to(parameter.dtype) for array, parameter in pairs]
