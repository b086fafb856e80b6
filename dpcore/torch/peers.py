"""Which processes train a model, and what follows of it for how its gradients are found."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.mechanism.peers import Alone, Peers
from dpcore.stages.method import Method
from dpcore.torch.gradients.per_example import Loss, PerExampleGradient
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
        from dpcore.torch.check_shards import check_shards
        from dpcore.torch.shards import Sharded

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
    from dpcore.torch.shards import Sharded

    assert isinstance(peers, Sharded)
    return ShardedGradient(model, loss, peers.note)


def way_of(peers: Peers, method: Method, gradients: str) -> str:
    """Return the way that gradients are found, which was asked for; of a sharded model there is one."""
    if not peers.shards:
        return gradients
    from dpcore.torch.check_shards import check_run_of_shards

    return check_run_of_shards(method, gradients)
