"""Replaces the modules of a model that are refused by class and settings (`check_module`), and says what that changes.

A proof that the result keeps examples apart is still made by `dpcore.torch.make_private`, as of every model.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from dpcore.errors import ArgumentError
from dpcore.torch.doctor.finding import Finding, Findings, of_error, ok, remark
from dpcore.torch.model.check_module import groups_of, is_frozen, refusals
from dpcore.torch.model.functional import first_line, refusal
from dpcore.torch.peers import check_plain


def fix(model: nn.Module) -> tuple[nn.Module, Findings]:
    """Return a copy of a model in which modules that are refused are replaced, and what that changes.

    BatchNorm and SyncBatchNorm become GroupNorm with their weights and biases, unless they are frozen. InstanceNorm
    loses its running statistics, and an embedding `max_norm`, `sparse` and `scale_grad_by_freq`. What is shared stays
    shared; hooks, devices, dtypes, modes and ``requires_grad`` stay.

    Parameters
    ----------
    model : torch.nn.Module
        It is not changed.

    Returns
    -------
    model : torch.nn.Module
        A copy, with parameters of its own.
    findings : Findings
        A *remark* for each replacement, and a *fault* for each module that is still refused, such as a subclass of
        BatchNorm with a ``forward`` of its own. Without a fault `make_private` may still refuse an operation of the
        model or its state: `dpcore.torch.doctor` examines all of it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        If `model` is no module, is wrapped by torch's data parallelism, or cannot be copied.
    """
    check_plain(model)
    # In the copy, what stands here for a module is in all of its places: lists and hooks may refer to it, too.
    replaced = {module: _group_norm(module) for module in model.modules() if _is_batch_norm(module)}
    memo: dict[int, Any] = {id(module): made for module, made in replaced.items()}
    try:
        for module, made in replaced.items():
            _take_over(made, module, memo)
        fixed: nn.Module = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, ValueError) as cause:
        raise ArgumentError(f"model: must be a model that copy.deepcopy can copy ({first_line(cause)})") from None
    findings = Findings(
        _finding(name, module, *_of_batch_norm(module, replaced[module]))
        for name, module in model.named_modules()
        if module in replaced
    )
    for name, module in fixed.named_modules():
        findings += [_finding(name, module, *change) for change in _mended(module)]
    if findings:
        sentence = "all parameters are new: an optimizer or scheduler made before has those of the old model."
        findings.append(remark(sentence, "make it for the model that fix returned", "optimizer"))
    sound = ok("no module is left that is refused for its kind.")
    findings += [of_error(error) for error in refusals(fixed)] or [sound]
    return fixed, Findings(replace(each, name=each.name or "layers") for each in findings)


def _finding(name: str, module: nn.Module, change: str, remedy: str) -> Finding:
    return replace(of_error(ArgumentError(refusal(name, module, change, remedy))), status="remark")


def _is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is refused as BatchNorm and does nothing more: a subclass may, and so may a parametrization."""
    plain = type(module).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and not module._modules
    return isinstance(module, _BatchNorm) and plain and not is_frozen(module) and module.num_features > 0


def _group_norm(norm: Any) -> nn.GroupNorm:
    return nn.GroupNorm(groups_of(norm), norm.num_features, norm.eps, affine=False)


def _take_over(made: nn.GroupNorm, norm: Any, memo: dict[int, Any]) -> None:
    """Give a GroupNorm the copies of the weight, bias, mode and hooks of the BatchNorm that it stands for."""
    names = ("affine", "weight", "bias", "training", *(name for name in vars(norm) if "hook" in name))
    for name, value in copy.deepcopy({name: getattr(norm, name) for name in names}, memo).items():
        setattr(made, name, value)


def _of_batch_norm(norm: Any, made: nn.GroupNorm) -> tuple[str, str]:
    groups, channels = made.num_groups, made.num_channels
    change = (
        f"mixed the examples of a batch and is now GroupNorm({groups}, {channels}), which normalizes each example by "
        "itself, in training and evaluation alike; its running statistics are gone"
    )
    remedy = "train it further, since a pretrained model answers otherwise now"
    if channels <= 2 and isinstance(norm, nn.BatchNorm1d):
        return change, "take it out if its inputs have no positions: of one or two values it leaves at most their order"
    return change, remedy


def _mended(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Change the settings of a module that are refused, and yield what that means."""
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        change = "kept running statistics of private examples, and now normalizes by the example in evaluation, too"
        yield change, "train it further, since a pretrained model answers otherwise now"
    if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return
    if module.max_norm is not None:
        with torch.no_grad():
            module.weight.copy_(torch.renorm(module.weight, module.norm_type, 0, module.max_norm))
        change = f"rescaled its weights in forward to max_norm={module.max_norm}; done once here, and now they are free"
        module.max_norm = None
        yield change, "let weight decay, or the method's radius, hold them"
    if module.sparse:
        module.sparse = False
        yield "made sparse gradients, whose pattern is private", "give its gradients as much memory as its weights"
    if module.scale_grad_by_freq:
        module.scale_grad_by_freq = False
        yield "scaled gradients by counts over the batch", "let clipping weigh frequent ids"
