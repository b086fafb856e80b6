"""How many examples to differentiate at once under a stated memory cap: speed and memory, never the mechanism.

Estimate for one example: its gradient rows at every point of the query, the combination of the points, and one row of
working space for the clip and the sum; and twice what autograd saves for its backward pass (the saved values and the
gradients that replace them), measured on synthetic input.
"""

from __future__ import annotations

import re

import torch
from torch.autograd.graph import saved_tensors_hooks

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec import validate
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.randomness import TRIAL, seeded

DEFAULT_MAX_MEMORY = "1 GiB"

CPU_GRADIENT_BYTES = 32 * 2**20
"""On a CPU the gradients of a micro-batch at one point stay below this: beyond it glibc maps and unmaps each tensor
anew, and page faults cost more than larger micro-batches save."""

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_memory(max_memory: int | str) -> int:
    """Return a memory size in bytes, from a number of bytes or a text such as ``"1 GiB"`` or ``"512 MB"``."""
    if isinstance(max_memory, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", max_memory)
        if match is None or match[2].upper() not in _UNITS:
            raise ArgumentError(f"max_memory={max_memory!r}: must be bytes or a text such as '1 GiB' or '512 MB'")
        return validate.integer(minimum=1, max_memory=round(float(match[1]) * _UNITS[match[2].upper()]))
    if isinstance(max_memory, float):
        raise ArgumentTypeError(f"max_memory={max_memory!r}: must be whole bytes or a text such as '1 GiB'")
    return validate.integer(minimum=1, max_memory=max_memory)


def activation_bytes(model: torch.nn.Module, example: Tree) -> int:
    """Return the bytes that autograd saves for the backward pass of one example.

    Parameters
    ----------
    model : torch.nn.Module
        Run once in evaluation of `example`, with gradients; its parameters are not counted.
    example : tree of torch.Tensor
        Inputs of a batch of one (synthetic).
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    buffers = {name: b.clone() for name, b in model.named_buffers()}
    device = next(model.parameters()).device
    with saved_tensors_hooks(pack, lambda tensor: tensor), seeded(device, TRIAL):
        batches.call(lambda *a, **k: torch.func.functional_call(model, buffers, a, k), example)
    return sum(saved.values())


def microbatch_size(
    max_memory: int | str, parameters: int, itemsize: int, points: int, activations: int, device: torch.device
) -> int:
    """Return the number of examples to differentiate at once, at least 1.

    Parameters
    ----------
    max_memory : int or str
        Bytes, or a text such as ``"1 GiB"``; the cap on what the per-example gradients and activations take.
    parameters : int
        Entries of one gradient row.
    itemsize : int
        Bytes of an entry of a row.
    points : int
        Parameter points of the query.
    activations : int
        Bytes that autograd saves for one example.
    device : torch.device
    """
    row = parameters * itemsize
    rows = points + (1 if points > 1 else 0) + 1
    size = parse_memory(max_memory) // max(rows * row + 2 * activations, 1)
    if device.type == "cpu":
        size = min(size, CPU_GRADIENT_BYTES // max(row, 1))
    return max(size, 1)
