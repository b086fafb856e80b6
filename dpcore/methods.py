"""The papers' methods by name: each one choice of the five stages.

Every method takes the keywords of `Common` beside its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack

import numpy as np

from dpcore.averaging import Averaging as IterateAveraging
from dpcore.clipping import Clip
from dpcore.errors import ArgumentError
from dpcore.filters import Accumulation, Averaging, Chain, Filter, Identity, LowPass, ScalarKalman, named_filter
from dpcore.galore import GaLore
from dpcore.method import Method
from dpcore.noise import CorrelatedGaussian, IndependentGaussian, Noise
from dpcore.queries import (
    AcceleratedDifference,
    ParameterWindow,
    Plain,
    Preconditioned,
    Query,
    RecursiveDifference,
    TwoPoint,
)
from dpcore.schedules import Schedule
from dpcore.strategies import NamedStrategy, from_matrix
from dpcore.updates import SGD, Accelerated, AdaGrad, Adam, AdamW, Momentum, Update
from dpcore.validate import choice

BASES: Final[dict[str, Callable[..., Update]]] = {
    "sgd": SGD,
    "momentum": Momentum,
    "adam": Adam,
    "adamw": AdamW,
    "adagrad": AdaGrad,
}
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
_BASE_SETTINGS: Final = {
    "sgd": (),
    "momentum": ("momentum",),
    "adam": ("betas", "eps"),
    "adamw": ("betas", "eps"),
    "adagrad": ("eps",),
}


class Shared(TypedDict, total=False):
    """Keywords of every method.

    Attributes
    ----------
    lr : float
        Learning rate.
    max_grad_norm : float
        Clip norm C, 1 by default.
    clipping : str
        Clip rule, see `dpcore.clipping.Clip`.
    clipping_groups : str or mapping of str to float
        "flat", "per_layer", "per_tensor", or clip norms by name pattern.
    noise_multiplier : float or None
        sigma; None to have it calibrated.
    batch_size : float or None
        Expected batch size; None takes the sampler's.
    strategy : str, array, NamedStrategy, Strategy or None
        Correlates the noise (`dpcore.strategies`); needs a fixed order of batches. None is independent noise.
    schedule : Schedule
        Of the learning rate, `dpcore.schedules`.
    averaging : Averaging
        Of the parameters over time, `dpcore.averaging`.
    galore : GaLore
        Filter and update in subspaces, `dpcore.galore`.
    radius : float
        Of the ball around 0 that the parameters are projected onto.
    """

    lr: float | None
    max_grad_norm: float
    clipping: str
    clipping_groups: str | Mapping[str, float]
    noise_multiplier: float | None
    batch_size: float | None
    strategy: Any
    schedule: Schedule | None
    averaging: IterateAveraging | None
    galore: GaLore | None
    radius: float | None


class Common(Shared, total=False):
    """Keywords of the methods that work on any base.

    Attributes
    ----------
    base : str or Update
        "sgd", "momentum", "adam", "adamw", "adagrad", or an update from `dpcore.updates`.
    weight_decay, momentum, betas, eps
        Settings of a base that is given by name.
    """

    base: str | Update
    weight_decay: float
    momentum: float
    betas: tuple[float, float]
    eps: float


_SHARED: Final = tuple(Shared.__annotations__)


def _method(
    name: str,
    common: Mapping[str, Any],
    *,
    query: Query | None = None,
    filter: Filter | None = None,  # noqa: A002
    update: Update | None = None,
    base: str = "sgd",
    clipping: str = "standard",
) -> Method:
    """Join a method's own stages and the common keywords; `base` and `clipping` are its defaults."""
    for keyword in common:
        choice(Common.__annotations__ if update is None else _SHARED, **{f"keyword of {name}()": keyword})
    if update is None:
        settings = {k: v for k, v in common.items() if k not in (*_SHARED, "base")}
        update = _update(common.get("base", base), common.get("lr"), settings)
    return Method(
        name=name,
        update=update,
        query=query or Plain(),
        clip=Clip(
            common.get("max_grad_norm", 1.0), common.get("clipping", clipping), common.get("clipping_groups", "flat")
        ),
        noise=_noise(common.get("noise_multiplier"), common.get("strategy")),
        filter=filter or Identity(),
        **{k: common.get(k) for k in ("batch_size", "schedule", "averaging", "galore", "radius")},
    )


