"""Accountants: how long they take, and what they say of fixed plans."""

from __future__ import annotations

from typing import Any

from dpcore import accounting

STEPS = (1_000, 100_000)


def _event(noise_multiplier: float = 1.1, steps: int = 1_000) -> Any:
    return accounting.PoissonSampledGaussian(sample_rate=0.01, noise_multiplier=noise_multiplier, steps=steps)


class Epsilon:
    """Epsilon of one event."""

    params = STEPS
    param_names = ("steps",)

    def setup(self, steps: int) -> None:
        self.time_rdp(steps)  # scipy's parts are imported where they are first used

    def time_rdp(self, steps: int) -> None:
        accounting.epsilon(_event(steps=steps), 1e-6, "rdp")


class Calibrate:
    """The noise multiplier that meets a target."""

    def setup(self) -> None:
        self.time_gaussian()

    def time_poisson_rdp(self) -> None:
        accounting.calibrate_noise_multiplier(3.0, 1e-5, _event, "rdp")

    def time_gaussian(self) -> None:
        accounting.analytic_noise_multiplier(3.0, 1e-5)


class Guarantees:
    """Epsilon of fixed plans: a step in this chart is a change of the accounting, wanted or not."""

    unit = "epsilon"

    def track_poisson_rdp(self) -> float:
        return accounting.epsilon(_event(), 1e-6, "rdp")

    def track_mnist_rdp(self) -> float:
        event = accounting.PoissonSampledGaussian(sample_rate=256 / 60_000, noise_multiplier=1.0, steps=10 * 234)
        return accounting.epsilon(event, 1e-5, "rdp")

    def track_fixed_order_gaussian(self) -> float:
        return accounting.epsilon(accounting.Gaussian(noise_multiplier=2.0, count=10), 1e-5, "gaussian")
