"""Parameter groups: their permitted settings, and the update settings that each step reads from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.spec import validate
from dpcore.spec.ops import UpdateSettings
from dpcore.stages.updates import Update

# fmt: off
PRIVACY_SETTINGS = frozenset({
    "max_grad_norm", "noise_multiplier", "clipping", "clipping_groups", "batch_size", "expected_batch_size",
    "sample_rate", "target_epsilon", "target_delta", "kappa", "gamma", "filter", "strategy", "window", "beta", "decay",
    "scale_eps", "max_scaled_norm", "unscaled_steps", "scaled_steps", "second_moment", "denominator", "bias_corrected",
    "joint_scale", "allow_nonprivate", "variant", "schedule", "averaging", "galore", "radius"
})
# fmt: on
"""Settings of the whole run. A group with its own value would silently change an example's effect on the sum, or what
the sum becomes."""


def defaults(update: Update) -> dict[str, Any]:
    """Return the settings of an update under torch's names, as a group's defaults."""
    numbers = update.settings()
    own: dict[str, Any] = {"lr": numbers.learning_rate}
    if update.rule != "accelerated":
        own["weight_decay"] = numbers.weight_decay
    if update.rule in ("momentum", "nesterov"):
        own["momentum"] = numbers.beta1
    elif update.rule in ("adam", "adamw"):
        own |= {"betas": (numbers.beta1, numbers.beta2), "eps": numbers.eps}
    elif update.rule == "adagrad":
        own["eps"] = numbers.eps
    return own


def check_keys(group: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse settings of a new group that belong to the whole run or are unknown to the update."""
    refuse_privacy_settings(group)
    for key in group:
        if key not in ("params", "param_names"):
            validate.choice((*known, "params"), **{"setting of a parameter group": key})


def refuse_privacy_settings(group: Mapping[str, Any]) -> None:
    """Refuse a group that carries a privacy setting."""
    names = sorted(PRIVACY_SETTINGS.intersection(group))
    if names:
        raise PrivacyError(
            f"{names[0]}={group[names[0]]!r} in a parameter group: it is a setting of the method for the whole run "
            "(use clipping_groups for clip norms by layer); groups have learning rate, weight decay, betas and eps"
        )


def settings(group: Mapping[str, Any], update: Update) -> UpdateSettings:
    """Return a group's present settings, checked: schedulers and users may have changed them since the last step.

    They do not include the factor of the method's own schedule: the mechanism multiplies every group's rate by it.
    """
    refuse_privacy_settings(group)
    numbers = {"learning_rate": validate.non_negative(lr=_float(group["lr"]))}
    if update.rule != "accelerated":
        numbers["weight_decay"] = validate.non_negative(weight_decay=_float(group["weight_decay"]))
    if update.rule in ("momentum", "nesterov"):
        numbers["beta1"] = validate.decay(momentum=_float(group["momentum"]))
    elif update.rule in ("adam", "adamw"):
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ArgumentError(f"betas={betas!r}: must be two numbers, the decays of the first and second moment")
        numbers["beta1"] = validate.decay(beta1=_float(betas[0]))
        numbers["beta2"] = validate.decay(beta2=_float(betas[1]))
        numbers["eps"] = validate.positive(eps=_float(group["eps"]))
    elif update.rule == "adagrad":
        least = validate.positive if getattr(update, "denominator", "") == "floored" else validate.non_negative
        numbers["eps"] = least(eps=_float(group["eps"]))
    return UpdateSettings(**numbers)


def as_groups(params: Any) -> list[dict[str, Any]]:
    """Return the `params` of a torch optimizer (tensors, or dicts with "params") as a list of new dicts."""
    items = list(params)
    if not items:
        raise ArgumentError("params=[]: must be parameters, or groups of them as dicts with 'params'")
    if not isinstance(items[0], Mapping):
        return [{"params": items}]
    groups = []
    for item in items:
        if not isinstance(item, Mapping) or "params" not in item:
            raise ArgumentTypeError("params: every group must be a dict with 'params'")
        groups.append(dict(item))
    return groups


def _float(value: Any) -> Any:
    """Unwrap the one-element tensors that torch accepts as learning rates."""
    return value.item() if hasattr(value, "item") else value


def matched(
    param_groups: Sequence[Mapping[str, Any]], names: Sequence[str], parameters: Sequence[torch.nn.Parameter]
) -> list[int]:
    """Return the group of each trained parameter; refuse groups that lack one, or that have others."""
    index = {id(p): number for number, group in enumerate(param_groups) for p in group["params"]}
    for name, parameter in zip(names, parameters, strict=True):
        if id(parameter) not in index:
            raise ArgumentError(
                f"parameter {name!r} requires gradients but is in no group: add it to one, or call "
                "requires_grad_(False) on it"
            )
    if others := len(index) - len({id(parameter) for parameter in parameters}):
        raise ArgumentError(f"params: {others} do not belong to the model or do not require gradients: leave them out")
    return [index[id(parameter)] for parameter in parameters]
