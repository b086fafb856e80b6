"""DP-Adam and DP-AdaGrad in the variants of the private adaptive optimizers paper."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Unpack

from dpcore.errors import ArgumentError
from dpcore.methods.common import Shared, assemble, learning_rate
from dpcore.spec.validate import choice
from dpcore.stages.method import Method
from dpcore.stages.queries import Plain, Preconditioned, Query
from dpcore.stages.updates import AdaGrad, Adam, Update

# The source of the second moment, by variant; see `dpcore.updates.SecondMoment`.
_SOURCES: Final = {
    "post_processing": "filtered", "independent_moments": "independent", "joint_moments": "joint",
    "bias_corrected": "filtered", "scale_then_privatize": "filtered", "delayed_preconditioner": "delayed",
    "delayed_scale": "filtered", "side_information": "public", "noiseless_preconditioner": "noiseless",
    "noiseless_scale_then_privatize": "noiseless",
}  # fmt: skip
VARIANTS: Final = tuple(_SOURCES)
# Second moments that noise can turn negative, or to zero.
_NOISY: Final = ("independent_moments", "joint_moments", "bias_corrected")
_SCALED: Final = ("scale_then_privatize", "noiseless_scale_then_privatize", "delayed_preconditioner", "delayed_scale")
_CYCLES: Final = _SCALED[2:]
_ONLY_FOR: Final = {
    "scale_eps": _SCALED, "max_scaled_norm": _SCALED, "unscaled_steps": _CYCLES, "scaled_steps": _CYCLES,
    "unscaled_lr_factor": _CYCLES[:1], "joint_scale": ("joint_moments",),
}  # fmt: skip


class Adaptive(Shared, total=False):
    """Keywords of `dp_adam` and `dp_adagrad`, in addition to `variant`.

    Attributes
    ----------
    eps : float or None
        Constant of the denominator. For Adam 1e-8, or 1e-3 if the second moment can be negative or zero by noise.
        AdaGrad adds it to the root of nu (0 by default, with 0/0 = 0); if the second moment is released by itself or
        its bias corrected, it is the least denominator (1 by default, as in the paper).
    weight_decay : float
        L2 penalty.
    scale_eps, max_scaled_norm, unscaled_steps, scaled_steps
        Settings of the scaled variants: see `dpcore.queries.Preconditioned`.
    unscaled_lr_factor, max_update_norm, joint_scale
        See `dpcore.updates.SecondMoment`.
    allow_nonprivate : bool
        Must be True for the two noiseless variants.
    """

    eps: float | None
    weight_decay: float
    scale_eps: float | None
    max_scaled_norm: float | None
    unscaled_steps: int | None
    scaled_steps: int | None
    unscaled_lr_factor: float | None
    max_update_norm: float | None
    joint_scale: float | None
    allow_nonprivate: bool


_OWN: Final = tuple(name for name in Adaptive.__annotations__ if name not in Shared.__annotations__)


def dp_adam(
    *, variant: str = "post_processing", betas: tuple[float, float] = (0.9, 0.999), **settings: Unpack[Adaptive]
) -> Method:
    """DP-Adam, in the variants of the private adaptive optimizers paper.

    Parameters
    ----------
    variant : str
        "post_processing": Adam on the released gradient.
        "independent_moments": the gradient and its square are released separately (batches with a hard maximum only).
        "joint_moments": both as one vector, for batches of one example.
        "bias_corrected": the noise's share is taken off the second moment.
        "scale_then_privatize": gradients are scaled by the second moment before the clip.
        "delayed_preconditioner": in cycles: unscaled steps, then steps scaled by the root of nu, which takes the square
        of the unscaled steps' mean. Without unscaled steps nu takes every step's square, as the paper has it.
        "delayed_scale": in the same cycles, but nu takes every step's square, and the scale alone is frozen.
        "side_information": the second moment of public gradients that the caller supplies.
        "noiseless_preconditioner": of clipped gradients without noise; **not private**.
        "noiseless_scale_then_privatize": scaled by that before the clip; **not private**.
    betas : (float, float)
        Decays of the moments.
    **settings
        See `dpcore.methods.Adaptive`.

    References
    ----------
    Private adaptive optimizers, sections 3 and 4, algorithms 4 to 9. Delayed preconditioner: Li et al. 2023.
    """
    return _assemble("dp_adam", partial(Adam, betas=betas), variant, settings, (1e-8, 1e-3), ("bias_corrected",))


def dp_adagrad(*, variant: str = "post_processing", **settings: Unpack[Adaptive]) -> Method:
    """DP-AdaGrad, in the same variants as `dp_adam`.

    Parameters
    ----------
    variant : str
        As in `dp_adam`.
    **settings
        See `dpcore.methods.Adaptive`.

    References
    ----------
    Private adaptive optimizers, algorithm 3 and section 5.1.
    """
    return _assemble("dp_adagrad", AdaGrad, variant, settings, (0.0, 1.0), _NOISY)


def _assemble(
    name: str,
    make: Callable[..., Update],
    variant: str,
    settings: Adaptive,
    eps: tuple[float, float],
    floored: tuple[str, ...],
) -> Method:
    """Join the stages; `eps`: the default without and with noise in nu; `floored`: variants whose root has a floor."""
    choice(VARIANTS, variant=variant)
    own = {name: value for name, value in settings.items() if name in _OWN and value is not None}
    common: Any = {name: value for name, value in settings.items() if name not in _OWN}
    for keyword, variants in _ONLY_FOR.items():
        if keyword in own and variant not in variants:
            raise ArgumentError(
                f"{keyword}={own[keyword]!r}: is only for variant {' or '.join(variants)}, not for {variant!r}"
            )
    unaveraged = variant == "delayed_preconditioner" and own.get("unscaled_steps") == 0
    update = make(
        lr=learning_rate(name, common),
        second_moment="filtered" if unaveraged else _SOURCES[variant],
        denominator="floored" if variant in floored else "added",
        bias_corrected=variant == "bias_corrected",
        **{"eps": eps[variant in _NOISY]} | {k: v for k, v in own.items() if k in _OF_UPDATE},
    )
    return assemble(name, common, query=_query(variant, own), update=update, own=_OWN)


_OF_UPDATE: Final = (
    "eps", "weight_decay", "unscaled_lr_factor", "max_update_norm", "joint_scale", "allow_nonprivate"
)  # fmt: skip


def _query(variant: str, own: Mapping[str, Any]) -> Query:
    if variant not in _SCALED:
        return Plain()
    if variant in _CYCLES and not {"unscaled_steps", "scaled_steps"} <= own.keys():
        raise ArgumentError(f"variant={variant!r}: needs unscaled_steps and scaled_steps, such as 10 and 10")
    return Preconditioned(**{name: value for name, value in own.items() if name not in _OF_UPDATE})
