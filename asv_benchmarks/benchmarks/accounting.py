"""Accountants: how long they take, how much memory, and what they say of fixed plans."""

from __future__ import annotations

from typing import Any

from dpcore import accounting

from .common import CHECK

STEPS = (1_000, 100_000)
PHASES = (100,) if CHECK else (1_000, 5_000)

# (sample rate, noise multiplier, steps, delta): those of the project's speed targets.
SETTINGS = {
    "small": (0.01, 1.1, 1_000, 1e-6),
    "typical": (0.004, 1.0, 10_000, 1e-5),
    "long": (0.001, 0.8, 100_000, 1e-6),
    "little noise": (0.01, 0.3, 10_000, 1e-6),
    "epsilon 1000": (0.1, 0.4, 6_000, 1e-6),
    "rare and quiet": (1e-4, 30.0, 10, 1e-9),
}


def _event(noise_multiplier: float = 1.1, steps: int = 1_000) -> Any:
    return accounting.PoissonSampledGaussian(sample_rate=0.01, noise_multiplier=noise_multiplier, steps=steps)


def _setting(name: str) -> tuple[Any, float]:
    rate, noise_multiplier, steps, delta = SETTINGS[name]
    return accounting.PoissonSampledGaussian(rate, noise_multiplier, steps), delta


def _schedule(phases: int) -> Any:
    """Rate and noise both change at every step."""
    return accounting.Composed(
        tuple(
            accounting.PoissonSampledGaussian(0.001 + 0.01 * i / phases, 2.0 - i / phases, 1 + i % 3)
            for i in range(phases)
        )
    )


def _forget() -> None:
    """Empty the caches, so that each round computes what it times."""
    from dpcore.accounting.pld import intervals

    for part in vars(intervals).values():
        if hasattr(part, "cache_clear"):
            part.cache_clear()


class Epsilon:
    """Epsilon of one event."""

    params = STEPS
    param_names = ("steps",)

    def setup(self, steps: int) -> None:
        self.time_rdp(steps)  # scipy imports its parts at first use

    def time_rdp(self, steps: int) -> None:
        accounting.epsilon(_event(steps=steps), 1e-6, "rdp")


class Pld:
    """A certified interval of epsilon."""

    params = tuple(SETTINGS)
    param_names = ("setting",)

    def setup(self, setting: str) -> None:
        self.time_interval(setting)

    def time_interval(self, setting: str) -> None:
        _forget()
        accounting.epsilon_interval(*_setting(setting))

    def peakmem_interval(self, setting: str) -> None:
        _forget()
        accounting.epsilon_interval(*_setting(setting))

    def track_relative_gap(self, setting: str) -> float:
        interval = accounting.epsilon_interval(*_setting(setting))
        return interval.gap / interval.upper


class Imported:
    """Peak memory of nothing but the imports: to be subtracted."""

    def peakmem_reference(self) -> None:
        import dpcore.accounting.pld  # noqa: F401


class Schedules:
    """Events of thousands of different steps."""

    params = PHASES
    param_names = ("phases",)
    timeout = 120

    def setup(self, phases: int) -> None:
        self.event = _schedule(phases)
        accounting.epsilon(_schedule(20), 1e-6, "rdp")

    def time_rdp(self, phases: int) -> None:
        accounting.epsilon(self.event, 1e-6, "rdp")

    def time_pld(self, phases: int) -> None:
        _forget()
        accounting.epsilon(self.event, 1e-6, "pld")

    def peakmem_pld(self, phases: int) -> None:
        _forget()
        accounting.epsilon(self.event, 1e-6, "pld")


class Calibrate:
    """The setting that meets a target."""

    def setup(self) -> None:
        self.time_gaussian()
        self.time_noise_pld()

    def time_poisson_rdp(self) -> None:
        accounting.calibrate("noise_multiplier", 3.0, 1e-5, _event, "rdp")

    def time_gaussian(self) -> None:
        accounting.analytic_noise_multiplier(3.0, 1e-5)

    def time_noise_pld(self) -> None:
        _forget()
        accounting.calibrate("noise_multiplier", 3.0, 1e-5, lambda sigma: _event(sigma, 10_000), "pld")

    def time_steps_pld(self) -> None:
        _forget()
        accounting.calibrate("steps", 3.0, 1e-5, lambda steps: _event(1.0, steps), "pld")


class Guarantees:
    """Epsilon of fixed plans: a step in this chart is a change of the accounting, wanted or not."""

    unit = "epsilon"

    def track_poisson_rdp(self) -> float:
        return accounting.epsilon(_event(), 1e-6, "rdp")

    def track_poisson_pld(self) -> float:
        return accounting.epsilon(_event(), 1e-6, "pld")

    def track_mnist_rdp(self) -> float:
        return accounting.epsilon(self._mnist(), 1e-5, "rdp")

    def track_mnist_pld(self) -> float:
        return accounting.epsilon(self._mnist(), 1e-5, "pld")

    def _mnist(self) -> Any:
        return accounting.PoissonSampledGaussian(sample_rate=256 / 60_000, noise_multiplier=1.0, steps=10 * 234)

    def track_fixed_order_gaussian(self) -> float:
        return accounting.epsilon(accounting.Gaussian(noise_multiplier=2.0, count=10), 1e-5, "gaussian")

    def track_fixed_size_rdp(self) -> float:
        event = accounting.FixedSizeSampledGaussian(60_000, 256, noise_multiplier=0.6, steps=2_340)
        return accounting.epsilon(event, 1e-5, "rdp")


class RandomAllocation:
    """Certified epsilon of epochs of random allocation: what it takes, and how far its ends are apart."""

    params = ((1.0,), (64,), (1, 10)) if CHECK else ((0.6, 1.0, 2.0), (64, 235, 2000), (1, 10))
    param_names = ("noise multiplier", "batches", "epochs")

    def setup(self, noise_multiplier: float, batches: int, epochs: int) -> None:
        accounting.epsilon_interval(accounting.RandomAllocationGaussian(8, 1.5, 1), 1e-6)  # imports

    def _interval(self, noise_multiplier: float, batches: int, epochs: int) -> Any:
        from dpcore.accounting.pld import allocation

        _forget()
        for part in vars(allocation).values():
            if hasattr(part, "cache_clear"):
                part.cache_clear()
        return accounting.epsilon_interval(accounting.RandomAllocationGaussian(batches, noise_multiplier, epochs), 1e-6)

    def time_interval(self, noise_multiplier: float, batches: int, epochs: int) -> None:
        self._interval(noise_multiplier, batches, epochs)

    def track_width(self, noise_multiplier: float, batches: int, epochs: int) -> float:
        return float(self._interval(noise_multiplier, batches, epochs).gap)
