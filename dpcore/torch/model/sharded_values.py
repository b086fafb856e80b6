"""How a model of fully_shard runs at a point: its own hooks gather each layer's values, and nothing else does.

The point's values are put into the shards of this process. The model itself is called, and fully_shard gathers each
layer before its forward and backward pass, and frees it after. The leaves are the gathered parameters: one object each
from the first gathering on, whose memory comes and goes.

Notes
-----
All processes must run the model equally often, since each gathering waits for all.

No gradient of a parameter leaves a process: while a point is taken, fully_shard is told to add none up. What a backward
pass leaves at a gathered parameter is the gradient of this process's own examples. The way "pairs" leaves none there,
and `dpcore.torch.sources.tracer` refuses what does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dpcore.errors import ArgumentError
from dpcore.torch.model.functional import State, Values, local, slots
from dpcore.torch.model.gathering import Note, NotedGather


class ShardedValues(Values):
    """See `Values`. Made in all processes together: the layers are gathered once, one after the other.

    `held` is what fully_shard keeps for itself: no state of the model. `note` is told of each gathering at a point.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], note: Note) -> None:
        super().__init__(model, names)
        self._note = note
        named = dict(model.named_parameters())
        self._shards = [named[name] for name in self.names]
        root: Any = model
        root._get_fsdp_state()._lazy_init()  # so that its hooks are there before the model is looked at
        self._modules = sharded_modules(model)
        for module in self._modules:
            module.unshard()
            module.reshard()
        states, self._groups = groups_of(model)
        known = [each for group in self._groups for each in group.fsdp_params]
        self._gathered = {id(each.sharded_param): each.unsharded_param for each in known}
        self._leaves = [self._gathered[id(shard)] for shard in self._shards]
        self._reset = root.reset_iter_state
        self.held = [*states, *self._groups, *known, *self._gathered.values(), *model.parameters()]

    def parameters(self) -> list[torch.Tensor]:
        """Return what this process has of the parameters: some rows of each."""
        return [local(shard) for shard in self._shards]

    @contextmanager
    def at(self, point: Sequence[torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], State]]:
        """Put the values into the shards, and the present ones back after it. Buffers get copies."""
        shards = self.parameters()
        kept = [shard.clone() for shard in shards]
        gradients = [shard.grad for shard in self._shards]
        added = [(group.reduce_grads, group._all_gather_comm) for group in self._groups]
        versions = [value._version for value in self._gathered.values()]
        self.settle()
        try:
            _fill(shards, point)
            for shard in self._shards:
                shard.grad = None
            for number, (group, (_, gather)) in enumerate(zip(self._groups, added, strict=True)):
                group.reduce_grads = False
                group.modules[0].set_custom_all_gather(NotedGather(gather, f"layer {number}", self._note))
            yield self._leaves, self._buffers()
            self._check(versions)
        finally:
            _fill(shards, kept)
            for leaf in self._leaves:
                leaf.grad = None
            for shard, gradient in zip(self._shards, gradients, strict=True):
                shard.grad = gradient
            for group, (adds, gather) in zip(self._groups, added, strict=True):
                group.reduce_grads = adds
                group.modules[0].set_custom_all_gather(gather)
            self.settle()

    @contextmanager
    def copies(self) -> Iterator[State]:
        """Have copies of the buffers at hand; what is gathered of the parameters is a copy anyway."""
        with self.at(self.parameters()) as (_, state):
            yield state

    def settle(self) -> None:
        """Free all that is gathered, also where a call ended midway: the next one gathers what the shards then hold."""
        self._reset()

    def _buffers(self) -> State:
        plain = {name: tensor for name, tensor in slots(self.model) if not hasattr(tensor, "to_local")}
        return {name: t.detach() if isinstance(t, nn.Parameter) else t.clone() for name, t in plain.items()}

    def _check(self, versions: Sequence[int]) -> None:
        if [value._version for value in self._gathered.values()] != list(versions):
            raise ArgumentError("model or loss change a parameter, of which fully_shard has a copy: change none")
        for name, shard in zip(self.names, self._shards, strict=True):
            if shard.grad is not None:
                raise ArgumentError(
                    f"parameter {name!r} is used outside of the forward pass of its module, where only a shard of it "
                    "is there: use it inside"
                )


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that were given to fully_shard."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def groups_of(model: nn.Module) -> tuple[list[Any], list[Any]]:
    """Return fully_shard's states of a model's modules, and the groups of parameters that it gathers together."""
    states = {id(state): state for state in (module._get_fsdp_state() for module in sharded_modules(model))}
    return list(states.values()), [group for state in states.values() for group in state._fsdp_param_groups]


def _fill(shards: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for shard, value in zip(shards, values, strict=True):
            shard.copy_(value.reshape(shard.shape))