def _update(base: str | Update, lr: float | None, settings: Mapping[str, Any]) -> Update:
    if not isinstance(base, str):
        if lr is not None or settings:
            raise ArgumentError(
                "base: an update carries its own settings, so lr and the like must not be given beside it"
            )
        return base
    if lr is None:
        raise ArgumentError(f"lr=None: must be a learning rate for base={base!r}")
    make = BASES[choice(BASES, base=base)]
    for name in settings:
        if name not in (*_BASE_SETTINGS[base], "weight_decay"):
            choice((*_BASE_SETTINGS[base], "weight_decay"), **{f"setting of base={base!r}": name})
    return make(lr=lr, **settings)


def _noise(noise_multiplier: float | None, strategy: Any) -> Noise:
    if strategy is None:
        return IndependentGaussian(noise_multiplier)
    if isinstance(strategy, str):
        strategy = NamedStrategy(strategy)
    elif isinstance(strategy, (np.ndarray, list, tuple)):
        strategy = from_matrix(strategy)
    return CorrelatedGaussian(noise_multiplier, strategy)


def _low_pass(
    filter: str | Filter | None,  # noqa: A002
    b: Sequence[float] | None,
    a: Sequence[float] | None,
    default: str,
) -> Filter:
    if filter is not None and (a is not None or b is not None):
        raise ArgumentError(f"filter={filter!r}: must not be given together with coefficients b and a")
    if b is None and a is not None:
        raise ArgumentError("b=None: must be given together with a")
    if b is not None:
        return LowPass(b=b, a=a or ())
    if filter is None:
        return named_filter(default)
    return named_filter(filter) if isinstance(filter, str) else filter


def dp_sgd(**common: Unpack[Common]) -> Method:
    """DP-SGD: ``x_{t+1} = x_t - lr g_t`` with g_t the noisy average of clipped gradients.

    Parameters
    ----------
    **common
        See `Common`.

    References
    ----------
    Abadi et al. 2016, algorithm 1.
    """
    return _method("dp_sgd", common)


def doppler(
    *,
    filter: str | Filter | None = None,  # noqa: A002 - the field's own word for it
    b: Sequence[float] | None = None,
    a: Sequence[float] | None = None,
    bias_corrected: bool = False,
    **common: Unpack[Common],
) -> Method:
    """DOPPLER (LP-DPSGD): a low-pass filter with bias correction between the noise and the update.

    Parameters
    ----------
    filter : str or Filter, optional
        A name of `dpcore.filters.NAMED_FILTERS`, or a filter such as `dpcore.filters.OptimalFIR`; "first-order v1"
        where neither it nor coefficients are given.
    b, a : sequences of float, optional
        The coefficients themselves, ``b_0..b_nb`` and ``a_1..a_na``: stable and of unit gain.
    bias_corrected : bool
        With base "adam" or "adamw": take the noise's share off the second moment (the paper's LP-DPAdamBC); eps, the
        least denominator, is then 1e-3 by default.
    **common
        See `Common`. With base "adam" or "adamw" the filter replaces the first moment, and the second one is that of
        the gradient before the filter: ``mhat / max(sqrt(vhat), eps)``. For Adam on the filtered gradient, with both
        moments its own, give ``base=dpcore.updates.Adam(...)``. With `galore` it is LP-DPGaLore.

    References
    ----------
    DOPPLER (Zhang et al.), algorithms 2 and 3. The average divides by the expected batch size: the paper's division by
    the realized size is not private under Poisson sampling.
    """
    low_pass = _low_pass(filter, b, a, "first-order v1")
    base = common.get("base", "sgd")
    if base not in ("adam", "adamw"):
        if bias_corrected:
            raise ArgumentError(f"bias_corrected=True: is only for base='adam' or 'adamw', not base={base!r}")
        return _method("doppler", common, filter=low_pass)
    betas = common.pop("betas", (0.0, 0.999))
    if tuple(betas[:1]) != (0,):
        raise ArgumentError(
            f"betas={betas!r}: the first must be 0, for the filter replaces the first moment; for both give "
            f"base=dpcore.updates.Adam(lr=..., betas={betas!r})"
        )
    make: Any = Adam if base == "adam" else AdamW
    update = make(
        _rate("doppler", common),
        betas,
        second_moment="released",
        denominator="floored",
        bias_corrected=bias_corrected,
        eps=common.get("eps", 1e-3 if bias_corrected else 1e-8),
        **{name: value for name, value in common.items() if name == "weight_decay"},
    )
    rest = {name: value for name, value in common.items() if name not in ("base", "eps", "weight_decay")}
    return _method("doppler", rest, filter=low_pass, update=update)


