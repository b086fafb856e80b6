"""The objects under examination, the runs built from them, and the restoration of their state."""

import inspect
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.mechanism.peers import Peers
from dpcore.sampling.draw import Indices
from dpcore.spec.keys import RunKeys
from dpcore.stages.method import Method
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree, trial_batch
from dpcore.torch.data.data import Data
from dpcore.torch.explain import Rehearsal
from dpcore.torch.gradients.per_example import Loss
from dpcore.torch.make_private import assembled, make_private
from dpcore.torch.model.functional import local
from dpcore.torch.model.joint import loss_for, split
from dpcore.torch.model.state_probe import GLOBAL_HOOKS, Snapshot, walk
from dpcore.torch.parameter_views import Working
from dpcore.torch.randomness import TRIAL, seeded
from dpcore.torch.run import PrivateRun

OF_A_REAL_RUN = ("ledger", "data_id", "run_name", "key", "exact_key")
"""Keywords of `make_private` that have no meaning here: nothing is paid for, and keys are fresh and thrown away."""


class Subject:
    """A user's model, data, method and loss, with the other keywords of `make_private` as `options`.

    `private` is the run that `make_private` makes of them, if it accepts them: it has no ledger, and its own keys.
    Otherwise `refused` is the error; `warned` are the warnings. Checks that take steps take those of `another`.
    """

    def __init__(self, model: nn.Module, data: Any, method: Method, loss: Loss, options: Mapping[str, Any]) -> None:
        self.model, self.data, self.method, self.loss = model, data, method, loss_for(model, loss)
        self.options = {name: value for name, value in options.items() if name not in OF_A_REAL_RUN}
        known = inspect.signature(make_private).parameters
        for name in self.options:
            if name not in known:
                raise ArgumentError(f"{name}: is no keyword of dpcore.torch.make_private")
        if self.options.get("epochs") is None and self.options.get("steps") is None:
            self.options["steps"] = 100
        self.private: PrivateRun | None = None
        self.refused: Exception | None = None
        self.warned: list[Warning] = []
        self.deadline = time.monotonic()

    def build(self) -> None:
        """Let `make_private` make a run, or say why not."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.private = make_private(self.model, self.data, self.method, loss=self.loss, **self.options)
            except Exception as refused:  # noqa: BLE001 - a user's own objects may raise anything
                self.refused = refused
        self.warned = [warning.message for warning in caught if isinstance(warning.message, Warning)]

    @property
    def run(self) -> PrivateRun:
        """The run that `make_private` made."""
        assert self.private is not None
        return self.private

    def another(self) -> PrivateRun:
        """Return a further run of the plan, with fresh keys, no ledger, and the model's present parameters."""
        run, engine, backend = self.run, self.run.engine, self.run.engine.mechanism.backend
        made = assembled(
            engine.gradient,
            Working(backend, engine.working.names, engine.working.parameters),
            self.source,
            run.plan,
            RunKeys.new(),
            backend=backend,
            peers=Peers(),
            params=self.options.get("params"),
            microbatch_size=engine.microbatch_size,
        )
        rehearsal = Rehearsal(made[0], run._rehearsal.example)
        return PrivateRun(made[2], made[1], rehearsal, run._modes, self.options.get("target_delta"), ())

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    @cached_property
    def source(self) -> Data:
        """The data, as a run reads them."""
        if self.private is not None:
            return self.private.loader.data
        given = self.options.get
        return Data(self.data, self.device, given("collate_fn"), given("num_workers", 0), given("augmentations", 1))

    def made(self, examples: int, label: int = 0) -> Tree:
        """Return a synthetic batch of `examples` examples in the form of the data's, with `label` as all targets."""
        return trial_batch(self.source.example(self.options.get("example_batch")), examples, label=label)

    def examples(self, places: Indices) -> Tree:
        """Return examples of the data: of those with several views, the first one."""
        return batches.tree_map(lambda t: t[:: self.source.views], self.source.batch(places, TRIAL))

    def loss_of(self, batch: Tree) -> torch.Tensor:
        """Return the loss of a whole batch."""
        inputs, targets = split(self.model, batches.tree_map(torch.clone, batch))
        with seeded(self.device, TRIAL):
            return self.loss(batches.call(self.model, inputs), *targets)

    @property
    def delta(self) -> float:
        """The delta of the stated epsilon: the target delta, or 1e-5, or a tenth of 1/n if that is less."""
        given = self.options.get("target_delta")
        return float(given) if given is not None else min(1e-5, 0.1 / self.source.length)


LARGE = 64 * 2**20
"""Arrays of the data with this many bytes or more are not copied: reading changes other state, if any."""
_SEARCHED = 1000  # items of each container of the data that are checked


@contextmanager
def unchanged(objects: Mapping[str, Any], data: Any, device: torch.device) -> Iterator[None]:
    """Restore everything that changes in the block and is reachable from `objects` and `data`, and all generators.

    This includes the model's parameters, in their own memory, so that the block may train. They are copied meanwhile.
    Arrays of the data of `LARGE` bytes and more, and items of its containers beyond the 1000th, are not restored.
    """
    reachable = [value for _, value, first in walk({"data": data}, most=_SEARCHED) if not first]
    large = [value for value in reachable if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes >= LARGE]
    before = [Snapshot({**objects, **GLOBAL_HOOKS}, [data, *large]), Snapshot({"data": data}, large, _SEARCHED)]
    with seeded(device, TRIAL):
        try:
            yield
        finally:
            for snapshot in before:
                snapshot.restore()


@contextmanager
def kept_values(model: nn.Module) -> Iterator[None]:
    """Put the values of a model's parameters back after the block, which takes steps: later checks see the user's."""
    before = [local(parameter).clone() for parameter in model.parameters()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                local(parameter).copy_(value)
