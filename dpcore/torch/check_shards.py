"""Refusal of sharded models, and of runs of them, that are not taken yet; each by one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import Shard

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.layout import Layout
from dpcore.stages.method import Method
from dpcore.torch.gradients.sharded import groups_of, sharded_modules
from dpcore.torch.model.functional import local


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
