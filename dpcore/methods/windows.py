"""DP-PMLF and InnerOuter: gradients of an example over a window of parameter points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from dpcore.methods.common import Common, Shared, assemble, learning_rate, low_pass_of
from dpcore.spec.validate import decay
from dpcore.stages.filters import Filter
from dpcore.stages.method import Method
from dpcore.stages.queries import ParameterWindow
from dpcore.stages.updates import Momentum


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
    k gradients an example and k - 1 vectors of state beside the filter's. Nothing is stored for an example.

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
