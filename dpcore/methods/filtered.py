"""DP-SGD, DOPPLER and DiSK: one or two gradients an example, and a filter between noise and update."""

from collections.abc import Sequence
from typing import Any, Unpack

from dpcore.errors import ArgumentError
from dpcore.methods.common import Common, Shared, assemble, learning_rate, low_pass_of
from dpcore.spec.validate import decay, sequence
from dpcore.stages.filters import Averaging, Chain, Filter, ScalarKalman
from dpcore.stages.method import Method
from dpcore.stages.queries import ParameterWindow, TwoPoint
from dpcore.stages.updates import Adam, AdamW, Momentum


def dp_sgd(**common: Unpack[Common]) -> Method:
    """DP-SGD: ``x_{t+1} = x_t - lr g_t`` with g_t the noisy average of clipped gradients.

    Parameters
    ----------
    **common
        See `dpcore.methods.Common`.

    References
    ----------
    Abadi et al. 2016, algorithm 1.
    """
    return assemble("dp_sgd", common)


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
        A name of `dpcore.filters.NAMED_FILTERS`, a design and its numbers ("butterworth 2 0.1"), or a filter such as
        `dpcore.filters.OptimalFIR`; "first-order v1" if neither it nor coefficients are given.
    b, a : sequences of float, optional
        The coefficients themselves, ``b_0..b_nb`` and ``a_1..a_na``: stable and of unit gain.
    bias_corrected : bool
        With base "adam" or "adamw": take the noise's share off the second moment (the paper's LP-DPAdamBC); eps, the
        least denominator, is then 1e-3 by default.
    **common
        See `dpcore.methods.Common`. With base "adam" or "adamw" the filter replaces the first moment, and the second
        one is that of the gradient before the filter: ``mhat / max(sqrt(vhat), eps)``. For Adam on the filtered
        gradient, with both moments its own, give ``base=dpcore.updates.Adam(...)``. With `galore` it is LP-DPGaLore.

    References
    ----------
    DOPPLER (Zhang et al.), algorithms 2 and 3. The average divides by the expected batch size: the paper's division by
    the realized size is not private under Poisson sampling.
    """
    low_pass = low_pass_of(filter, b, a, "first-order v1")
    base = common.get("base", "sgd")
    if base not in ("adam", "adamw"):
        if bias_corrected:
            raise ArgumentError(f"bias_corrected=True: is only for base='adam' or 'adamw', not base={base!r}")
        return assemble("doppler", common, filter=low_pass)
    betas = common.pop("betas", (0.0, 0.999))
    if tuple(sequence(betas=betas)[:1]) != (0,):
        raise ArgumentError(
            f"betas={betas!r}: the first must be 0, for the filter replaces the first moment; for both give "
            f"base=dpcore.updates.Adam(lr=..., betas={betas!r})"
        )
    own = {name: common[name] for name in ("eps", "weight_decay") if name in common}
    make: Any = Adam if base == "adam" else AdamW
    update = make(
        learning_rate("doppler", common),
        betas,
        second_moment="released",
        denominator="floored",
        bias_corrected=bias_corrected,
        **{"eps": 1e-3 if bias_corrected else 1e-8} | own,
    )
    rest = {name: value for name, value in common.items() if name not in (*own, "base")}
    return assemble("doppler", rest, filter=low_pass, update=update)


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
        Position of the second gradient along the last displacement.
    filter : str or Filter, optional
        DOPPLER's filter on top of the average.
    **common
        See `dpcore.methods.Common`; the clip is automatic by default, and "automatic_v" in appendix C.2.

    Notes
    -----
    Both gradients of an example are combined before the clip, so the sensitivity is that of one clipped vector. Costs
    two gradients an example (one if ``(1 - kappa) / (kappa gamma)`` is 1) and two vectors of state.

    References
    ----------
    DiSK (Zhang et al.), algorithm 3.
    """
    average: Filter = kappa if isinstance(kappa, ScalarKalman) else Averaging(kappa)
    smooth = average if filter is None else Chain(average, low_pass_of(filter, None, None, ""))
    return assemble("disk", common, query=TwoPoint(kappa, gamma), filter=smooth, clipping="automatic")


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
        As in `doppler`; "pmlf-mnist" by default, "none" for no filter.
    **common
        See `dpcore.methods.Common`; the paper takes lr 0.5, batch size 1000 and clip norm 1.

    Notes
    -----
    k gradients an example and k - 1 vectors of state in addition to the filter's. Nothing is stored for an example.

    References
    ----------
    DP-PMLF, algorithm 1.
    """
    low_pass = low_pass_of(filter, b, a, "pmlf-mnist")
    return assemble("pmlf", common, query=ParameterWindow(window, beta), filter=low_pass)


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
        See `dpcore.methods.Shared`.

    References
    ----------
    Xiao, Xiang, Wang and Devadas 2023 (inner-outer momentum), as DP-PMLF describes it, whose baseline it is.
    """
    outer_momentum = decay(outer_momentum=outer_momentum)
    update = Momentum(learning_rate("inner_outer", common), outer_momentum, weight_decay)
    return assemble("inner_outer", common, query=ParameterWindow(window, beta, normalized=False), update=update)
