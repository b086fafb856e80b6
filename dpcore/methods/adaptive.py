"""DP-Adam and DP-AdaGrad in the variants of the private adaptive optimizers paper."""

from __future__ import annotations

from typing import Any, Final, Unpack

from dpcore.errors import ArgumentError
from dpcore.methods.common import Shared, assemble, learning_rate
from dpcore.spec.validate import choice
from dpcore.stages.method import Method
from dpcore.stages.queries import Plain, Preconditioned, Query
from dpcore.stages.updates import AdaGrad, Adam

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
# Second moments that noise can turn negative, or to zero.
_NOISY: Final = ("independent_moments", "joint_moments", "bias_corrected")
_SCALED: Final = "scale_then_privatize or delayed_preconditioner"


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
        Of the scaled variants: see `dpcore.stages.queries.Preconditioned`.
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
    noisy = variant in _NOISY
    update = Adam(
        learning_rate("dp_adam", common),
        betas,
        eps if eps is not None else 1e-3 if noisy else 1e-8,
        weight_decay,
        **_second_moment(variant, joint_scale, allow_nonprivate, floored=variant == "bias_corrected"),
    )
    query = _query(variant, scale_eps, max_scaled_norm, unscaled_steps, scaled_steps)
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
    noisy = variant in _NOISY
    update = AdaGrad(
        learning_rate("dp_adagrad", common),
        eps if eps is not None else 1.0 if noisy else 0.0,
        weight_decay,
        **_second_moment(variant, joint_scale, allow_nonprivate, floored=noisy),
    )
    query = _query(variant, scale_eps, max_scaled_norm, unscaled_steps, scaled_steps)
    return assemble("dp_adagrad", common, query=query, update=update)


def _second_moment(variant: str, joint_scale: float | None, allow_nonprivate: bool, *, floored: bool) -> dict[str, Any]:
    """Return a variant's `dpcore.stages.updates.SecondMoment` settings."""
    choice(VARIANTS, variant=variant)
    _only("joint_moments", variant == "joint_moments", variant, joint_scale=joint_scale)
    return {
        "second_moment": _SOURCES.get(variant, "filtered"),
        "denominator": "floored" if floored else "added",
        "bias_corrected": variant == "bias_corrected",
        "joint_scale": joint_scale,
        "allow_nonprivate": allow_nonprivate,
    }


def _query(
    variant: str,
    scale_eps: float | None,
    max_scaled_norm: float | None,
    unscaled_steps: int | None,
    scaled_steps: int | None,
) -> Query:
    """Return a variant's query; refuse settings that it does not have."""
    delayed = variant == "delayed_preconditioner"
    scaled = delayed or variant == "scale_then_privatize"
    _only(_SCALED, scaled, variant, scale_eps=scale_eps, max_scaled_norm=max_scaled_norm)
    _only("delayed_preconditioner", delayed, variant, unscaled_steps=unscaled_steps, scaled_steps=scaled_steps)
    if not scaled:
        return Plain()
    if delayed and (unscaled_steps is None or scaled_steps is None):
        raise ArgumentError(
            "variant='delayed_preconditioner': needs unscaled_steps and scaled_steps, such as 10 and 10"
        )
    return Preconditioned(
        Plain(),
        1e-3 if scale_eps is None else scale_eps,
        max_scaled_norm,
        0 if unscaled_steps is None else unscaled_steps,
        1 if scaled_steps is None else scaled_steps,
    )


def _only(variants: str, allowed: bool, variant: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and not allowed:
            raise ArgumentError(f"{name}={value!r}: is only for variant {variants}, not for {variant!r}")
