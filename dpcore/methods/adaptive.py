"""DP-Adam and DP-AdaGrad in the variants of the private adaptive optimizers paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Unpack

from dpcore.errors import ArgumentError
from dpcore.method import Method
from dpcore.methods.common import Shared, assemble, learning_rate
from dpcore.queries import Plain, Preconditioned, Query
from dpcore.updates import AdaGrad, Adam, Update
from dpcore.validate import choice

VARIANTS: Final = (
    "post_processing",
    "independent_moments",
    "joint_moments",
    "bias_corrected",
    "scale_then_privatize",
    "delayed_preconditioner",
    "side_information",
    "noiseless_preconditioner",
)
_SOURCES: Final = {
    "independent_moments": "independent",
    "joint_moments": "joint",
    "side_information": "public",
    "noiseless_preconditioner": "noiseless",
}


def dp_adam(
    *,
    variant: str = "post_processing",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float | None = None,
    weight_decay: float = 0.0,
    scale_eps: float | None = None,
    max_scaled_norm: float | None = None,
    unscaled_steps: int | None = None,
    scaled_steps: int | None = None,
    joint_scale: float | None = None,
    allow_nonprivate: bool = False,
    **common: Unpack[Shared],
) -> Method:
    """DP-Adam, in the variants of the private adaptive optimizers paper.

    Parameters
    ----------
    variant : str
        "post_processing": Adam on the released gradient.
        "independent_moments": the gradient and its square are released separately (fixed batches only).
        "joint_moments": both as one vector, for batches of one example.
        "bias_corrected": the noise's share is taken off the second moment.
        "scale_then_privatize": gradients are scaled by the second moment before the clip.
        "delayed_preconditioner": the same in cycles with a frozen scale.
        "side_information": the second moment of public gradients that the caller supplies.
        "noiseless_preconditioner": of clipped gradients without noise; **not private**.
    betas : (float, float)
        Decays of the moments.
    eps : float, optional
        Of the denominator; 1e-8, or 1e-3 where the second moment can be negative or zero by noise.
    weight_decay : float
        L2 penalty.
    scale_eps, max_scaled_norm, unscaled_steps, scaled_steps
        Of the scaled variants: see `dpcore.queries.Preconditioned`.
    joint_scale : float, optional
        Of "joint_moments".
    allow_nonprivate : bool
        Must be True for "noiseless_preconditioner".
    **common
        See `dpcore.methods.Shared`.

    References
    ----------
    Private adaptive optimizers, sections 3 and 4, algorithms 4 to 9.
    """
    update, query = _adaptive(
        lambda lr, **rest: Adam(lr, betas, **rest), variant, 1e-8, common, eps, weight_decay, scale_eps,
        max_scaled_norm, unscaled_steps, scaled_steps, joint_scale, allow_nonprivate,
    )  # fmt: skip
    return assemble("dp_adam", common, query=query, update=update)


def dp_adagrad(
    *,
    variant: str = "post_processing",
    eps: float | None = None,
    weight_decay: float = 0.0,
    scale_eps: float | None = None,
    max_scaled_norm: float | None = None,
    unscaled_steps: int | None = None,
    scaled_steps: int | None = None,
    joint_scale: float | None = None,
    allow_nonprivate: bool = False,
    **common: Unpack[Shared],
) -> Method:
    """DP-AdaGrad, in the same variants as `dp_adam`.

    Parameters
    ----------
    eps : float, optional
        Added to the root of nu (0 by default, with 0/0 = 0); where the second moment is released by itself or its bias
        corrected, the least denominator (1 by default, as in the paper).
    variant, weight_decay, scale_eps, max_scaled_norm, unscaled_steps, scaled_steps, joint_scale, allow_nonprivate
        As in `dp_adam`.
    **common
        See `dpcore.methods.Shared`.

    References
    ----------
    Private adaptive optimizers, algorithm 3 and section 5.1.
    """
    update, query = _adaptive(
        AdaGrad, variant, 0.0, common, eps, weight_decay, scale_eps, max_scaled_norm, unscaled_steps, scaled_steps,
        joint_scale, allow_nonprivate,
    )  # fmt: skip
    return assemble("dp_adagrad", common, query=query, update=update)


def _adaptive(
    make: Callable[..., Update],
    variant: str,
    default_eps: float,
    common: Shared,
    eps: float | None,
    weight_decay: float,
    scale_eps: float | None,
    max_scaled_norm: float | None,
    unscaled_steps: int | None,
    scaled_steps: int | None,
    joint_scale: float | None,
    allow_nonprivate: bool,
) -> tuple[Update, Query]:
    """Return the update and the query of a variant; refuse settings that it does not have."""
    choice(VARIANTS, variant=variant)
    delayed, scaled = variant == "delayed_preconditioner", variant in ("scale_then_privatize", "delayed_preconditioner")
    _only("scale_then_privatize or delayed_preconditioner", scaled, variant, scale_eps=scale_eps)
    _only("scale_then_privatize or delayed_preconditioner", scaled, variant, max_scaled_norm=max_scaled_norm)
    _only("delayed_preconditioner", delayed, variant, unscaled_steps=unscaled_steps, scaled_steps=scaled_steps)
    _only("joint_moments", variant == "joint_moments", variant, joint_scale=joint_scale)
    lr = learning_rate("an adaptive method", common)
    noisy = variant in ("independent_moments", "joint_moments", "bias_corrected")
    adagrad = default_eps == 0
    floored = variant == "bias_corrected" or (adagrad and noisy)
    if eps is None:
        eps = default_eps if not noisy else 1.0 if adagrad else 1e-3
    update = make(
        lr,
        eps=eps,
        weight_decay=weight_decay,
        second_moment=_SOURCES.get(variant, "filtered"),
        denominator="floored" if floored else "added",
        bias_corrected=variant == "bias_corrected",
        joint_scale=joint_scale,
        allow_nonprivate=allow_nonprivate,
    )
    if not scaled:
        return update, Plain()
    if delayed and (unscaled_steps is None or scaled_steps is None):
        raise ArgumentError(
            "variant='delayed_preconditioner': needs unscaled_steps and scaled_steps, such as 10 and 10"
        )
    query = Preconditioned(
        Plain(),
        1e-3 if scale_eps is None else scale_eps,
        max_scaled_norm,
        unscaled_steps or 0,
        1 if scaled_steps is None else scaled_steps,
    )
    return update, query


def _only(variants: str, allowed: bool, variant: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and not allowed:
            raise ArgumentError(f"{name}={value!r}: is only for variant {variants}, not for {variant!r}")
