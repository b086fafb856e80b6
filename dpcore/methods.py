"""The papers' methods by name: each one choice of the five stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dpcore.clipping import Clip
from dpcore.errors import ArgumentError
from dpcore.filters import Averaging, Identity, LowPass, named_filter
from dpcore.method import Method
from dpcore.noise import IndependentGaussian
from dpcore.queries import TwoPoint
from dpcore.updates import SGD, Adam, AdamW, Momentum, Update
from dpcore.validate import choice

BASES: Final[dict[str, Callable[..., Update]]] = {"sgd": SGD, "momentum": Momentum, "adam": Adam, "adamw": AdamW}
Groups = str | Mapping[str, float]


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
    known = {"sgd": (), "momentum": ("momentum",), "adam": ("betas", "eps"), "adamw": ("betas", "eps")}[base]
    for name in settings:
        if name not in (*known, "weight_decay"):
            choice((*known, "weight_decay"), **{f"setting of base={base!r}": name})
    return make(lr=lr, **settings)


def dp_sgd(
    *,
    lr: float | None = None,
    base: str | Update = "sgd",
    max_grad_norm: float = 1.0,
    clipping: str = "standard",
    clipping_groups: Groups = "flat",
    noise_multiplier: float | None = None,
    batch_size: float | None = None,
    **settings: Any,
) -> Method:
    """DP-SGD: ``x_{t+1} = x_t - lr g_t`` with g_t the noisy average of clipped gradients.

    Parameters
    ----------
    lr : float
        Learning rate.
    base : str or Update
        "sgd", "momentum", "adam", "adamw", or an update from `dpcore.updates`.
    max_grad_norm, clipping, clipping_groups
        See `dpcore.clipping.Clip`.
    noise_multiplier : float, optional
        sigma; None to have it calibrated.
    batch_size : float, optional
        Expected batch size; None takes the sampler's.
    **settings
        Of the base: `weight_decay`, `momentum`, `betas`, `eps`.

    References
    ----------
    Abadi et al. 2016, algorithm 1.
    """
    return Method(
        name="dp_sgd",
        update=_update(base, lr, settings),
        clip=Clip(max_grad_norm, clipping, clipping_groups),
        noise=IndependentGaussian(noise_multiplier),
        filter=Identity(),
        batch_size=batch_size,
    )


def doppler(
    *,
    lr: float | None = None,
    filter: str | None = None,  # noqa: A002 - the field's own word for it
    b: Sequence[float] | None = None,
    a: Sequence[float] | None = None,
    base: str | Update = "sgd",
    max_grad_norm: float = 1.0,
    clipping: str = "standard",
    clipping_groups: Groups = "flat",
    noise_multiplier: float | None = None,
    batch_size: float | None = None,
    **settings: Any,
) -> Method:
    """DOPPLER (LP-DPSGD): a low-pass filter with bias correction between the noise and the update.

    Parameters
    ----------
    filter : str, optional
        A name of `dpcore.filters.NAMED_FILTERS`; "first-order v1" where neither it nor coefficients are given.
    b, a : sequences of float, optional
        The coefficients themselves, ``b_0..b_nb`` and ``a_1..a_na``: stable and of unit gain.
    lr, base, max_grad_norm, clipping, clipping_groups, noise_multiplier, batch_size, **settings
        As in `dp_sgd`.

    References
    ----------
    DOPPLER (Zhang et al.), algorithm 1. The average divides by the expected batch size: the paper's division by the
    realized size is not private under Poisson sampling.
    """
    if filter is not None and (a is not None or b is not None):
        raise ArgumentError(f"filter={filter!r}: must not be given together with coefficients b and a")
    if b is None and a is not None:
        raise ArgumentError("b=None: must be given together with a")
    low_pass = LowPass(b=b, a=a or ()) if b is not None else named_filter(filter or "first-order v1")
    return Method(
        name="doppler",
        update=_update(base, lr, settings),
        clip=Clip(max_grad_norm, clipping, clipping_groups),
        noise=IndependentGaussian(noise_multiplier),
        filter=low_pass,
        batch_size=batch_size,
    )


def disk(
    *,
    lr: float | None = None,
    kappa: float = 0.7,
    gamma: float = 0.5,
    base: str | Update = "sgd",
    max_grad_norm: float = 1.0,
    clipping: str = "automatic",
    clipping_groups: Groups = "flat",
    noise_multiplier: float | None = None,
    batch_size: float | None = None,
    **settings: Any,
) -> Method:
    """DiSK: gradients predicted along the last displacement, then an exponential average.

    Parameters
    ----------
    kappa : float
        Weight of the new gradient in the average, in (0, 1]; at 1 DiSK is its base method.
    gamma : float
        Where along the last displacement the second gradient is taken.
    lr, base, max_grad_norm, clipping, clipping_groups, noise_multiplier, batch_size, **settings
        As in `dp_sgd`.

    Notes
    -----
    One release a step: both gradients of an example are combined before the clip, so the sensitivity is that of one
    clipped vector. Costs two gradients an example (one where ``(1 - kappa) / (kappa gamma)`` is 1) and two vectors of
    state, the average and the last displacement.

    References
    ----------
    DiSK (Zhang et al.), algorithm 3.
    """
    return Method(
        name="disk",
        update=_update(base, lr, settings),
        query=TwoPoint(kappa, gamma),
        clip=Clip(max_grad_norm, clipping, clipping_groups),
        noise=IndependentGaussian(noise_multiplier),
        filter=Averaging(kappa),
        batch_size=batch_size,
    )


def dp_adam(
    *,
    lr: float,
    variant: str = "post_processing",
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 1.0,
    clipping: str = "standard",
    clipping_groups: Groups = "flat",
    noise_multiplier: float | None = None,
    batch_size: float | None = None,
) -> Method:
    """DP-Adam. The variant "post_processing" is plain Adam on the released gradient.

    Parameters
    ----------
    variant : str
        "post_processing"; the paper's other variants are not here yet.
    betas, eps, weight_decay
        See `dpcore.updates.Adam`.
    lr, max_grad_norm, clipping, clipping_groups, noise_multiplier, batch_size
        As in `dp_sgd`.
    """
    choice(("post_processing",), variant=variant)
    return Method(
        name="dp_adam",
        update=Adam(lr, betas, eps, weight_decay),
        clip=Clip(max_grad_norm, clipping, clipping_groups),
        noise=IndependentGaussian(noise_multiplier),
        batch_size=batch_size,
    )


METHODS: Final[dict[str, Callable[..., Method]]] = {
    "dp_sgd": dp_sgd,
    "doppler": doppler,
    "disk": disk,
    "dp_adam": dp_adam,
}
