"""Which processes train a model, and what follows of it for how its gradients are found."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import Shard

from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.mechanism.peers import Alone, Peers
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.blocks import Block
from dpcore.stages.clipping.together import add_sums
from dpcore.stages.method import Method
from dpcore.torch import processes
from dpcore.torch.gradients.per_example import Loss, PerExampleGradient
from dpcore.torch.gradients.sharded import groups_of, sharded_modules
from dpcore.torch.model.functional import local
from dpcore.torch.processes import Processes


def peers_of(process_group: Any, model: nn.Module) -> Peers:
    """Return the processes of a group, by default the one that was set up; without one this process is alone."""
    if process_group is not None and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("process_group: this process is no member of it; only its members call make_private")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"process_group={type(process_group).__name__!r}: must be a torch.distributed process group, or None"
        )
    if not dist.is_available() or not dist.is_initialized():
        return Alone()
    group = dist.group.WORLD if process_group is None else process_group
    _check_backend(dist.get_backend_config(group), next((p.device.type for p in model.parameters()), "cpu"))
    if is_sharded(model):
        check_shards(model, group)
        return Sharded(group)
    return Alone() if dist.get_world_size(group) == 1 else Processes(group)


def _check_backend(config: str, device: str) -> None:
    """Refuse a group that cannot send tensors of a device; `config` is such as "cpu:gloo,cuda:nccl"."""
    backends = dict(part.split(":") for part in config.split(","))
    if device in backends and not (device == "cuda" and backends[device] == "gloo"):
        return
    told = backends.get(device, "none")
    wanted = {"cpu": "gloo", "cuda": "nccl"}.get(device, device)
    raise ArgumentError(
        f"process_group: its backend for tensors on {device!r}, where the model is, is {told}: must be {wanted}, as "
        f'init_process_group("{wanted}") makes it'
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether this process has parts of the model's parameters alone, as fully_shard and tensor parallelism do it."""
    if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        return True  # also while its parameters are gathered, as after a forward pass
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def gradient_of(model: nn.Module, loss: Loss, peers: Peers) -> PerExampleGradient:
    """Return what finds the gradients of a model, which may be sharded over the processes."""
    if not peers.shards:
        return PerExampleGradient(model, loss)
    from dpcore.torch.gradients.sharded import ShardedGradient

    assert isinstance(peers, Sharded)
    return ShardedGradient(model, loss, peers.note)


def way_of(peers: Peers, method: Method, gradients: str) -> str:
    """Return the way that gradients are found, which was asked for; of a sharded model there is one."""
    if not peers.shards:
        return gradients

    return check_run_of_shards(method, gradients)


def check_shards(model: nn.Module, group: Any) -> None:
    """Refuse a sharded model that is not one of fully_shard over the rows of its tensors and the run's processes."""
    root: Any = model
    if not isinstance(model, FSDPModule) or root._get_fsdp_state()._is_root is False:
        raise ArgumentError(
            f"model={type(model).__name__}: parameters are DTensors, and the model is no root of fully_shard: call "
            "fully_shard on the model itself after its layers; tensor parallelism is not supported"
        )
    if not hasattr(model, "reset_iter_state"):
        raise ArgumentError(f"torch {torch.__version__}: models of fully_shard need torch 2.13 or later")
    for module in sharded_modules(model):
        module.reshard()
    for name, parameter in model.named_parameters():
        complaint = next(_complaints(parameter, group), None)
        if complaint is not None:
            raise ArgumentError(f"parameter {name!r} {complaint}")
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ArgumentTypeError(
                f"parameter {name!r} has dtype {parameter.dtype}: sharded ones must be float32 or float64"
            )
    states, groups = groups_of(model)
    if any(len(state._fsdp_param_groups) > 1 for state in states):
        raise ArgumentError("fully_shard(shard_placement_fn=...): must give all parameters of a module one mesh")
    for each in groups:
        names = ", ".join(type(module).__name__ for module in each.modules)
        if each.mp_policy.param_dtype is not None or each.mp_policy.output_dtype is not None:
            raise ArgumentError(f"fully_shard({names}, mp_policy=...): must leave the dtypes as they are")
        if isinstance(each.offload_policy, CPUOffloadPolicy):
            raise ArgumentError(f"fully_shard({names}, offload_policy=CPUOffloadPolicy()): must be left out")
        if each.post_forward_mesh_info not in (None, each.mesh_info):
            raise ArgumentError(f"fully_shard({names}, reshard_after_forward=...): must be True, False or None")


