"""Holds the way "pairs" to one-by-one autograd, on made-up examples, before any real one is seen.

A batched forward pass can mix examples where a batch of one cannot, and a rule can be wrong for a model that nobody
thought of. So for three unlike examples each one's gradient must be what autograd gives for it alone, and must stay the
same, up to rounding, when another example is replaced: by other values, and by NaN, which any arithmetic carries along.
Where its inputs are integers, what is looked up for it becomes NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from dpcore.stages.clipping.blocks import Block
from dpcore.torch.data import batches
from dpcore.torch.data.batches import Tree
from dpcore.torch.model.made_up import trial_batch
from dpcore.torch.model.per_example import PerExampleGradient, Unfit
from dpcore.torch.model.probe import EXAMPLES, poisoned, replaced
from dpcore.torch.randomness import TRIAL

TOLERANCE = 1e-3
"""Of the norm of one tensor's gradient; `LOW` where the model computes in 16 bits."""
LOW = 5e-2


def learn_and_check(gradient: PerExampleGradient, example: Tree, keep: bool = False) -> None:
    """Let the way "pairs" learn the model in its present mode, and refuse it where it differs from autograd.

    With `keep`, what was learned in another mode stays known.
    """
    gradient.learn(lambda count: trial_batch(example, count), keep)
    point, batch = gradient.parameters(), trial_batch(example, EXAMPLES)
    draws, gradient.draws = gradient.draws, False
    blocks = gradient(point, batch, synthetic=True)
    random, gradient.draws = gradient.draws, gradient.draws or draws
    tolerance = LOW if gradient.traced.low_precision else TOLERANCE
    if not random:  # else a batch of one gets another mask than the same example in a batch
        alone = gradient.explicit["one-by-one"].one_by_one(point, batch)
        for i in range(EXAMPLES):  # one after the other: each takes as much memory as the parameters
            wanted = gradient.guarded(lambda: next(alone), TRIAL, synthetic=True)
            _compare(gradient, _rows(blocks, i), wanted, tolerance, "differs from what autograd gives for it alone")
            del wanted
    unlike = trial_batch(example, EXAMPLES, other=True)
    for other, is_poison in ((unlike, False), (poisoned(unlike), True)):
        try:
            with _NaNLookups() if is_poison else nullcontext():
                changed = gradient(point, _with_second(batch, other), synthetic=True)
        except Unfit:
            if is_poison:  # a model may check its inputs
                continue
            raise
        for i in (0, EXAMPLES - 1):
            _compare(gradient, _rows(changed, i), _rows(blocks, i), tolerance, "depends on another example")


class _NaNLookups(TorchFunctionMode):
    """Makes NaN of all that a table gives for the second example. Indices of one dimension are positions."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is F.embedding:
            indices = args[0] if args else kwargs["input"]
            if indices.dim() > 1 and len(indices) == EXAMPLES:
                result = result.index_fill(0, torch.tensor([1], device=result.device), float("nan"))
        return result


def _with_second(batch: Tree, other: Tree) -> Tree:
    """Return the batch with the second example's inputs taken from another one; its targets stay."""
    inputs, targets = batches.normalize(batch)
    inputs = replaced(inputs, batches.normalize(other)[0])
    return (inputs, *targets) if targets else inputs


def _rows(blocks: Sequence[Block], example: int) -> Iterator[torch.Tensor]:
    return (block.map(lambda t: t[example : example + 1]).rows()[0] for block in blocks)


def _compare(
    gradient: PerExampleGradient,
    found: Iterable[torch.Tensor],
    wanted: Iterable[torch.Tensor],
    tolerance: float,
    told: str,
) -> None:
    pairs = ((row.double(), other.reshape(-1).double()) for row, other in zip(found, wanted, strict=True))
    sizes = [((row - other).norm().item(), other.norm().item()) for row, other in pairs]
    whole = max((size for _, size in sizes), default=0.0)
    for name, (apart, size) in zip(gradient.names, sizes, strict=True):
        # What is tiny beside the whole gradient is rounding of what cancels.
        if not apart <= tolerance * max(size, 1e-3 * whole):
            raise Unfit(f"gradient of {name!r} of one example of a batch: {told}")
