"""DP-MEMF, DP-SRG-MEMF and Accelerated-DP-SRGD: correlated noise on gradients and on their differences."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Unpack

import numpy as np

from dpcore.methods.common import Common, Shared, assemble, learning_rate
from dpcore.spec import validate
from dpcore.stages.filters import Accumulation
from dpcore.stages.method import Method
from dpcore.stages.queries import AcceleratedDifference, RecursiveDifference
from dpcore.stages.strategies import Recommended
from dpcore.stages.updates import Accelerated, Momentum, Nesterov

_MOMENTUM: Final = 0.9


def memf(**common: Unpack[Common]) -> Method:
    """DP-MEMF (DP-FTRL): gradients under correlated noise, of batches in an order that is fixed or shuffled.

    Parameters
    ----------
    **common
        See `dpcore.methods.Common`; by default base "momentum" (0.9), as for `srg_memf` (the paper's experiments use
        it for both), and its best strategy among those that keep at most 4 vectors (`dpcore.strategies.Recommended`).
        The identity with base "sgd" is DP-SGD.

    References
    ----------
    DP-SRG, algorithm 2; Kairouz et al. 2021; Choquette-Choo et al. 2023.
    """
    common.setdefault("strategy", Recommended(momentum=_momentum(common)))
    return assemble("memf", common, base="momentum")


def srg_memf(*, decay: float | Sequence[float] = math.exp(-2.5), **common: Unpack[Common]) -> Method:
    """DP-SRG-MEMF: recursive gradient differences under correlated noise, accumulated.

    Parameters
    ----------
    decay : float or sequence of float
        c, or c_t of every step; 0 is `memf`.
    **common
        See `dpcore.methods.Common`; base and strategy by default those of `memf`.

    Notes
    -----
    Two gradients an example, the earlier parameters and the accumulated gradient as state.

    References
    ----------
    DP-SRG, algorithm 3. Its line 7 adds the noise a second time; here it is added once, to the difference.
    """
    query = RecursiveDifference(decay)
    decays: Any = np.asarray(decay, dtype=np.float64).tolist()
    common.setdefault(
        "strategy", Recommended(momentum=_momentum(common), decay=tuple(decays) if isinstance(decays, list) else decays)
    )
    return assemble(
        "srg_memf", common, query=query, filter=Accumulation(decay), base="momentum"
    )  # fmt: skip


def accelerated_srgd(*, variant: str = "accelerated", **common: Unpack[Shared]) -> Method:
    """Accelerated-DP-SRGD: Nesterov's method on private prefix sums of gradient differences, for one epoch.

    Parameters
    ----------
    variant : {"accelerated", "unaccelerated", "independent"}
        The method; without the coupling; with independent batch gradients instead of differences.
    **common
        See `dpcore.methods.Shared`; lr is 1/beta, `radius` that of the constraint ball around 0. `strategy` is "tree"
        by default (None with "independent"). `max_grad_norm` bounds ``eta_t grad(x_t) - eta_{t-1} grad(x_{t-1})``;
        theory takes 4 L + 8 M diam.

    Notes
    -----
    The answer is y, not the parameters at which the gradients are taken; `dpcore.theory` has the theory's parameters.

    References
    ----------
    DP-SRG, algorithm 1, section 4.3 and theorem 4.11.
    """
    update = Accelerated(learning_rate("accelerated_srgd", common), variant)
    if variant == "independent":
        return assemble("accelerated_srgd", common, update=update)
    common.setdefault("strategy", "tree")
    return assemble(
        "accelerated_srgd", common, query=AcceleratedDifference(), filter=Accumulation(1.0), update=update
    )  # fmt: skip


def _momentum(common: Mapping[str, Any]) -> float:
    """Return the momentum for which a strategy is chosen; of an adaptive update 0, whose steps are not linear."""
    base = common.get("base", "momentum")
    if isinstance(base, str):
        return validate.decay(momentum=common.get("momentum", _MOMENTUM)) if base in ("momentum", "nesterov") else 0.0
    return base.momentum if isinstance(base, Momentum | Nesterov) else 0.0