def _complaints(parameter: Any, group: Any) -> Iterator[str]:
    """Yield what is wrong with a parameter."""
    if not hasattr(parameter, "to_local"):
        if parameter.requires_grad:
            yield "is not sharded, and others are: call fully_shard on the whole model, without ignored_params"
        return
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim != 1:
        yield f"is on a mesh of {mesh.ndim} dimensions, as HSDP and tensor parallelism make: must be on one of 1"
    elif placements != (Shard(0),):
        yield f"has the placement {placements[0]}: must be sharded along dimension 0"
    elif dist.get_process_group_ranks(mesh.get_group()) != dist.get_process_group_ranks(group):
        yield "is sharded over other processes than the run's: give its mesh's group as process_group"
    elif type(parameter.to_local()) is not torch.Tensor:
        yield f"has shards of class {type(parameter.to_local()).__name__}: must be plain tensors"
    else:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        ((_, start, stop),) = Layout.of([("", parameter.shape)]).rows(rank, world_size)
        if local(parameter).numel() != stop - start:
            yield f"has {local(parameter).numel()} elements in rank {rank}: must have {stop - start}"


def check_run_of_shards(method: Method, gradients: str) -> str:
    """Refuse what a run of a sharded model cannot do; return the way that its gradients are found."""
    if method.galore is not None:
        told = f"galore={method.galore!r}: projects whole matrices, and a process owns rows of them"
    elif method.preconditioning is not None:
        told = "preconditioning: scales whole gradients before the clip"
    elif method.update.second_moment == "public":
        told = "second_moment='public': takes whole gradients of public data"
    elif gradients not in ("auto", "pairs"):
        told = f"gradients={gradients!r}: forms whole gradients of every example"
    else:
        return "pairs"
    raise ArgumentError(f"{told}; with a model of fully_shard it must be left out")


# The processes of a model of fully_shard: each keeps its rows of every tensor, and of all that a run keeps beside it.
#
# Notes
# -----
# Why sensitivity and noise are those of one process. Each example is in one process, which has its whole vector, scales
# it by its own norm, and adds it to a float64 vector of the tensor; the reduce-scatter adds those of all processes. So
# every coordinate of the sum is the float64 sum of the clipped vectors of the whole batch, each once: only the order of
# the additions differs, over which `dpcore.spec.rounding` bounds the rounding. A process without examples adds zeros,
# never what its made-up batch gave. The noise of a coordinate follows from its element of the stream, and its one owner
# draws it once (`Layout.rows` cuts each tensor into disjoint pieces that cover it).
#
# Nothing is released before all have agreed that the whole sum is there. Within a step, fully_shard sends messages as
# well, so that a process that fails there is out of step with the others: it takes part in no message any more, and the
# others end by the group's timeout. A step's messages are compared before it is released, since those of different
# orders could join by chance.


