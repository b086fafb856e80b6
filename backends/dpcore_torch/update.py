"""The update stage: `dpcore_numpy.update` in torch's threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dpcore.spec.check import check_update
from dpcore.spec.ops import UpdateSettings


def update(
    rule: str,
    parameter: torch.Tensor,
    direction: torch.Tensor,
    moments: Sequence[torch.Tensor],
    settings: UpdateSettings,
    step_number: int,
    square: torch.Tensor | None = None,
) -> None:
    """See `dpcore.spec.ops.Backend.update`."""
    check_update(rule, parameter, direction, moments, step_number, square)
    move(rule, parameter, direction, moments, settings, step_number, square)


def move(
    rule: str,
    parameter: torch.Tensor,
    direction: torch.Tensor,
    moments: Sequence[torch.Tensor],
    settings: UpdateSettings,
    step_number: int,
    square: torch.Tensor | None,
) -> None:
    """Update without checks: `step` checks all tensors at once."""
    learning_rate, weight_decay, beta1, beta2, *_ = map(float, settings)
    x, g = parameter, direction
    if rule == "adamw":
        x.mul_(1 - learning_rate * weight_decay)
    elif weight_decay and rule != "accelerated":
        g = g + weight_decay * x

    if rule == "sgd":
        x.sub_(g, alpha=learning_rate)
    elif rule in ("momentum", "nesterov"):
        (m,) = moments
        m.mul_(beta1).add_(g)
        x.sub_(m if rule == "momentum" else torch.add(g, m, alpha=beta1), alpha=learning_rate)
    elif rule == "accelerated":
        z, y = moments
        z.sub_(g, alpha=learning_rate)
        torch.sub(x, g, alpha=learning_rate / settings.weight, out=y)
        torch.add((1 - settings.coupling) * y, settings.coupling * z, out=x)
    elif rule == "adagrad":
        (v,) = moments
        v.addcmul_(g, g) if square is None else v.add_(square)
        x.sub_(_quotient(g, v.clone(), settings), alpha=learning_rate)
    else:
        m, v = moments
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2)
        v.addcmul_(g, g, value=1 - beta2) if square is None else v.add_(square, alpha=1 - beta2)
        numerator = learning_rate / (1 - beta1**step_number) * m
        x.sub_(_quotient(numerator, v / (1 - beta2**step_number), settings))


def _quotient(numerator: torch.Tensor, u: torch.Tensor, settings: UpdateSettings) -> torch.Tensor:
    """See `dpcore_numpy.update._quotient`; overwrites `u`."""
    if settings.bias:
        u.sub_(settings.bias)
    u.clamp_(min=settings.floor**2).sqrt_().add_(settings.eps)  # a clamp keeps NaN, as NumPy's maximum does
    if torch.tensor(settings.eps, dtype=u.dtype, device="cpu") > 0:
        return torch.div(numerator, u, out=u)
    return torch.div(numerator, u).masked_fill_(u == 0, 0.0)