def disk(
    *,
    kappa: float | ScalarKalman = 0.7,
    gamma: float = 0.5,
    filter: str | Filter | None = None,  # noqa: A002
    **common: Unpack[Common],
) -> Method:
    """DiSK: gradients predicted along the last displacement, then an exponential average.

    Parameters
    ----------
    kappa : float or ScalarKalman
        Weight of the new gradient in the average, in (0, 1]; at 1 DiSK is its base method. A
        `dpcore.filters.ScalarKalman` gives the time-varying gain of the scalar Kalman filter.
    gamma : float
        Where along the last displacement the second gradient is taken.
    filter : str or Filter, optional
        DOPPLER's filter on top of the average.
    **common
        See `Common`; the clip is automatic by default.

    Notes
    -----
    One release a step: both gradients of an example are combined before the clip, so the sensitivity is that of one
    clipped vector. Costs two gradients an example (one where ``(1 - kappa) / (kappa gamma)`` is 1) and two vectors of
    state, the average and the last displacement.

    References
    ----------
    DiSK (Zhang et al.), algorithm 3.
    """
    average: Filter = kappa if isinstance(kappa, ScalarKalman) else Averaging(kappa)
    smooth = average if filter is None else Chain(average, _low_pass(filter, None, None, ""))
    return _method("disk", common, query=TwoPoint(kappa, gamma), filter=smooth, clipping="automatic")


def pmlf(
    *,
    window: int = 2,
    beta: float = 0.1,
    filter: str | Filter | None = None,  # noqa: A002
    b: Sequence[float] | None = None,
    a: Sequence[float] | None = None,
    **common: Unpack[Common],
) -> Method:
    """DP-PMLF: per-example momentum over the last parameter points, then a low-pass filter.

    Parameters
    ----------
    window : int
        k, how many parameter points; at 1 it is DOPPLER.
    beta : float
        Decay of the weights.
    filter, b, a
        As in `doppler`; "pmlf-mnist" by default, "none" leaves the filter out.
    **common
        See `Common`; the paper takes lr 0.5, batch size 1000 and clip norm 1.

    Notes
    -----
    k gradients an example and k - 1 vectors of state beside the filter's. Nothing is stored for an example.

    References
    ----------
    DP-PMLF, algorithm 1.
    """
    low_pass = _low_pass(filter, b, a, "pmlf-mnist")
    return _method("pmlf", common, query=ParameterWindow(window, beta), filter=low_pass)


def inner_outer(
    *,
    window: int = 2,
    beta: float = 0.1,
    outer_momentum: float = 0.9,
    weight_decay: float = 0.0,
    **common: Unpack[Shared],
) -> Method:
    """InnerOuter: DP-PMLF's window without its normalizer, and momentum instead of the filter.

    Parameters
    ----------
    window, beta
        As in `pmlf`.
    outer_momentum : float
        ``m_t = outer_momentum m_{t-1} + g_t``.
    weight_decay : float
        L2 penalty.
    **common
        See `Shared`.

    References
    ----------
    Xiao et al. 2023, as the baseline of DP-PMLF.
    """
    update = Momentum(_rate("inner_outer", common), outer_momentum, weight_decay)
    return _method("inner_outer", common, query=ParameterWindow(window, beta, normalized=False), update=update)


def memf(**common: Unpack[Common]) -> Method:
    """DP-MEMF (DP-FTRL): gradients of a fixed order of batches under correlated noise.

    Parameters
    ----------
    **common
        See `Common`; `strategy` is "square-root" by default, and the identity is DP-SGD.

    References
    ----------
    DP-SRG, algorithm 2; Kairouz et al. 2021; Choquette-Choo et al. 2023.
    """
    common.setdefault("strategy", "square-root")
    return _method("memf", common)