class Sharded(Processes):
    """See `dpcore.mechanism.peers.Peers`; a process owns some rows of each tensor, and holds no others.

    Notes
    -----
    A step sends each tensor's sum once per micro-batch, by a reduce-scatter, and nothing of the moved parameters.
    """

    shards = True

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._added: list[tuple[Sequence[Block], Sequence[Any]]] = []
        self._begun = False  # a step whose sum is not whole yet
        self._order = hashlib.sha256()

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """See `Peers.pieces`."""
        return layout.rows(self.rank, self.world_size)

    def totals(self, like: Sequence[Any], backend: Backend[Any], terms: int) -> list[Any]:
        """See `Peers.totals`: of the own pieces."""
        found = [backend.zeros_like(vector, "float64") for vector in like]
        self._sum = processes.as_tensor(found[0])[:0]
        return found

    def rounds(self, count: int) -> int:
        """See `Peers.rounds`: as many as the process with most micro-batches has."""
        most = torch.tensor(count, device=self._sum.device)
        with self._lost():
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._group)
        self._begun = True
        self._order = hashlib.sha256()
        return int(most)

    def note(self, message: str) -> None:
        """Note a message of a step; all processes must have sent the same ones, in one order."""
        self._order.update(f"{message}\n".encode())

    def add_sums(
        self,
        backend: Backend[Any],
        blocks: Sequence[Block],
        weights: Sequence[Any],
        totals: Sequence[Any],
        scales: Sequence[Any],
    ) -> None:
        """See `Peers.add_sums`: kept until `join`, so that all processes join equally often."""
        self._added.append((blocks, weights))

    def join(self, totals: Sequence[Any], layout: Layout, backend: Backend[Any]) -> None:
        """See `Peers.join`: tensor by tensor, so that no process ever has the sum of more than one."""
        firsts = layout.rows(0, self.world_size)
        for i, (entry, first, total) in enumerate(zip(layout.entries, firsts, totals, strict=True)):
            whole = torch.zeros(first.stop * self.world_size, dtype=torch.float64, device=self._sum.device)
            of_tensor = _like(whole, total)[: entry.size]
            for blocks, weights in self._added:
                add_sums(backend, [blocks[i]], [weights[i]], [of_tensor], [None])
            own = whole.new_empty(first.stop)
            if first.stop:
                self.note(f"sum {i}")
                with super()._lost():
                    processes.reduce_scatter(own, whole, self._group)
            total += _like(own, total)[: total.shape[0]]
        self._added = []

    def drop(self) -> None:
        """See `Peers.drop`."""
        self._added = []

    def reduced(self, totals: list[Any], pieces: Sequence[Piece], contribution: float) -> list[Any]:
        """See `Peers.reduced`: they are, since `join`."""
        assert not self._added, "join first"
        return totals

    def whole(self, parts: Sequence[Any], pieces: Sequence[Piece], layout: Layout) -> list[Any]:
        """See `Peers.whole`: one tensor after the other."""
        found = []
        for part, entry, first in zip(parts, layout.entries, layout.rows(0, self.world_size), strict=True):
            tensor = processes.as_tensor(part)
            own = tensor.new_zeros(first.stop)
            own[: len(tensor)] = tensor
            every = own.new_empty(first.stop * self.world_size)
            with self._lost():
                if first.stop:
                    processes.all_gather(every, own, self._group)
            found.append(_like(every, part)[: entry.size])
        return found

    def agree(self, failed: bool, state: str = "", settings: str = "") -> None:
        """See `Peers.agree`; a process that failed tells nobody, since the others may wait for another message."""
        if failed:
            self._begun = True
            return
        told = [self._order.digest(), *(hashlib.sha256(text.encode()).digest() for text in (state, settings))]
        own = torch.frombuffer(bytearray(b"".join(told)), dtype=torch.int64).to(self._sum.device)
        found = own.new_empty(len(own) * self.world_size)
        with super()._lost():
            processes.all_gather(found, own, self._group)
        every = found.view(self.world_size, 3, -1)
        if any(not torch.equal(order, every[self.rank, 0]) for order in every[:, 0]):
            raise PrivacyError(
                "processes ran the layers of the sharded model in different orders: no rank releases the step; every "
                "batch must take the same way through a model of fully_shard"
            )
        self._begun = False
        processes.check_rows(every[:, 1:].transpose(0, 1))

    @contextmanager
    def _lost(self) -> Iterator[None]:
        if self._begun:
            raise PrivacyError(
                f"rank {self.rank} left a step of a sharded model midway, so that its messages no longer fit those of "
                "the others; nothing of the step is released: start all processes again from the last checkpoint"
            )
        with super()._lost():
            yield


def _like(tensor: torch.Tensor, array: Any) -> Any:
    return tensor if isinstance(array, torch.Tensor) else tensor.numpy()
