"""Privacy-loss distributions with certified bounds on both sides.

>>> from dpcore.accounting import PoissonSampledGaussian
>>> from dpcore.accounting.pld import epsilon_interval
>>> event = PoissonSampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
>>> interval = epsilon_interval(event, delta=1e-6)
>>> round(interval.lower, 2), round(interval.upper, 2), interval.gap < 2e-3
(1.75, 1.75, True)
"""

from dpcore.accounting.pld.intervals import Interval, PldAccountant, delta_interval, epsilon_interval
from dpcore.accounting.pld.tradeoff import TradeOff, curve, trade_off

__all__ = ["Interval", "PldAccountant", "TradeOff", "curve", "delta_interval", "epsilon_interval", "trade_off"]
