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
    learning_rate, weight_decay, beta1, beta2, *_ = map(float, settings)
    x, g = parameter, direction
    if rule == "adamw":
        x.mul_(1 - learning_rate * weight_decay)
    elif weight_decay and rule != "accelerated":
        g = g + weight_decay * x

    if rule == "sgd":
        x.sub_(learning_rate * g)
    elif rule in ("momentum", "nesterov"):
        (m,) = moments
        m.mul_(beta1).add_(g)
        x.sub_(learning_rate * (m if rule == "momentum" else g + beta1 * m))
    elif rule == "accelerated":
        z, y = moments
        z.sub_(learning_rate * g)
        torch.sub(x, learning_rate / settings.weight * g, out=y)
        torch.add((1 - settings.coupling) * y, settings.coupling * z, out=x)
    elif rule == "adagrad":
        (v,) = moments
        v.add_(g * g if square is None else square)
        x.sub_(_quotient(g, v.clone(), settings).mul_(learning_rate))
    else:
        m, v = moments
        m.mul_(beta1).add_((1 - beta1) * g)
        term = g * g if square is None else square.clone()
        v.mul_(beta2).add_(term.mul_(1 - beta2))
        corrected = torch.div(v, 1 - beta2**step_number, out=term)
        x.sub_(_quotient(learning_rate / (1 - beta1**step_number) * m, corrected, settings))


def _quotient(numerator: torch.Tensor, u: torch.Tensor, settings: UpdateSettings) -> torch.Tensor:
    """See `dpcore_numpy.update._quotient`; overwrites `u`."""
    if settings.bias:
        u.sub_(settings.bias)
    # NumPy's maximum keeps NaN, as clamp does.
    u.clamp_(min=settings.floor**2).sqrt_().add_(settings.eps)
    quotient = torch.div(numerator, u)
    if torch.tensor(settings.eps, dtype=u.dtype) > 0:
        return quotient
    return quotient.masked_fill_(u == 0, 0.0)
