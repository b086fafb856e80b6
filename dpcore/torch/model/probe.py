"""A trial of the model on synthetic examples: whether they mix, and whether forward leaves traces in the model.

The model runs on a batch of three synthetic examples and again with the second one replaced, once by other values and
once by NaN (which any arithmetic carries along, however small its weight). Example 0's output must stay the same. All
runs start from the same generator state, so dropout draws the same masks; the user's generators are put back. Forward
hooks, removed afterwards, name the first module that takes an unchanged example 0 and returns a changed one: inner
modules return before the ones that contain them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from dpcore.errors import ArgumentError
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.leftovers import check_same, held
from dpcore.torch.model.per_example import first_line
from dpcore.torch.randomness import TRIAL, seeded

EXAMPLES = 3
TOLERANCE = 1e-3
"""Relative to the largest entry: loose, since bfloat16 runs may be tiled anew; NaN finds what is smaller."""


def probe(model: nn.Module, example: Tree, keep_mode: tuple[nn.Module, ...] = ()) -> bool:
    """Refuse a model whose examples mix or whose forward pass changes its buffers or parameters.

    Parameters
    ----------
    model : torch.nn.Module
        Left as it is: it runs on copies of its buffers, in training mode and in the mode it is in.
    example : tree of torch.Tensor
        The model's inputs; only shapes, dtypes and devices are read.
    keep_mode : tuple of torch.nn.Module
        Modules that stay in the mode they are in.

    Returns
    -------
    bool
        Whether forward draws random numbers by torch, in one of the modes.

    Raises
    ------
    ArgumentError
        Names the first module that mixes, that changes a buffer, or that keeps values of examples.
    """
    first = batches.synthetic(example, EXAMPLES, seed=0)
    other = _replace_row(first, batches.synthetic(example, EXAMPLES, seed=1))
    poisoned = _replace_row(first, batches.tree_map(_poison, first))
    unlike = batches.tree_map(_unlike, first)
    draws = False
    with _modes_restored(model):
        already_training = model.training
        for training in (True,) if already_training else (False, True):
            for module in model.modules():
                if module not in keep_mode:
                    module.training = training  # not train(): a model may override it to keep parts frozen
            base = _run(model, first)
            draws = draws or base.draws
            kept = held(model)
            _run(model, unlike)
            check_same(model, kept, held(model))
            for changed, values in ((other, False), (poisoned, True)):
                _compare(model, base, changed, is_poison=values)
    return draws


class _Trace:
    """The order in which modules returned, with their first inputs and outputs; whether random numbers were drawn."""

    def __init__(self) -> None:
        self.draws = False
        self.calls: list[tuple[nn.Module, list[torch.Tensor], list[torch.Tensor]]] = []

    def hook(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        ins = [t.detach().clone() for t in _tensors((args, kwargs))]
        self.calls.append((module, ins, [t.detach().clone() for t in _tensors(output)]))


def _run(model: nn.Module, inputs: Tree) -> _Trace:
    trace = _Trace()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    state = {**parameters, **buffers}
    before = {name: (id(value), value._version) for name, value in state.items()}
    inputs = batches.tree_map(lambda tensor: tensor, inputs)
    device = next(iter(parameters.values())).device
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        drew = stack.enter_context(seeded(device, TRIAL))
        for module in model.modules():
            stack.callback(module.register_forward_hook(trace.hook, with_kwargs=True).remove)
        try:
            batches.call(lambda *a, **k: functional_call(model, state, a, k), inputs)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as cause:
            raise ArgumentError(
                f"model={type(model).__name__}: failed on synthetic inputs of the data's shape and dtype "
                f"({first_line(cause)}); check the model and the data against each other"
            ) from cause
        trace.draws = drew()
    owners = dict(model.named_modules())
    for name, value in state.items():
        if (id(value), value._version) != before[name]:
            owner, _, key = name.rpartition(".")
            fault = f"changes its {'buffer' if name in buffers else 'parameter'} {key!r} in forward"
            remedy = "keep statistics of private examples out of the model, or put the module in eval() and freeze it"
            raise ArgumentError(refusal(owner, owners[owner], fault, remedy))
    return trace


def _compare(model: nn.Module, base: _Trace, changed: Tree, is_poison: bool) -> None:
    try:
        trace = _run(model, changed)
    except ArgumentError:
        if is_poison:  # a model may check its inputs; the trial with other finite values stands
            return
        raise
    if _same(base.calls[-1][2], trace.calls[-1][2]):
        return
    names = {module: name for name, module in model.named_modules()}
    culprit = model
    for (module, ins, outs), (_, ins_now, outs_now) in zip(base.calls, trace.calls, strict=False):
        if _same(ins, ins_now) and not _same(outs, outs_now):
            culprit = module
            break
    remedy = "use a layer that treats each example alone (GroupNorm or LayerNorm for normalization)"
    raise ArgumentError(refusal(names[culprit], culprit, "mixes the examples of a batch", remedy))


def _same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether example 0 is the same in all tensors whose first dimension is the examples."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
        if a.shape != b.shape:
            return False
        if a.dim() == 0 or a.shape[0] % EXAMPLES or not a.numel():
            continue
        rows = a.shape[0] // EXAMPLES  # a layer may fold further dimensions into the first one
        x, y = a[:rows], b[:rows]
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return False
            continue
        scale = x[x.isfinite()].abs().max().item() if x.isfinite().any() else 0.0
        if not torch.allclose(x, y, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True):
            return False
    return True


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _tensors(value)


def _replace_row(tree: Tree, source: Tree) -> Tree:
    """Return the tree with its second example taken from `source`."""
    donors = iter(batches.leaves(source))

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        result[1] = next(donors)[1]
        return result

    return batches.tree_map(replaced, tree)


def _unlike(tensor: torch.Tensor) -> torch.Tensor:
    """Other values in every entry, of the same range: integers take the other of the two synthetic values."""
    return tensor + 1 if tensor.is_floating_point() else (tensor == 0).to(tensor.dtype)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """NaN; integers, which have none, take the other of the two synthetic values."""
    return torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else (tensor == 0).to(tensor.dtype)


def refusal(name: str, module: nn.Module, fault: str, remedy: str) -> str:
    """Return the one sentence of a refusal: the module's qualified name, its class, the fault and the remedy."""
    where = f"module {name!r}" if name else "the model itself"
    return f"{where} ({type(module).__name__}) {fault}: {remedy}"


@contextmanager
def _modes_restored(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
