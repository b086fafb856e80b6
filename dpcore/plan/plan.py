"""The plan: a sampler, a method and a number of steps that fit together, and the event that follows from them."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from dpcore import accounting
from dpcore.accounting import Adjacency, Composed, Event, Gaussian, MatrixGaussian, NonPrivate
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.plan import scales
from dpcore.sampling import FixedOrderSampler, Sampler, UserSampler
from dpcore.spec.keys import Provenance
from dpcore.spec.layout import Layout
from dpcore.spec.validate import integer, non_negative
from dpcore.spec.version import __version__
from dpcore.stages.clipping import AdaptiveClip, Clip, Grouping, Sensitivity
from dpcore.stages.clipping.adaptive import limits
from dpcore.stages.method import Method
from dpcore.stages.queries import Phase
from dpcore.stages.strategies import NamedStrategy, Strategy, check_steps, check_streaming, identify, sensitivity
from dpcore.stages.strategies.bands import bands, largest_column_norm
from dpcore.stages.strategies.blocks import block_sensitivity
from dpcore.statement.build import state
from dpcore.statement.statement import Statement

# How far the method's denominator may be from the sampler's expected batch size: rounding of the rate, no more.
_BATCH_SIZE_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Plan:
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
        if not all(hasattr(self.sampler, member) for member in ("indices", "event", "expected_batch_size")):
            raise ArgumentTypeError(f"sampler={self.sampler!r}: must be a sampler from dpcore.sampling")
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
            self._check_participation(strategy, name)
        # Given the batch, an example moves the pair of releases by at most what `scales` says, under zero-out.
        bounded = self.sampler.max_batch_size is not None and self.sampler.adjacency is Adjacency.ZERO_OUT
        if moment == "independent" and not bounded:
            raise PrivacyError(
                f"sampler={name}: independent moments need a hard maximum of examples in a batch, since their "
                "sensitivity grows with it, and zero-out adjacency; use dpcore.sampling.FixedOrderSampler or "
                "TruncatedPoissonSampler"
            )
        single = self.sampler.max_batch_size == 1 and self.batch_size == 1 and self.sampler.keeps_order
        if moment == "joint" and not single:
            raise PrivacyError(
                f"sampler={name}: joint moments hold for batches of one example only, in a fixed order; use "
                "dpcore.sampling.FixedOrderSampler(dataset_size=..., batch_size=1), or variant='independent_moments'"
            )

    def _check_participation(self, strategy: Strategy, name: str) -> None:
        if hasattr(self._drawing, "banded_event"):
            groups, found = self._drawing.groups, bands(strategy, self.steps)
            if found > groups:
                raise PrivacyError(
                    f"sampler={name}: its amplification holds for strategies of at most as many bands as groups, "
                    f"{groups}, and {strategy.describe()['kind']} has {found} (a banded inverse makes no banded "
                    "matrix); use dpcore.stages.strategies.BandedToeplitz or Banded with fewer bands, more groups, or "
                    "dpcore.sampling.FixedOrderSampler"
                )
        elif not (hasattr(self._drawing, "patterns") or hasattr(self._drawing, "blocks")):
            raise PrivacyError(
                f"sampler={name}: correlated noise is accounted for by the steps at which an example takes part, "
                "which must be fixed; use dpcore.sampling.FixedOrderSampler, or strategy=None with this sampler"
            )

    @property
    def _drawing(self) -> Any:
        """What draws the units of privacy: the sampler, or the one of users that it is made of."""
        return self.sampler.sampler if isinstance(self.sampler, UserSampler) else self.sampler

    @property
    def batch_size(self) -> float:
        """The expected batch size B, the denominator of every average."""
        assert self.method.batch_size is not None
        return self.method.batch_size

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier sigma.

        Raises
        ------
        PrivacyError
            If it has not been calibrated.
        """
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
        """How the clip norm is adapted; None where it is fixed."""
        return getattr(self.method.clip, "adaptive", None)

    @property
    def clip_limits(self) -> tuple[float, ...]:
        """The least and the greatest norm that an adaptive clip may come to; empty where the norm is fixed."""
        return () if self.adaptive_clip is None else limits(self.method.clip.max_grad_norm)

    def clip_at(self, step: int = 0, norm: float | None = None) -> Clip:
        """The clip of step `step`: of scaled vectors, with their own norm, where they are scaled.

        An adaptive clip's norm is a release, which the plan cannot know: here and below, `norm` is the one in force at
        the step, known to the mechanism, or None for that of the first step.
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
        return clip, grouping, clip.sensitivity(grouping)

    @cached_property
    def _clips(self) -> dict[bool, tuple[Clip, Grouping, Sensitivity]]:
        plain, query = self.method.clip, self.method.preconditioning
        scaled = plain
        if query is not None and query.max_scaled_norm is not None:
            scaled = replace(plain, max_grad_norm=query.max_scaled_norm)
        found = {}
        for key, clip in ((False, plain), (True, scaled)):
            grouping = clip.grouping(self.tensors)
            found[key] = clip, grouping, clip.sensitivity(grouping)
        return found

    @property
    def bit_noise_standard_deviation(self) -> float:
        """Standard deviation of the noise on the sum of an adaptive clip's bits; 0 where the norm is fixed."""
        return 0.0 if self.adaptive_clip is None else self.adaptive_clip.noise_on_bits(self.batch_size)

    @property
    def gradient_noise_multiplier(self) -> float:
        """sigma, raised where the bits of an adaptive clip are released beside the sum: `scales.raised_multiplier`."""
        if self.adaptive_clip is None:
            return self.noise_multiplier
        return scales.raised_multiplier(self.noise_multiplier, self.bit_noise_standard_deviation)

    def noise_standard_deviation(self, step: int = 0, norm: float | None = None) -> float:
        """Standard deviation of the seed noise on each coordinate of the *sum* of a step (before division by B)."""
        return scales.gradient_noise(
            self.method.update, self.gradient_noise_multiplier, self.sensitivity_at(step, norm).contribution
        )

    def square_noise_standard_deviation(self, step: int = 0) -> float:
        """Standard deviation of the noise on each coordinate of the squared average; 0 where none is released."""
        return scales.square_noise(
            self.method.update,
            self.noise_multiplier,
            self.sensitivity_at(step).contribution,
            self.batch_size,
            self.sampler.max_batch_size,
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
        if hasattr(self._drawing, "banded_event"):
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
            if isinstance(self._drawing, FixedOrderSampler):
                met = (abandoned - apart) // self._drawing.steps_per_epoch + apart
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
        assert strategy is not None
        known = self._sensitivities
        if steps not in known:
            known[steps] = self._moved(strategy, steps) if steps else 0.0
        return MatrixGaussian(sigma, known[steps], steps, identify(strategy), Adjacency.ZERO_OUT)

    def _moved(self, strategy: Strategy, steps: int) -> float:
        if hasattr(self._drawing, "blocks"):
            return block_sensitivity(strategy, self._drawing.blocks(steps), steps)
        return sensitivity(strategy, self._drawing.patterns(steps), steps)

    def _banded_event(self, sigma: float, steps: int, abandoned: int) -> Event:
        strategy = self.method.noise.strategy
        if strategy is None:
            wide, norm, name = 1, 1.0, "identity"
        else:  # of all planned steps: a shorter run's columns are parts of these
            wide, norm = self._banded
            name = identify(strategy)
        event: Event = self._drawing.banded_event(
            sigma, steps, abandoned, bands=wide, column_norm=norm, strategy=name
        )  # fmt: skip
        return event

    @cached_property
    def _banded(self) -> tuple[int, float]:
        strategy = self.method.noise.strategy
        assert strategy is not None
        return bands(strategy, self.steps), largest_column_norm(strategy, self.steps)

    @cached_property
    def _sensitivities(self) -> dict[int, float]:
        return {}

    def epsilon(self, delta: float, *, steps: int | None = None, accountant: str | None = None) -> float:
        """Return epsilon at `delta` after `steps` steps (all planned ones by default).

        Without an accountant it is the smallest value of all that cover the run: each of them is an upper bound.
        """
        event = self.event_after(self.steps if steps is None else integer(0, steps=steps))
        names = [accountant] if accountant is not None else accounting.accountants_for(event)
        return min(accounting.epsilon(event, delta, name) for name in names or ["rdp"])

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

    def statement(
        self,
        delta: float,
        *,
        steps_taken: int,
        keys: Provenance,
        backend: str,
        abandoned: int = 0,
        branches: int | None = None,
        rng: str = "chacha20",
        layout: Layout | None = None,
        caller_noise: bool = False,
        caveats: tuple[str, ...] = (),
        note: str = "",
        software: dict[str, str] | None = None,
        ledger: dict[str, Any] | None = None,
    ) -> Statement:
        """Return the privacy statement after `steps_taken` steps (and `abandoned` ones).

        Parameters
        ----------
        delta : float
            Where epsilon is stated.
        steps_taken, abandoned, branches : int
            See `event_after`.
        keys : Provenance
            Where the keys come from; `RunKeys` is one.
        backend, rng : str
            What computed, and what drew.
        layout : Layout, optional
            Its digest is recorded: it says which noise belongs to which coordinate.
        caller_noise : bool
            The noise was the caller's: nothing is private.
        caveats : tuple of str
            Further sentences.
        note : str
            On the moment of writing.
        software : dict, optional
            Further versions.
        ledger : dict, optional
            "ledger", "run" and "total", as in `dpcore.statement.Statement`.
        """
        return state(
            self,
            non_negative(delta=delta),
            steps_taken=steps_taken,
            abandoned=abandoned,
            branches=branches,
            keys=keys,
            rng=rng,
            layout=layout,
            caller_noise=caller_noise,
            caveats=caveats,
            note=note,
            software={**versions(), "backend": backend, **(software or {})},
            ledger=ledger or {},
        )


def _replacing(event: Event) -> Event:
    """Return an event under zero-out as the same noise relative to a replacement, of twice the sensitivity."""
    if isinstance(event, Composed):
        return Composed(tuple(map(_replacing, event.events)))
    assert isinstance(event, (Gaussian, MatrixGaussian))
    return replace(event, noise_multiplier=event.noise_multiplier / 2, adjacency=Adjacency.REPLACE_ONE)


def versions() -> dict[str, str]:
    """Return the versions that a statement records."""
    import scipy

    return {
        "dpcore": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
