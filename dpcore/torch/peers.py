"""The processes that train a model, the settings they must share, and their way to compute gradients."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.mechanism.peers import Peers
from dpcore.plan.plan import Plan
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.stages.method import Method
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.data.data import Data
from dpcore.torch.gradients.per_example import Loss, PerExampleGradient
from dpcore.torch.model.joint import JointLoss
from dpcore.torch.processes import Processes
from dpcore.torch.randomness import step_seed

_COMPARED = 64  # examples of a dataset


def peers_of(process_group: Any, model: nn.Module) -> Peers:
    """Return the processes of a group, by default the default group; if there is none, this process alone."""
    if process_group is not None and process_group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError("process_group: this process is no member of it; only its members call make_private")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"process_group={type(process_group).__name__!r}: must be a torch.distributed process group, or None"
        )
    if not dist.is_available() or not dist.is_initialized():
        return Peers()
    group = dist.group.WORLD if process_group is None else process_group
    _check_backend(dist.get_backend_config(group), next((p.device.type for p in model.parameters()), "cpu"))
    if is_sharded(model):
        from dpcore.torch.shards import Sharded, check_shards

        check_shards(model, group)
        return Sharded(group)
    return Peers() if dist.get_world_size(group) == 1 else Processes(group)


def _check_backend(config: str, device: str) -> None:
    """Refuse a group that cannot send tensors of a device; `config` is such as "cpu:gloo,cuda:nccl"."""
    backends = dict(part.split(":") for part in config.split(","))
    if device in backends and not (device == "cuda" and backends[device] == "gloo"):
        return
    wanted = {"cpu": "gloo", "cuda": "nccl"}.get(device, device)
    raise ArgumentError(
        f"process_group: its backend for the model's device {device!r} is {backends.get(device, 'none')}: must be "
        f'{wanted}, as init_process_group("{wanted}") makes it'
    )


def is_sharded(model: nn.Module) -> bool:
    """Whether this process has only parts of the model's parameters, as with fully_shard or tensor parallelism."""
    if any(hasattr(module, "_get_fsdp_state") for module in model.modules()):
        return True  # also while its parameters are gathered, as after a forward pass
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def gradient_of(
    model: nn.Module, loss: Loss, peers: Peers, method: Method, gradients: str
) -> tuple[PerExampleGradient, str]:
    """Return the object that computes a model's gradients, and its way: for a sharded model there is only one."""
    if not peers.shards:
        return PerExampleGradient(model, loss), gradients
    if isinstance(model, JointLoss):
        raise ArgumentError("model='JointLoss' of fully_shard models: is not supported; leave out fully_shard")
    from dpcore.torch.shards import Sharded, ShardedGradient, check_run_of_shards

    assert isinstance(peers, Sharded)
    way = check_run_of_shards(method, gradients)
    return ShardedGradient(model, loss, peers.note), way


def check_plain(model: nn.Module) -> None:
    """Refuse what is no model, and a model that torch's data parallelism wraps."""
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model={type(model).__name__!r}: must be a torch.nn.Module")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ArgumentError(
            f"model={type(model).__name__!r}: must be the model itself (model.module); each process clips its own "
            "examples, then dpcore adds the sums of all processes"
        )


def check_alone(peers: Peers, **settings: object) -> None:
    """Refuse settings that a run of several processes does not support yet."""
    for name in (name for name, given in settings.items() if given and peers.world_size > 1):
        raise ArgumentError(
            f"{name} in a run of {peers.world_size} processes: must be left out, or train in one process"
        )


def check_alike(
    peers: Peers, model: nn.Module, plan: Plan, layout: Layout, backend: str, data: Data, more: Mapping[str, Any]
) -> None:
    """Refuse processes that would not train the same model by the same plan, before any of them draws a batch."""
    if peers.world_size == 1:
        return
    settings = {
        "method": plan.method.describe(),
        "sampling": plan.sampler.describe(),
        "number of steps": plan.steps,
        "model (names and shapes of what is trained)": layout.to_list(),
        "backend": backend,
        "data (number of examples)": data.length,
        "augmentations": data.views,
        "num_workers": data.workers,
    }
    peers.check_alike({**settings, **more})
    values = {name: value for name, value in model.state_dict().items() if not hasattr(value, "to_local")}
    peers.check_alike({f"values of {name!r} in the model": value for name, value in values.items()})


def check_same_data(peers: Peers, data: Data, keys: RunKeys) -> None:
    """Refuse processes whose data differ in an example or in their order.

    Notes
    -----
    Shares are disjoint sets of *indices*. If an index means different examples in two processes, one example may be in
    two shares of a step and moves the sum by twice the clip norm. Tensors are compared as a whole. From a dataset, the
    run's key draws 64 examples to compare: two orders that differ in a share s of the places pass with probability
    (1 - s)^64. So any shuffled, sorted or shifted order is found, but two exchanged examples mostly are not. An example
    that reads differently at a second reading in one process cannot be compared.

    Digests are keyed by the run's key. With plain digests of private data, anybody who sees the messages could test a
    guess of the data.
    """
    if peers.world_size == 1:
        return
    secret = step_seed(keys, "comparison of data", 0)
    failure: Exception | None = None
    digests = dict[str, str]()
    try:
        digests |= {name: _digest(secret, tree) for name, tree in _examples(data, secret)}
    except Exception as cause:  # noqa: BLE001 - the others must learn of it before this one raises
        failure = cause
    total = hashlib.sha256(repr([*digests.items(), failure is not None]).encode()).hexdigest()
    try:
        peers.check_alike({"data (an example, or their order)": total})
    finally:
        if failure is not None:
            raise failure


def _examples(data: Data, secret: bytes) -> Iterator[tuple[str, Tree]]:
    if data.tensors is not None:
        yield "all", data.tensors
        return
    for number in range(min(_COMPARED, data.length)):
        draw = hmac.digest(secret, b"place %d" % number, "sha256")
        place = np.array([int.from_bytes(draw[:8], "big") % data.length])
        first, second = (data.batch(place, secret) for _ in range(2))
        if _digest(secret, first) == _digest(secret, second):
            yield str(number), first


def _digest(secret: bytes, tree: Tree) -> str:
    total = hmac.new(secret, digestmod="sha256")
    for tensor in batches.leaves(tree):
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + batches.content(tensor))
    return total.hexdigest()
