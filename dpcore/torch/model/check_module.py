"""Refusal of models whose examples mix or whose forward pass changes the model, naming the module and the remedy.

The proof refuses a graph that mixes examples, and "one-by-one" shows the model one example at a time, so a mixing
module cannot break the guarantee. It is refused here with a better sentence: one-by-one would train it on batches of
one, and evaluation uses larger ones, which is another function; and running statistics of private examples would be
part of the model without noise.

Here modules are recognized by class and settings; `dpcore.torch.gradients.per_example.try_out` runs the model.
"""

import warnings
from collections.abc import Iterator
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from dpcore.errors import ArgumentError, ArgumentTypeError, DpcoreError, TrainingWarning
from dpcore.torch.model.functional import local, refusal
from dpcore.torch.model.joint import trained_parameters

TRAINED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes of parameters that can be trained."""


def check_module(model: nn.Module) -> tuple[nn.Module, ...]:
    """Refuse a model that cannot be trained example by example, naming module, class and remedy.

    Returns the frozen BatchNorm modules that were accepted; they must stay in eval mode (`check_still_frozen`).
    """
    for refused in chain(refusals(model), shared_memory(model)):
        raise refused
    return frozen_norms(model)


def frozen_norms(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the BatchNorm modules that neither train nor are trained, with statistics of their own."""
    return tuple(module for module in model.modules() if is_frozen(module))


def refusals(model: nn.Module) -> Iterator[DpcoreError]:
    """Yield the errors of `check_module` on single modules."""
    for name, module in model.named_modules():
        yield from _of_parameters(name, module)
        complaint = None if is_frozen(module) else _complaint(module)
        if complaint is not None:
            yield ArgumentError(refusal(name, module, *complaint))


def shared_memory(model: nn.Module) -> Iterator[DpcoreError]:
    """Yield an error for each two trained parameters that share memory and are not one."""
    spans = list[tuple[int, int, str]]()
    for name, parameter in trained_parameters(model).items():
        part = local(parameter)
        start = part.data_ptr() if part.numel() else 0
        stop = start + (part.nbytes if part.is_contiguous() else part.element_size())
        others = [other for first, last, other in spans if start and first < stop and start < last]
        if others:
            yield ArgumentError(
                f"parameters {others[0]!r} and {name!r} are two and share memory, so that each would get noise and "
                "steps of its own: assign the same nn.Parameter to both modules, or clone its values"
            )
        spans.append((start, stop, name))


def check_still_frozen(model: nn.Module, frozen: tuple[nn.Module, ...]) -> None:
    """Refuse a frozen BatchNorm that was put back into training mode after `check_module` accepted it."""
    if not any(module.training for module in frozen):
        return
    for name, module in model.named_modules():
        if module in frozen and module.training:
            fault = "was frozen and now is in training mode"
            raise ArgumentError(refusal(name, module, fault, "call its eval() again"))


def _complaint(module: nn.Module) -> tuple[str, str] | None:
    """Return (fault, remedy) for a module known to be unfit, by its class and settings."""
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled by torch.jit and cannot be followed", "pass the Python module it was made of"
    if isinstance(module, _BatchNorm):
        channels = module.num_features
        remedy = (
            f"use torch.nn.GroupNorm({groups_of(module)}, {channels}) or LayerNorm instead, or freeze it with eval(), "
            "requires_grad_(False) and running statistics from public data"
        )
        return "mixes the examples of a batch", remedy
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        return "keeps running statistics of private examples", "set track_running_stats=False, or use GroupNorm"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return "rescales its weights in forward", "set max_norm=None and rely on per-example clipping"
        if module.sparse:
            return "makes sparse gradients, whose pattern is private", "set sparse=False"
        if module.scale_grad_by_freq:
            return "scales gradients by counts over the batch", "set scale_grad_by_freq=False"
    return None


def is_frozen(module: nn.Module) -> bool:
    """Whether a module is BatchNorm that neither trains nor is trained, with statistics of its own."""
    evaluates = isinstance(module, _BatchNorm) and not module.training and module.running_mean is not None
    return evaluates and not any(p.requires_grad for p in module.parameters())


def groups_of(norm: _BatchNorm) -> int:
    """Return a number of groups, at most 32, that divides a BatchNorm's channels and leaves two or more in a group.

    It is 1 for BatchNorm1d, whose input may have no positions: of two values alone normalizing leaves two signs.
    """
    channels = 1 if isinstance(norm, nn.BatchNorm1d) else norm.num_features
    for groups in range(min(32, channels // 2), 1, -1):
        if channels % groups == 0:
            return groups
    return 1


def _of_parameters(name: str, module: nn.Module) -> Iterator[DpcoreError]:
    for key, parameter in module.named_parameters(recurse=False):
        full = f"{name}.{key}" if name else key
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            yield ArgumentError(f"parameter {full!r} is not initialized: run the model once on an input of its shape")
        elif parameter.requires_grad and parameter.dtype not in TRAINED:
            yield ArgumentTypeError(
                f"parameter {full!r} has dtype {parameter.dtype}: convert it to float32, float64, bfloat16 or float16 "
                "(complex values have no clip rule here)"
            )


class Modes:
    """The modes of a model's modules, looked at before every step."""

    def __init__(self, model: nn.Module, frozen: tuple[nn.Module, ...]) -> None:
        self._model, self._frozen = model, frozen
        self._dropping = [(name, module) for name, module in model.named_modules() if _drops(module)]
        self._warned = False

    def check(self) -> None:
        """Refuse frozen modules that train; warn once of a whole model in eval mode that has dropout."""
        check_still_frozen(self._model, self._frozen)
        if not self._warned and (sentence := self.off()) is not None:
            self._warned = True
            warnings.warn(f"{sentence}. Said once; the model is used as it is", TrainingWarning, stacklevel=3)

    def off(self) -> str | None:
        """Return a sentence if the whole model is in eval mode and has dropout.

        A model in training mode with some modules in eval mode is taken as intended.
        """
        off = [name for name, module in self._dropping if not module.training]
        if self._model.training or not off or len(off) < len(self._dropping):
            return None
        return (
            f"the model is in eval mode, so its dropout (module {off[0]!r}) is off in these steps; call model.train() "
            "before the steps, as after an evaluation"
        )


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values at random in training mode, according to torch's own classes."""
    chance = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(chance, float) and chance > 0
