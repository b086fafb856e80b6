"""The plan: a sampler, a method and a number of steps that fit together, and the event that follows from them."""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy

from dpcore import accounting
from dpcore.accounting import Adjacency, Composed, Event, Gaussian, NonPrivate
from dpcore.clipping import Grouping, Sensitivity
from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.keys import CALLER, EXACT, Provenance
from dpcore.method import Method
from dpcore.report.statement import Statement
from dpcore.sampling import Sampler
from dpcore.spec.layout import Layout
from dpcore.validate import integer, non_negative
from dpcore.version import __version__

# How far the method's denominator may be from the sampler's expected batch size: rounding of the rate, no more.
_BATCH_SIZE_TOLERANCE = 1e-3

CAVEATS = (
    "The number of examples n and the sampling rate are treated as public.",
    "The analysis is of real-valued Gaussian noise; the rounding of floating-point numbers is not covered.",
    "Choosing hyper-parameters, or when to stop, by looking at results on the same data is not accounted for.",
    "The unit of privacy is one example: a person with several examples has less protection than stated.",
)
SECRET_BATCHES = "The batches are secret: how long a step takes, which tells how many examples it had, is not covered."


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
        If the method's batch size is not the sampler's: the average's denominator and the accounted rate must agree.
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

    @cached_property
    def grouping(self) -> Grouping:
        """The clipping groups of this plan's tensors."""
        return self.method.clip.grouping(self.tensors)

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """The bound on one example's contribution to a sum."""
        return self.method.clip.sensitivity(self.grouping)

    @property
    def noise_standard_deviation(self) -> float:
        """Standard deviation of the noise on each coordinate of the *sum* (before the division by B)."""
        return self.sensitivity.standard_deviation(self.noise_multiplier)

    @property
    def event(self) -> Event:
        """What the whole planned run releases."""
        return self.event_after(self.steps)

    def event_after(self, steps: int, abandoned: int = 0) -> Event:
        """Return what the first `steps` steps release, and `abandoned` others that a run went back behind.

        Where every step draws anew, abandoned steps are steps like the others. Where an order is kept, nothing is
        known of which batches they met, so that each may have met the same example once more.
        """
        sigma = self.noise_multiplier
        if not abandoned:
            return self.sampler.event(sigma, steps)
        if not self.sampler.keeps_order:
            return self.sampler.event(sigma, steps + abandoned)
        return Composed((self.sampler.event(sigma, steps), Gaussian(sigma, abandoned, Adjacency.ZERO_OUT)))

    def epsilon(self, delta: float, *, steps: int | None = None, accountant: str = "rdp") -> float:
        """Return epsilon at `delta` after `steps` steps (all planned ones by default)."""
        taken = self.steps if steps is None else integer(0, steps=steps)
        return accounting.epsilon(self.event_after(taken), delta, accountant)

    def calibrated(self, target_epsilon: float, target_delta: float, *, accountant: str = "rdp") -> Plan:
        """Return the plan at the smallest noise multiplier that meets the target.

        Raises
        ------
        PrivacyError
            If no noise multiplier reaches the target, or the accountant does not cover the sampler.
        """
        sigma = accounting.calibrate_noise_multiplier(
            target_epsilon, target_delta, lambda multiplier: self.sampler.event(multiplier, self.steps), accountant
        )
        return replace(self, method=self.method.with_noise_multiplier(sigma))

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
        rng: str = "chacha20",
        layout: Layout | None = None,
        caller_noise: bool = False,
        caveats: tuple[str, ...] = (),
        note: str = "",
        software: dict[str, str] | None = None,
    ) -> Statement:
        """Return the privacy statement after `steps_taken` steps (and `abandoned` ones).

        Parameters
        ----------
        delta : float
            Where epsilon is stated.
        steps_taken, abandoned : int
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
        """
        non_negative(delta=delta)
        event, planned = self.event_after(steps_taken, abandoned), self.event_after(self.steps, abandoned)
        said = [*CAVEATS, *([] if self.sampler.keeps_order else [SECRET_BATCHES]), *caveats]
        if caller_noise:
            event = planned = NonPrivate("the noise was supplied by the caller")
        if rng != "chacha20":
            event = planned = NonPrivate(f"the noise came from {rng}, which is not cryptographic")
        if keys.origin.startswith(CALLER):
            said.append("The guarantee holds only while the caller's key stays secret.")
        if keys.origin == EXACT:
            said.append("It holds only if no other run used that key: two runs with one exact key share all noise.")
        if keys.forks:
            said.append(
                f"The run was resumed {keys.forks} time(s) from a checkpoint, under fresh noise; steps that another "
                "process took after such a checkpoint are further releases, and are not counted here."
            )
        if abandoned:
            said.append(f"Epsilon counts {abandoned} further step(s), which were released and then abandoned.")
        clip = self.method.describe()["clip"]
        if not isinstance(clip["groups"], str):
            del clip["max_grad_norm"]
        return Statement(
            adjacency=str(planned.adjacency or "none"),
            sampler=self.sampler.describe(),
            clip={**clip, "tensor_groups": len(self.grouping.names), "sensitivity": self.sensitivity.contribution},
            noise={
                **self.method.describe()["noise"],
                "mechanism": "Gaussian",
                "standard_deviation_on_sum": self.noise_standard_deviation,
                **({} if layout is None else {"layout_sha256": layout.digest()}),
            },
            method=self.method.describe(),
            steps_planned=self.steps,
            steps_taken=steps_taken,
            delta=delta,
            epsilon=_epsilons(event, delta),
            epsilon_planned=_epsilons(planned, delta),
            event=event.to_dict(),
            randomness={
                "rng": rng,
                "cryptographic": rng == "chacha20" and not caller_noise,
                "key": "none: noise supplied by the caller" if caller_noise else keys.origin,
                "forks": keys.forks,
            },
            caveats=tuple(said),
            software={**versions(), "backend": backend, **(software or {})},
            note=note,
        )


def _epsilons(event: Event, delta: float) -> dict[str, float]:
    names = accounting.accountants_for(event)
    if not names:
        return {"none": math.inf}
    return {name: accounting.epsilon(event, delta, name) for name in names}


def versions() -> dict[str, str]:
    """Return the versions that a statement records."""
    return {
        "dpcore": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