def srg_memf(*, decay: float | Sequence[float] = math.exp(-2.5), **common: Unpack[Common]) -> Method:
    """DP-SRG-MEMF: recursive gradient differences under correlated noise, accumulated.

    Parameters
    ----------
    decay : float or sequence of float
        c, or c_t of every step; 0 is `memf`.
    **common
        See `Common`; by default base "momentum" (0.9) and strategy "square-root".

    Notes
    -----
    Two gradients an example, the earlier parameters and the accumulated gradient as state.

    References
    ----------
    DP-SRG, algorithm 3. Its line 7 adds the noise a second time; here it is added once, to the difference.
    """
    common.setdefault("strategy", "square-root")
    return _method(
        "srg_memf", common, query=RecursiveDifference(decay), filter=Accumulation(decay), base="momentum"
    )  # fmt: skip


def accelerated_srgd(*, variant: str = "accelerated", **common: Unpack[Shared]) -> Method:
    """Accelerated-DP-SRGD: Nesterov's method on private prefix sums of gradient differences, for one epoch.

    Parameters
    ----------
    variant : {"accelerated", "unaccelerated", "independent"}
        The method; without the coupling; with independent batch gradients instead of differences.
    **common
        See `Shared`; lr is 1/beta, `radius` that of the constraint ball around 0. `strategy` is "tree" by
        default (None with "independent"). `max_grad_norm` bounds ``eta_t grad(x_t) - eta_{t-1} grad(x_{t-1})``; theory
        takes 4 L + 8 M diam.

    Notes
    -----
    The answer is y, not the parameters at which the gradients are taken; `dpcore.theory` has the theory's parameters.

    References
    ----------
    DP-SRG, algorithm 1, section 4.3 and theorem 4.11.
    """
    update = Accelerated(_rate("accelerated_srgd", common), variant)
    if variant == "independent":
        return _method("accelerated_srgd", common, update=update)
    common.setdefault("strategy", "tree")
    return _method(
        "accelerated_srgd", common, query=AcceleratedDifference(), filter=Accumulation(1.0), update=update
    )  # fmt: skip


def _rate(method: str, common: Shared) -> float:
    lr = common.get("lr")
    if lr is None:
        raise ArgumentError(f"lr=None: must be a learning rate for {method}")
    return lr


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
        See `Shared`.

    References
    ----------
    Private adaptive optimizers, sections 3 and 4, algorithms 4 to 9.
    """
    update, query = _adaptive(
        lambda lr, **rest: Adam(lr, betas, **rest), variant, 1e-8, common, eps, weight_decay, scale_eps,
        max_scaled_norm, unscaled_steps, scaled_steps, joint_scale, allow_nonprivate,
    )  # fmt: skip
    return _method("dp_adam", common, query=query, update=update)


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
        See `Shared`.

    References
    ----------
    Private adaptive optimizers, algorithm 3 and section 5.1.
    """
    update, query = _adaptive(
        AdaGrad, variant, 0.0, common, eps, weight_decay, scale_eps, max_scaled_norm, unscaled_steps, scaled_steps,
        joint_scale, allow_nonprivate,
    )  # fmt: skip
    return _method("dp_adagrad", common, query=query, update=update)


_SOURCES: Final = {
    "independent_moments": "independent",
    "joint_moments": "joint",
    "side_information": "public",
    "noiseless_preconditioner": "noiseless",
}


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
    lr = _rate("an adaptive method", common)
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
        Plain(), 1e-3 if scale_eps is None else scale_eps, max_scaled_norm, unscaled_steps or 0, scaled_steps or 1
    )
    return update, query


def _only(variants: str, allowed: bool, variant: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and not allowed:
            raise ArgumentError(f"{name}={value!r}: is only for variant {variants}, not for {variant!r}")


METHODS: Final[dict[str, Callable[..., Method]]] = {
    "dp_sgd": dp_sgd,
    "doppler": doppler,
    "disk": disk,
    "pmlf": pmlf,
    "inner_outer": inner_outer,
    "memf": memf,
    "srg_memf": srg_memf,
    "accelerated_srgd": accelerated_srgd,
    "dp_adam": dp_adam,
    "dp_adagrad": dp_adagrad,
}
