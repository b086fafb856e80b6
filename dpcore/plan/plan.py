"""The plan: a sampler, a method and a number of steps that fit together, and the event that follows from them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from dpcore import accounting
from dpcore.accounting import Adjacency, Composed, Event, Gaussian, MatrixGaussian, NonPrivate
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.plan.step_scales import StepScales
from dpcore.sampling import Sampler, check_sampler
from dpcore.spec.validate import integer
from dpcore.stages.method import Method
from dpcore.stages.strategies import NamedStrategy, check_steps, check_streaming, identify
from dpcore.stages.strategies.bands import bands, largest_column_norm

# How far the method's denominator may be from the sampler's expected batch size: rounding of the rate, no more.
_BATCH_SIZE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Plan(StepScales):
    """What will be run, checked before anything is.

    Parameters
    ----------
    method : Method
        Five stages.
    sampler : Sampler
        What chooses the batches; the same object yields the event.
    steps : int
        Number of steps planned.
    tensors : tuple of str
        Names of the tensors that are trained, in the order of the run's layout.

    Raises
    ------
    ArgumentError
        If the method's batch size is not the sampler's: the average's denominator and the accounted rate must agree;
        if a strategy or a schedule does not fit the steps.
    PrivacyError
        If the privacy analysis of the noise or of a separate second moment does not cover the sampler.
    """

    method: Method
    sampler: Sampler
    steps: int
    tensors: tuple[str, ...] = ("x",)

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ArgumentTypeError(
                f"method={self.method!r}: must be a dpcore.Method, as dpcore.methods.dp_sgd(...) returns"
            )
        check_sampler(sampler=self.sampler)
        integer(1, steps=self.steps)
        expected = self.sampler.expected_batch_size
        if self.method.batch_size is None:
            object.__setattr__(self, "method", replace(self.method, batch_size=expected))
        elif not math.isclose(self.method.batch_size, expected, rel_tol=_BATCH_SIZE_TOLERANCE):
            raise ArgumentError(
                f"batch_size={self.method.batch_size!r}: the sampler draws {expected:g} examples a step on average, "
                "and the method must divide by that number"
            )

        strategy = self.method.noise.strategy
        if isinstance(strategy, NamedStrategy):
            noise = replace(self.method.noise, strategy=strategy.of(self.steps))  # type: ignore[type-var]
            object.__setattr__(self, "method", replace(self.method, noise=noise))
        self._check_sampling()
        if self.adaptive_clip is not None and self.method.noise.noise_multiplier is not None:
            self.noise_standard_deviation()  # is there any, beside that of the bits
        if self.method.schedule is not None:
            self.method.schedule.check(self.steps)
        query = self.method.preconditioning
        if query is not None and query.unscaled_steps >= self.steps:
            raise ArgumentError(
                f"unscaled_steps={query.unscaled_steps!r}: must be less than the {self.steps} steps of the run, or no "
                "step is scaled; variant='post_processing' never scales"
            )
        # Settings that name every step must reach to the last one; asked now, and not when the budget is half spent.
        self.method.query.points(self.steps - 1)
        if not self.method.filter.adaptive:
            self.method.filter.coefficients(self.steps - 1)

    def _check_sampling(self) -> None:
        strategy, moment = self.method.noise.strategy, self.method.update.second_moment
        name = type(self.sampler).__name__
        if strategy is not None:
            check_steps(strategy, self.steps)
            check_streaming(strategy, self.steps)
            self.sampler.check_strategy(strategy, self.steps)
        # Given the batch, an example moves the pair of releases by at most what `scales` says, under zero-out.
        bounded = self.sampler.max_batch_size is not None and self.sampler.adjacency is Adjacency.ZERO_OUT
        if moment == "independent" and not bounded:
            raise PrivacyError(
                f"sampler={name}: independent moments need a hard maximum of examples in a batch, since their "
                "sensitivity grows with it, and zero-out adjacency; use FixedOrderSampler "
                "(sampling='fixed-order') or TruncatedPoissonSampler ('truncated-poisson')"
            )
        single = self.sampler.max_batch_size == 1 and self.batch_size == 1 and self.sampler.keeps_order
        if moment == "joint" and not single:
            raise PrivacyError(
                f"sampler={name}: joint moments hold for batches of one example only, in a fixed order; use "
                "FixedOrderSampler(dataset_size=..., batch_size=1), sampling='fixed-order', or "
                "variant='independent_moments'"
            )

    @property
    def event(self) -> Event:
        """What the whole planned run releases."""
        return self.event_after(self.steps)

    def event_after(self, steps: int, abandoned: int = 0, branches: int | None = None) -> Event:
        """Return what the first `steps` steps release, and `abandoned` others that a run went back behind.

        Parameters
        ----------
        steps, abandoned : int
        branches : int, optional
            The abandoned steps lie on at most so many branches, on each of them one after the other. Without it every
            one of them is taken for a branch of its own.

        Notes
        -----
        Where every step draws anew, abandoned steps are steps like the others. Under correlated noise a branch counts
        as a whole planned run. Under an order that repeats after b steps, k steps in a row meet an example at most
        ceil(k / b) = floor((k - 1) / b) + 1 times, hence a steps on m branches at most floor((a - m) / b) + m times;
        under other kept orders each abandoned step may have met the same example once more. Under cyclic sampling
        `dpcore.sampling.cyclic_poisson` says what branches cost.
        """
        return self._event(self.noise_multiplier, steps, abandoned, branches)

    def _event(self, sigma: float, steps: int, abandoned: int = 0, branches: int | None = None) -> Event:
        # Abandoned steps lie on one branch at least.
        apart = abandoned if branches is None else min(abandoned, max(1, branches))
        moment = self.method.update.second_moment
        if moment == "noiseless":
            return NonPrivate("the second moment is made of clipped gradients without noise")
        if self.sampler.amplified_bands is not None:
            event: Event = self._banded_event(sigma, steps, abandoned)
        elif self.method.noise.strategy is not None:
            run = self._matrix_event(sigma, steps)
            event = Composed((run, *[self._matrix_event(sigma, self.steps)] * apart)) if apart else run
        elif not abandoned:
            event = self.sampler.event(sigma, steps)
        elif not self.sampler.keeps_order:
            event = self.sampler.event(sigma, steps + abandoned)
        else:
            met = abandoned
            if self.sampler.repeats_after is not None:
                met = (abandoned - apart) // self.sampler.repeats_after + apart
            event = Composed((self.sampler.event(sigma, steps), Gaussian(sigma, met, Adjacency.ZERO_OUT)))
        # Joint moments: the same noise against replacement, where the vectors of an example move twice as far.
        return _replacing(event) if moment == "joint" else event

    def _matrix_event(self, sigma: float, steps: int) -> MatrixGaussian:
        """The first `steps` rows as one Gaussian mechanism, at the participation that the sampler fixes.

        A branch that went back to step t0 shares the noise rows before t0 and has rows of its own from there. With C
        applied to both, what the two released is Gaussian noise of independent rows on C times the sums, once for the
        shared rows and once for each branch's own: the squared sensitivity is at most that of two whole runs.
        """
        strategy = self.method.noise.strategy
        return MatrixGaussian(sigma, self._moved(steps), steps, identify(strategy), Adjacency.ZERO_OUT)

    def _banded_event(self, sigma: float, steps: int, abandoned: int) -> Event:
        strategy = self.method.noise.strategy
        wide, norm = self._banded  # of all planned steps: a shorter run's columns are parts of these
        name = "identity" if strategy is None else identify(strategy)
        return self.sampler.banded_event(sigma, steps, abandoned, bands=wide, column_norm=norm, strategy=name)

    def _moved(self, steps: int) -> float:
        """How far one example moves C times the sums of so many steps, in clip norms."""
        known, strategy = self._sensitivities, self.method.noise.strategy
        assert strategy is not None
        if steps not in known:
            known[steps] = self.sampler.moved(strategy, steps) if steps else 0.0
        return known[steps]

    @cached_property
    def _banded(self) -> tuple[int, float]:
        strategy = self.method.noise.strategy
        return (
            (1, 1.0) if strategy is None else (bands(strategy, self.steps), largest_column_norm(strategy, self.steps))
        )

    @cached_property
    def _sensitivities(self) -> dict[int, float]:
        return {}

    @property
    def run_sensitivity(self) -> float | None:
        """How far an example moves C times the sums of the whole run, in clip norms; None without such an event."""
        if self.method.noise.strategy is None or self.method.update.second_moment == "noiseless":
            return None
        return self._moved(self.steps) if self.sampler.amplified_bands is None else self._banded[1]

    def epsilon(self, delta: float, *, steps: int | None = None, accountant: str | None = None) -> float:
        """Return epsilon at `delta` after `steps` steps (all planned ones by default).

        Without an accountant it is the smallest value of all that cover the run: each of them is an upper bound.
        """
        event = self.event_after(self.steps if steps is None else integer(0, steps=steps))
        if accountant is not None:
            return accounting.epsilon(event, delta, accountant)
        return accounting.smallest_epsilon(event, delta)[0]

    def calibrated(self, target_epsilon: float, target_delta: float, *, accountant: str | None = None) -> Plan:
        """Return the plan at the smallest noise multiplier that meets the target.

        Parameters
        ----------
        target_epsilon, target_delta : float
            The guarantee.
        accountant : str, optional
            By default the one that needs least noise: the epsilon of each that covers the run is an upper bound.

        Raises
        ------
        PrivacyError
            If no noise multiplier reaches the target, or the accountant does not cover the sampler.
        """
        names = [accountant] if accountant is not None else accounting.accountants_for(self._event(1.0, self.steps))
        found, refusals = [], []
        for name in names or ["rdp"]:
            try:
                sigma = accounting.calibrate_noise_multiplier(
                    target_epsilon, target_delta, lambda multiplier: self._event(multiplier, self.steps), name
                )
                found.append(sigma)
            except (ArgumentError, PrivacyError) as refusal:  # another accountant may certify the target
                refusals.append(refusal)
        if not found:
            raise refusals[0]
        return replace(self, method=self.method.with_noise_multiplier(min(found)))

    def check_covered(self, accountant: str | None = None) -> None:
        """Refuse a run that the accountant (or, by default, every accountant) cannot account for.

        Raises
        ------
        PrivacyError
            Naming the event and what would be covered.
        """
        covering = accounting.accountants_for(self.event)
        if accountant is None and covering:
            return
        accounting.epsilon(self.event, 0.5, accountant or "rdp")


def _replacing(event: Event) -> Event:
    """Return an event under zero-out as the same noise relative to a replacement, of twice the sensitivity."""
    if isinstance(event, Composed):
        return Composed(tuple(map(_replacing, event.events)))
    assert isinstance(event, (Gaussian, MatrixGaussian))
    return replace(event, noise_multiplier=event.noise_multiplier / 2, adjacency=Adjacency.REPLACE_ONE)
