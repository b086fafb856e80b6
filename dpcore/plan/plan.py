"""The plan: a sampler, a method and a number of steps that fit together, and the event that follows from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dpcore import accounting
from dpcore.accounting import Adjacency, Composed, Event, Gaussian, MatrixGaussian, NonPrivate
from dpcore.accounting.branches import Rows, count
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.plan import scales
from dpcore.sampling import Sampler, check_sampler
from dpcore.spec.grid import MOST_SHARE, bits_for, moved_share, step_of
from dpcore.spec.ops import FilterCoefficients
from dpcore.spec.rounded_normal import FRACTION_BITS
from dpcore.spec.validate import integer
from dpcore.stages.clipping import AdaptiveClip, Clip, Grouping, Sensitivity
from dpcore.stages.clipping.adaptive import limits
from dpcore.stages.clipping.clip import checked_sensitivity
from dpcore.stages.filters.base import check_filter
from dpcore.stages.method import Method
from dpcore.stages.queries import Phase, check_query
from dpcore.stages.strategies import check_steps, check_streaming, for_run, identify
from dpcore.stages.strategies.sensitivity import bands, largest_column_norm
from dpcore.stages.updates.rules import check_update

# How far the method's denominator may be from the sampler's expected batch size: rounding of the rate, no more.
_BATCH_SIZE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Plan:
    """The plan of a run, checked before anything runs.

    Parameters
    ----------
    method : Method
        Five stages.
    sampler : Sampler
        It chooses the batches, and yields the event.
    steps : int
        Number of steps planned.
    tensors : tuple of str
        Names of the tensors that are trained, in the order of the run's layout.

    Raises
    ------
    ArgumentError
        If the method's batch size is not the sampler's; if a strategy or a schedule does not fit the steps.
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
        whole: Any = for_run(strategy, self.steps, self.sampler.steps_per_epoch, self.sampler.amplified_bands)
        if whole is not strategy:
            noise = replace(self.method.noise, strategy=whole)  # type: ignore[type-var]
            object.__setattr__(self, "method", replace(self.method, noise=noise))
        self._check_sampling()
        if self.adaptive_clip is not None and self.method.noise.noise_multiplier is not None:
            self.noise_standard_deviation()  # refuses if the bits' noise leaves none
        if self.method.schedule is not None:
            self.method.schedule.check(self.steps)
        query = self.method.preconditioning
        if query is not None and query.unscaled_steps >= self.steps:
            raise ArgumentError(
                f"unscaled_steps={query.unscaled_steps!r}: must be less than the {self.steps} steps of the run, or no "
                "step is scaled; variant='post_processing' never scales"
            )
        # Settings that name every step must reach to the last one. Check now, not when the budget is half spent.
        check_query(self.method.query, self.steps)
        check_filter(self.method.filter, self.steps)
        check_update(self.method.update, self.steps)

    def _check_sampling(self) -> None:
        strategy, moment = self.method.noise.strategy, self.method.update.second_moment
        name = type(self.sampler).__name__
        if strategy is not None:
            check_steps(strategy, self.steps)
            check_streaming(strategy, self.steps)
            self.sampler.check_strategy(strategy, self.steps)
        # Given the batch, an example moves the pair of releases by at most the bound in `scales`, under zero-out.
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
                f"sampler={name}: joint moments need batches of one example, in a fixed order; use "
                "FixedOrderSampler(dataset_size=..., batch_size=1), sampling='fixed-order', or "
                "variant='independent_moments'"
            )

    @property
    def event(self) -> Event:
        """The event of the whole planned run."""
        return self.event_after(self.steps)

    def event_after(self, steps: int, abandoned: Sequence[Rows] | int = ()) -> Event:
        """Return the event of the first `steps` steps and of abandoned rows.

        `abandoned` has the rows (first, stop) of each branch that was left (`dpcore.accounting.branches`), or their
        number if the branches are unknown: each row then counts as its own branch, and under correlated noise as a
        whole planned run.

        Notes
        -----
        If every step draws afresh, abandoned steps are steps like the others. If an order is kept, a branch meets an
        example as often as the order does between `first` and `stop`.

        Under correlated noise a branch shares the rows of noise before `first` with its parent, and has its own rows
        from there. With C applied to the releases of each branch, all of them together are Gaussian noise
        of independent rows on C times the sums of that branch: once for every row. One example takes part at the same
        steps on every branch, so it moves the present branch by at most the sensitivity s of C, and the rows
        [first, stop) of another by at most that of these rows of C, s_b: mu^2 = (s^2 + sum s_b^2) / sigma^2. A step's
        sum may depend on earlier releases, and so may the beginning of a branch: the squares add up row by row. For
        cyclic sampling, `dpcore.sampling.cyclic_poisson` derives the cost of branches.
        """
        if integer(0, steps=steps) > self.steps:
            raise ArgumentError(f"steps={steps}: must be at most {self.steps}, the steps of the plan")
        return self._event(self.noise_multiplier, steps, abandoned)

    def _event(self, sigma: float, steps: int, abandoned: Sequence[Rows] | int = ()) -> Event:
        moment = self.method.update.second_moment
        if moment == "noiseless":
            return NonPrivate("the second moment is made of clipped gradients without noise")
        number = abandoned if isinstance(abandoned, int) else count(abandoned)
        if self.sampler.amplified_bands is not None:
            branches = number if isinstance(abandoned, int) else len(abandoned)
            strategy, (wide, norm) = self.method.noise.strategy, self._banded
            # Width and norm are of all planned steps: a shorter run's columns are parts of these.
            name = "identity" if strategy is None else identify(strategy)
            event: Event = self.sampler.banded_event(
                sigma, steps, number, branches, bands=wide, column_norm=norm, strategy=name
            )
        elif self.method.noise.strategy is not None:
            left = ((0, self.steps),) * abandoned if isinstance(abandoned, int) else tuple(abandoned)
            event = self._matrix_event(sigma, steps, self._reach(0, steps))
            if left:
                event = Composed((event, self._matrix_event(sigma, count(left), self._reach_of(left))))
        elif not number:
            event = self.sampler.event(sigma, steps)
        elif not self.sampler.keeps_order:
            event = self.sampler.event(sigma, steps + number)
        else:
            met = abandoned if isinstance(abandoned, int) else sum(self.sampler.meetings(*rows) for rows in abandoned)
            event = Composed((self.sampler.event(sigma, steps), Gaussian(sigma, met, self.sampler.adjacency)))
        # Joint moments: the same noise against replacement, where the vectors of an example move twice as far.
        return _replacing(event) if moment == "joint" else event

    def _matrix_event(self, sigma: float, rows: int, reach: float) -> MatrixGaussian:
        strategy = self.method.noise.strategy
        assert strategy is not None
        return MatrixGaussian(sigma, reach, rows, identify(strategy), Adjacency.ZERO_OUT)

    def _reach_of(self, left: tuple[Rows, ...]) -> float:
        """How far an example moves C times the sums in the rows of all branches that were left."""
        return math.hypot(*(self._reach(*rows) for rows in left))

    def _reach(self, first: int, stop: int) -> float:
        """How far an example moves C times the sums in rows [first, stop), if the sampler lets it take part."""
        strategy = self.method.noise.strategy
        assert strategy is not None
        if (first, stop) not in self._reaches:
            self._reaches[first, stop] = self.sampler.moved(strategy, stop, first) if first < stop else 0.0
        return self._reaches[first, stop]

    @cached_property
    def _banded(self) -> tuple[int, float]:
        strategy = self.method.noise.strategy
        return (
            (1, 1.0) if strategy is None else (bands(strategy, self.steps), largest_column_norm(strategy, self.steps))
        )

    @cached_property
    def _reaches(self) -> dict[Rows, float]:
        return {}

    @property
    def run_sensitivity(self) -> float | None:
        """How far an example moves C times the sums of the whole run, in clip norms; None without such an event."""
        if self.method.noise.strategy is None or self.method.update.second_moment == "noiseless":
            return None
        return self._reach(0, self.steps) if self.sampler.amplified_bands is None else self._banded[1]

    def epsilon(self, delta: float, *, steps: int | None = None, accountant: str | None = None) -> float:
        """Return epsilon at `delta` after `steps` steps (all planned ones by default).

        Without an accountant it is the smallest value of all that cover the run: each of them is an upper bound.
        """
        event = self.event_after(self.steps if steps is None else steps)
        if accountant is not None:
            return accounting.epsilon(event, delta, accountant)
        return accounting.smallest_epsilon(event, delta)[0]

    def calibrated(
        self,
        target_epsilon: float,
        target_delta: float,
        *,
        accountant: str | None = None,
        released: Callable[[Event], Event] = lambda run: run,
    ) -> "Plan":
        """Return the plan at the smallest noise multiplier that meets the target.

        The target is that of the event `released` makes of the run's: the run itself, or a selection of such runs.

        The accountant is by default the one that needs least noise: the epsilon of each that covers the run is an upper
        bound. Raises PrivacyError if no noise multiplier reaches the target, or it does not cover the sampler.
        """
        target = target_epsilon, target_delta
        sigma, _ = tightest("noise_multiplier", *target, lambda s: released(self._event(s, self.steps)), accountant)
        return replace(self, method=self.method.with_noise_multiplier(sigma))

    def check_covered(self, accountant: str | None = None) -> None:
        """Refuse a run that the accountant (or, by default, every accountant) cannot account for."""
        if accountant is not None or not accounting.accountants_for(self.event):
            accounting.epsilon(self.event, 0.5, accountant or "rdp")

    @property
    def batch_size(self) -> float:
        """The expected batch size B, the denominator of every average."""
        assert self.method.batch_size is not None
        return self.method.batch_size

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier sigma."""
        sigma = self.method.noise.noise_multiplier
        if sigma is None:
            raise PrivacyError(
                "noise_multiplier=None: must be given, or calibrated for a target_epsilon and target_delta"
            )
        return sigma

    def scaled(self, step: int) -> bool:
        """Whether the vectors of step `step` are scaled before they are clipped."""
        query = self.method.preconditioning
        return query is not None and query.phase(step) is not Phase.UNSCALED

    @property
    def adaptive_clip(self) -> AdaptiveClip | None:
        """The adaptation of the clip norm; None if it is fixed."""
        return getattr(self.method.clip, "adaptive", None)

    @property
    def clip_limits(self) -> tuple[float, ...]:
        """The least and the greatest norm that an adaptive clip can reach; empty if the norm is fixed."""
        return () if self.adaptive_clip is None else limits(self.method.clip.max_grad_norm)

    def clip_at(self, step: int = 0, norm: float | None = None) -> Clip:
        """The clip of step `step`; if it scales vectors, the clip of scaled vectors, with their own norm.

        An adaptive clip's norm is a release, unknown to the plan: here and below, `norm` is the mechanism's present
        norm, or None for that of the first step.
        """
        return self._clip(step, norm)[0]

    def grouping_at(self, step: int = 0, norm: float | None = None) -> Grouping:
        """The clipping groups of this plan's tensors at step `step`."""
        return self._clip(step, norm)[1]

    def sensitivity_at(self, step: int = 0, norm: float | None = None) -> Sensitivity:
        """The bound on one example's contribution to the sum of step `step`."""
        return self._clip(step, norm)[2]

    def _clip(self, step: int, norm: float | None) -> tuple[Clip, Grouping, Sensitivity]:
        if norm is None:
            return self._clips[self.scaled(step)]
        clip = replace(self.method.clip, max_grad_norm=norm)
        grouping = clip.grouping(self.tensors)
        return clip, grouping, checked_sensitivity(clip, grouping)

    @cached_property
    def _clips(self) -> dict[bool, tuple[Clip, Grouping, Sensitivity]]:
        plain, query = self.method.clip, self.method.preconditioning
        scaled = plain
        if query is not None and query.max_scaled_norm is not None:
            scaled = replace(plain, max_grad_norm=query.max_scaled_norm)
        clips = {}
        for key, clip in ((False, plain), (True, scaled)):
            grouping = clip.grouping(self.tensors)
            clips[key] = clip, grouping, checked_sensitivity(clip, grouping)
        return clips

    @property
    def bit_noise_standard_deviation(self) -> float:
        """Standard deviation of the noise on the sum of an adaptive clip's bits; 0 if the norm is fixed."""
        return 0.0 if self.adaptive_clip is None else self.adaptive_clip.noise_on_bits(self.batch_size)

    @property
    def gradient_noise_multiplier(self) -> float:
        """sigma, raised if the bits of an adaptive clip are released with the sum: `scales.raised_multiplier`."""
        if self.adaptive_clip is None:
            return self.noise_multiplier
        return scales.raised_multiplier(self.noise_multiplier, self.bit_noise_standard_deviation)

    def noise_standard_deviation(self, step: int = 0, norm: float | None = None) -> float:
        """Standard deviation of the seed noise on each coordinate of the *sum* of a step (before division by B)."""
        return scales.gradient_noise(
            self.method.update, self.gradient_noise_multiplier, self.sensitivity_at(step, norm).contribution
        )

    def square_noise_standard_deviation(self, step: int = 0) -> float:
        """Standard deviation of the noise on each coordinate of the squared average; 0 if none is released."""
        return scales.square_noise(
            self.method.update,
            self.noise_multiplier,
            self.sensitivity_at(step).contribution,
            self.batch_size,
            self.sampler.max_batch_size,
        )


def tightest(
    unknown: str,
    target_epsilon: float,
    target_delta: float,
    make_event: Callable[[Any], Event],
    accountant: str | None = None,
    dataset_size: int = 1,
) -> tuple[float, str]:
    """Return the result of `dpcore.accounting.calibrate` by the accountant that allows most, and its name.

    Each accountant that covers the event is asked; which ones do does not depend on the unknown's value. Of equal
    values the first is taken, whose accountant comes first in a statement.
    """
    names = [accountant] if accountant is not None else accounting.accountants_for(make_event(1))
    values: list[tuple[float, str]] = []
    refusals: list[Exception] = []
    for name in names or ["rdp"]:
        try:
            target: Any = target_epsilon, target_delta, make_event, name
            values.append((accounting.calibrate(unknown, *target, dataset_size=dataset_size), name))
        except (ArgumentError, PrivacyError) as refusal:  # another accountant may certify the target
            refusals.append(refusal)
    if not values:
        raise refusals[0]
    best = min if unknown == "noise_multiplier" else max
    return best(values, key=lambda pair: pair[0])


@dataclass(frozen=True)
class Grid:
    """The grid of a plan's releases, and how much larger their noise is because floating-point numbers round.

    Attributes
    ----------
    bits : int
        Binary digits of the grid (`dpcore.spec.grid`).
    raised, square_raised : float
        Shares by which the noise on the sum, and that on separately released squares, exceed the plan's, to cover the
        grid: 0 for independent noise on the sum.
    """

    bits: int
    raised: float
    square_raised: float


def grid_of(plan: Plan, dimension: int) -> Grid:
    """Return the grid of a plan for vectors of `dimension` coordinates.

    Parameters
    ----------
    plan : Plan
        With a noise multiplier.
    dimension : int
        Number of coordinates of all trained tensors together.

    Notes
    -----
    A square ``(S / B)^2`` rounds by ``3 2^-53`` of itself, which is at most ``B_max / 2`` of an example's effect on it
    according to `dpcore.plan.scales`; two of them differ by twice as much.

    Raises
    ------
    ArgumentError
        If float64 has no grid for the sums and their noise.
    """
    sigma, sampler, strategy = plan.noise_multiplier, plan.sampler, plan.method.noise.strategy
    if sigma == 0:
        return Grid(FRACTION_BITS, 0.0, 0.0)
    terms = sampler.likely_batch_size
    growth, rows, carried, moved = 1.0, 0, 1.0, 1 / plan.gradient_noise_multiplier
    coefficients = None if strategy is None else strategy.coefficients(0)
    if strategy is not None and (strategy.order or coefficients is None):  # else nothing comes from earlier rows
        growth = math.sqrt(float(np.max(strategy.inverse_row_norms(plan.steps))))
        rounded = isinstance(coefficients, FilterCoefficients) or getattr(coefficients, "keeps", "") == "output"
        rows, carried = plan.steps, 1.0 if rounded else math.sqrt(plan.steps) * max(growth, 1.0)
        moved *= plan.run_sensitivity or 1.0
    bits = bits_for(terms / sigma, max(growth, 1.0))
    if not 3 * step_of(plan.bit_noise_standard_deviation, bits) <= MOST_SHARE:  # see `RunningNorm.following`
        raise ArgumentError(
            f"bit_noise_std={plan.bit_noise_standard_deviation!r}: is so large that the grid of its noise, 2^-{bits} "
            f"of it, is as coarse as an example's bit; it must be at most {MOST_SHARE / 3 * 2.0**bits:.3g}"
        )
    # Independent moments have sqrt(2) times the noise, and a grid that is as much coarser.
    grid = math.sqrt(2) * moved_share(bits, dimension, moved, rows=rows, carried=carried)
    squared = 0.0
    if plan.method.update.second_moment in ("independent", "joint"):
        squared = math.sqrt(2) * moved_share(bits, dimension, moved, rows=rows, carried=carried, squares=True)
    sums, squares = 1 / (1 - grid) - 1, (1 + 3 * terms * 2.0**-53) / (1 - squared) - 1
    return Grid(bits, squares if plan.method.update.second_moment == "joint" else sums, squares)


def _replacing(event: Event) -> Event:
    """Return an event under zero-out as the same noise relative to a replacement, of twice the sensitivity."""
    if isinstance(event, Composed):
        return Composed(tuple(map(_replacing, event.events)))
    assert isinstance(event, (Gaussian, MatrixGaussian))
    return replace(event, noise_multiplier=event.noise_multiplier / 2, adjacency=Adjacency.REPLACE_ONE)
