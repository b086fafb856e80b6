"""Privacy accounting: events describe releases, accountants bound their cost.

>>> from dpcore import accounting
>>> event = accounting.PoissonSampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
>>> round(accounting.epsilon(event, delta=1e-6), 2)
1.75
"""

from dpcore.accounting import base
from dpcore.accounting.base import Accountant, accountants_for
from dpcore.accounting.calibrate import calibrate
from dpcore.accounting.events import (
    Adjacency,
    Composed,
    CyclicPoissonSampledGaussian,
    Event,
    FixedSizeSampledGaussian,
    Gaussian,
    MatrixGaussian,
    NonPrivate,
    PoissonSampledGaussian,
    PrivateSelection,
    RandomAllocationGaussian,
    SelfComposed,
    TruncatedPoissonSampledGaussian,
    nested,
)
from dpcore.accounting.gaussian import GaussianAccountant, analytic_noise_multiplier
from dpcore.accounting.other_libraries import OPACUS_ASSUMPTIONS, from_opacus
from dpcore.accounting.pld import Interval, PldAccountant, TradeOff, curve, delta_interval, epsilon_interval, trade_off
from dpcore.accounting.renyi import RdpAccountant
from dpcore.spec import validate

__all__ = [
    "OPACUS_ASSUMPTIONS", "Accountant", "Adjacency", "Composed", "CyclicPoissonSampledGaussian", "Event",
    "FixedSizeSampledGaussian", "Gaussian", "GaussianAccountant", "Interval", "MatrixGaussian", "NonPrivate",
    "PldAccountant", "PoissonSampledGaussian", "PrivateSelection", "RandomAllocationGaussian", "RdpAccountant",
    "SelfComposed", "TradeOff", "TruncatedPoissonSampledGaussian", "accountants_for", "analytic_noise_multiplier",
    "available_accountants", "calibrate", "curve", "delta", "delta_interval", "delta_remark", "epsilon",
    "epsilon_interval", "epsilons", "from_opacus", "known_dataset_size", "smallest_epsilon", "trade_off",
]  # fmt: skip


def epsilon(event: Event, delta: float, accountant: str | Accountant | None = None) -> float:
    """Return an epsilon for which the event is (epsilon, delta)-differentially private under its adjacency.

    Parameters
    ----------
    event : Event
        The releases.
    delta : float
        0 < delta < 1.
    accountant : str or Accountant, optional
        One of `accountants_for(event)`, the first of them by default.

    Returns
    -------
    float
        An upper bound on the smallest epsilon, 0 or more; infinity when there is no guarantee. That of "pld" is, as a
        rule, within max(1e-3 epsilon, 1e-4) of it; `epsilon_interval` has a lower bound.

    Raises
    ------
    ArgumentError, PrivacyError
        If delta is outside (0, 1), or the accountant is unknown; if it does not cover the event.
    """
    chosen = base.find(accountant, event)
    base.demand_support(chosen, event)
    return chosen.epsilon(event, validate.open_unit(delta=delta))


def delta(event: Event, epsilon: float, accountant: str | Accountant | None = None) -> float:
    """Return a delta for which the event is (epsilon, delta)-differentially private under its adjacency.

    The inverse of `epsilon` in the other argument: same `accountant`, errors and guarantees. `epsilon` must be
    finite and at least 0; the result is at most 1, and 0.0 if it is too small for a float64.
    """
    chosen = base.find(accountant, event)
    base.demand_support(chosen, event)
    return chosen.delta(event, validate.non_negative(epsilon=epsilon))


def epsilons(event: Event, delta: float) -> dict[str, float]:
    """Return epsilon by accountant, of all in `accountants_for` the event: each is an upper bound at `delta`.

    Raises
    ------
    PrivacyError
        If none covers the event.
    """
    names = accountants_for(event) or (None,)  # None: says which event it is that nobody covers
    return {str(name): epsilon(event, delta, name) for name in names}


def smallest_epsilon(event: Event, delta: float) -> tuple[float, str]:
    """Return the smallest of the accountants' epsilons at `delta`, and the name of its accountant.

    Each of them is an upper bound, so the smallest holds.

    Raises
    ------
    PrivacyError
        If no accountant covers the event.
    """
    return min((value, name) for name, value in epsilons(event, delta).items())


def available_accountants() -> tuple[str, ...]:
    """Return the names of all accountants."""
    return tuple(base.ACCOUNTANTS)


def delta_remark(delta: float, dataset_size: int | None) -> str | None:
    """Return one sentence if delta is at least 1/n, else None.

    Publishing one random example in full is (0, 1/n)-differentially private: such a delta allows it.

    Parameters
    ----------
    delta : float
        0 < delta < 1.
    dataset_size : int or None
        n, the number of examples (or of users, if users are protected); None if unknown, which gives no remark.
    """
    delta = validate.open_unit(delta=delta)
    if dataset_size is None:
        return None
    size = validate.integer(dataset_size=dataset_size, minimum=1)
    if delta * size < 1.0:
        return None
    return (
        f"delta={delta!r}: is at least 1/n for n = {size} examples, so that publishing one random example in full "
        f"would be within it; take one well below {1.0 / size:.3g}"
    )


def known_dataset_size(event: Event) -> int | None:
    """Return the largest number of examples that a part of the event names, None if no part does."""
    sizes = (getattr(part, "dataset_size", None) for part in nested(event))
    return max((size for size in sizes if size is not None), default=None)
