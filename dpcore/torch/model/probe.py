"""A trial of the model on synthetic examples that shows whether they mix.

The model runs on a batch of three synthetic examples and again with the second one replaced, once by other values and
once by NaN (which any arithmetic carries along, however small its weight). The others' outputs must stay the same. All
runs start from the same generator state, so dropout draws the same masks; the user's generators are put back. Forward
hooks, removed afterwards, name the first module that takes unchanged other examples and returns changed ones: inner
modules return before the ones that contain them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from dpcore.errors import ArgumentError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.functional import FAILURES, State, Values, call_with, check_versions, first_line, refusal
from dpcore.torch.randomness import TRIAL, seeded

EXAMPLES = 3
TOLERANCE = 1e-3
"""Relative to the largest entry: loose, since bfloat16 runs may be tiled anew; NaN finds what is smaller."""

Calls = list[tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]]
"""The modules in the order in which they returned, with copies of their inputs and outputs."""


def probe(values: Values, example: Tree) -> None:
    """Refuse a model that mixes examples or changes its buffers or parameters in forward, naming the first module.

    It runs on copies of its parameters and buffers; of its inputs `example` only shapes, dtypes and devices are read,
    unless they are `dpcore.torch.data.batches.Public`.
    """
    first = batches.synthetic(example, EXAMPLES, seed=0)
    _run(values, first)  # what is filled once is filled for all
    base = _run(values, first)
    _compare(values, base, replaced(first, batches.synthetic(example, EXAMPLES, seed=1)), is_poison=False)
    _compare(values, base, replaced(first, poisoned(batches.another(example, EXAMPLES))), is_poison=True)


def _run(values: Values, inputs: Tree) -> Calls:
    with values.copies() as state:
        return _called(values.model, state, inputs)


def _called(model: nn.Module, state: State, inputs: Tree) -> Calls:
    calls: Calls = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ins = [t.detach().clone() for t in batches.leaves((args, kwargs))]
        calls.append((module, ins, [t.detach().clone() for t in batches.leaves(output)]))

    versions = {name: tensor._version for name, tensor in state.items()}
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())  # as in training
        stack.enter_context(seeded(next(model.parameters()).device, TRIAL))
        for module in model.modules():
            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        try:
            call_with(model, state, batches.tree_map(torch.clone, inputs))
        except ArgumentError:
            raise
        except FAILURES as cause:
            raise ArgumentError(
                f"model={type(model).__name__}: failed on synthetic inputs of the data's shape and dtype "
                f"({first_line(cause)}); check the model and the data against each other"
            ) from cause
    check_versions(model, state, versions)
    return calls


def _compare(values: Values, base: Calls, changed: Tree, is_poison: bool) -> None:
    model = values.model
    try:
        now = _run(values, changed)
    except ArgumentError:
        if is_poison:  # a model may check its inputs; the trial with other finite values stands
            return
        raise
    if _same(base[-1][2], now[-1][2]):
        return
    names = {module: name for name, module in model.named_modules()}
    culprit = model
    for (module, ins, outs), (_, ins_now, outs_now) in zip(base, now, strict=False):
        if _same(ins, ins_now) and not _same(outs, outs_now):
            culprit = module
            break
    remedy = "use a layer that treats each example alone (GroupNorm or LayerNorm for normalization)"
    if getattr(culprit, "batch_first", True) is False:
        remedy = "set batch_first=True, or transpose what goes in"
    raise ArgumentError(refusal(names[culprit], culprit, "mixes the examples of a batch", remedy))


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether the first and the last example are the same in all tensors whose first dimension is the examples."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if a.shape != b.shape:
            return False
        if a.dim() == 0 or a.shape[0] % EXAMPLES or not a.numel():
            continue
        rows = a.shape[0] // EXAMPLES  # a layer may fold further dimensions into the first one
        x, y = (torch.cat([t[:rows], t[-rows:]]) for t in (a, b))
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return False
            continue
        scale = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0
        if not torch.allclose(x, y, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True):
            return False
    return True


def replaced(tree: Tree, source: Tree) -> Tree:
    """Return the tree with its second example taken from `source`."""
    donors = iter(batches.leaves(source))

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        result[1] = next(donors)[1]
        return result

    return batches.tree_map(changed, tree)


def poisoned(tree: Tree) -> Tree:
    """Return the batch full of what arithmetic carries along."""
    return batches.tree_map(_poison, tree)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """NaN; integers, which have none, stay the other values that they are."""
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor
