"""Chooses the way in which a model's gradients are found, and refuses the model where there is none.

Nothing is tried where there is a proof. Where there is none, model and loss see batches of one, by "vmap" or "one-by-one",
so that the examples stay apart by construction, unless Python code keeps something of one for the next. That is tried.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from dpcore.errors import ArgumentError, SpeedWarning
from dpcore.torch.data.batches import Tree, trial_batch
from dpcore.torch.gradients.capture import uncollected
from dpcore.torch.gradients.check_loss import Calls
from dpcore.torch.gradients.errors import Mixes, NotProved
from dpcore.torch.gradients.per_example import WAYS, PerExampleGradient, Unfit
from dpcore.torch.model.state_probe import Snapshot, keeps
from dpcore.torch.reachable import walk


@uncollected()
def try_out(gradient: PerExampleGradient, example: Tree, frozen: tuple[nn.Module, ...] = (), way: str = "auto") -> None:
    """Take the fastest way that this model bears, or the one that is asked for; refuse the model where there is none.

    Of the batch `example` only shapes, dtypes and devices are read, unless it is `batches.Public`. The model is looked at
    in training mode and, last, in the mode it is in, but for `frozen` modules. It is left as it was.
    """
    gradient.example = example
    check_hooks(gradient.model)
    check_registered(gradient.model, gradient.passed_over)
    start = gradient.held()
    try:
        if way in ("auto", "pairs"):
            try:
                prove(gradient, example, frozen)
                return
            except NotProved as reason:
                gradient.reasons["pairs"] = reason.sentence(gradient.model)
                if way == "pairs" or isinstance(reason, Mixes):
                    raise ArgumentError(gradient.reasons["pairs"]) from None
            start.restore()
        try:
            # Every model that can be trained at all bears the last way, which says best what is wrong.
            for candidate in (WAYS[-1], *(["vmap"] if way in ("auto", "vmap") else [])):
                gradient.way = candidate
                for _ in modes(gradient.model, frozen):
                    try_state(gradient, example)
        except Unfit as refusal:
            if way == "vmap" or gradient.way == WAYS[-1]:
                raise ArgumentError(str(refusal)) from refusal.__cause__
            gradient.way, gradient.reasons["vmap"] = WAYS[-1], str(refusal)
    finally:
        start.restore()


def prove(gradient: PerExampleGradient, example: Tree, frozen: tuple[nn.Module, ...] = ()) -> None:
    """Capture the model in all modes, and let it run by graphs that are proved to keep the examples apart.

    Raises
    ------
    NotProved
        If there is no proof, with the operation and the line of code.
    ArgumentError
        If the model writes to what it holds, keeps anything, or gives no gradient.
    """
    proved, gradient.way = gradient.proved, "pairs"
    for _ in modes(gradient.model, frozen):
        gradient.classes = proved.prove(example).classes
    gradient.draws = gradient.draws or proved.draws
    if not gradient.free:
        return
    made = trial_batch(example, 2)
    try:
        blocks = gradient(gradient.parameters(), made, synthetic=True)
    except Unfit as refusal:
        if not proved.compiled:
            raise
        proved.compiled = False
        proved.forget()
        blocks = gradient(gradient.parameters(), made, synthetic=True)
        warnings.warn(
            f"compile: not done, and the run goes on without ({refusal.__cause__})", SpeedWarning, stacklevel=2
        )
    # The smallest first: rows of a table for each example are many.
    if proved.changes_state or not any(b.rows().any() for b in sorted(blocks, key=lambda b: math.prod(b.shape))):
        # Caches are filled once, which is no fault: the model's own code says what is one.
        gradient.way = WAYS[-1]
        try_state(gradient, example)
        gradient.way = "pairs"


def modes(model: nn.Module, frozen: tuple[nn.Module, ...]) -> Iterator[None]:
    """Put a model into training mode and then into the one that it is in, which parts of it may not share."""
    if not model.training:
        kept = [(module, module.training) for module in model.modules()]
        for module, _ in kept:
            if module not in frozen:
                module.training = True  # not train(): a model may override it to keep parts frozen
        try:
            yield
        finally:
            for module, training in kept:
                module.training = training
    yield


def check_hooks(model: nn.Module) -> None:
    """Refuse hooks on parameters' gradients, which a private run does not form."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ArgumentError(
                f"parameter {name!r} has a hook on its gradient, which a private run does not form: remove the hook, "
                "and change gradients inside of the model"
            )


def check_registered(model: nn.Module, passed_over: Sequence[Any]) -> None:
    """Refuse trained tensors that the model holds, say in a list of layers, and does not know as its parameters."""
    for path, value, first in walk({"model": model}, [*model.parameters(), *passed_over]):
        if isinstance(value, torch.Tensor) and not first and value.requires_grad and value.is_leaf:
            raise ArgumentError(
                f"{path} requires gradients and is not registered as a parameter of the model, so that it would not be "
                "trained: hold modules in torch.nn.ModuleList or ModuleDict and tensors as torch.nn.Parameter, or call "
                "requires_grad_(False)"
            )


def try_state(gradient: PerExampleGradient, example: Tree) -> None:
    """Differentiate unlike examples, from the same start and one after the other: all must leave the same.

    What is filled once, from shapes alone, does. It must not tell the first example from later ones, either.
    """
    whole = Snapshot(gradient.roots, gradient.passed_over)  # with parameters: here the model's own code runs
    try:
        _compare(gradient, example)
    finally:
        whole.restore()


def _compare(gradient: PerExampleGradient, example: Tree) -> None:
    point = [parameter.clone() for parameter in gradient.parameters()]
    one = trial_batch(example, 1)
    start = gradient.held()
    with Calls():
        first = gradient(point, one, synthetic=True)
    left = gradient.held()
    start.restore()
    try:
        others = gradient(point, trial_batch(example, 3, other=True, label=1), synthetic=True)
    except ArgumentError:  # 1 may be no label of this loss; all else comes up again
        others = gradient(point, trial_batch(example, 3, other=True), synthetic=True)
    if not any(block.rows().any() for block in (*first, *others)):
        raise ArgumentError(
            "loss whose gradient is 0 in all parameters, for four made-up examples, so that a run would spend its "
            "epsilon on noise alone: forward must neither detach nor run under no_grad, the loss must have a gradient, "
            "and say something of one example alone, as a contrast within a batch does not; if made-up values are the "
            "reason, give example_batch="
        )
    by_others = gradient.held()
    later = gradient(point, one, synthetic=True)
    path = left.changed(by_others) or by_others.changed(gradient.held())
    if path is not None:
        raise ArgumentError(keeps(path))
    for name, now, once in zip(gradient.names, later, first, strict=True):
        then, before = now.rows(), once.rows()
        largest = before.nan_to_num(0, 0, 0).abs().max().item()
        if not torch.allclose(then, before, rtol=1e-3, atol=1e-3 * largest, equal_nan=True):
            told = "depends on whether others came before it; model and loss must not tell the first from later ones"
            raise ArgumentError(f"gradient of {name!r} of one example: {told}")
