"""A method: five stages, each a small frozen set of public settings, and additions that cost no privacy."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.ops import SECOND_MOMENT
from dpcore.spec.validate import plain, positive
from dpcore.stages.clipping import Clip
from dpcore.stages.filters import Filter, Identity
from dpcore.stages.noise import IndependentGaussian, Noise
from dpcore.stages.queries import Plain, Preconditioned, Query
from dpcore.stages.updates import Update
from dpcore.stages.updates.averaging import Averaging
from dpcore.stages.updates.galore import GaLore
from dpcore.stages.updates.schedules import Schedule, is_adaptive


@dataclass(frozen=True, kw_only=True)
class Method:
    """query -> clip -> sum -> noise -> filter -> update. Any combination is a method.

    Parameters
    ----------
    update : Update
        `dpcore.updates.SGD`, `Momentum`, `Nesterov`, `Adam`, `AdamW`, `AdaGrad` or `Accelerated`.
    query : Query
        `dpcore.queries.Plain`, `TwoPoint`, `ParameterWindow`, `RecursiveDifference`, `AcceleratedDifference`, or one
        of them `Preconditioned`.
    clip : Clip
        Rule, norm and groups.
    noise : Noise
        `dpcore.noise.IndependentGaussian` or `CorrelatedGaussian`.
    filter : Filter
        `dpcore.filters.Identity`, `LowPass`, `Averaging`, `Accumulation`, `ScalarKalman`, `OptimalFIR`, or several in
        a `Chain`.
    batch_size : float or None
        The *expected* batch size B, the one fixed denominator of every average, never the realized size of a batch.
        None takes the sampler's.
    schedule : Schedule or None
        A factor on the learning rate for each step.
    averaging : Averaging or None
        An average of the parameters over time, kept in addition to them.
    galore : GaLore or None
        Filter and update in a subspace of each matrix parameter.
    radius : float or None
        Parameters are projected onto the ball of this radius around 0 after every update.
    name : str
        For tables and statements.

    Notes
    -----
    Filter, update and everything after `batch_size` work on released vectors: they cost no privacy.
    """

    update: Update
    query: Query = field(default_factory=Plain)
    clip: Clip = field(default_factory=Clip)
    noise: Noise = field(default_factory=IndependentGaussian)
    filter: Filter = field(default_factory=Identity)
    batch_size: float | None = None
    schedule: Schedule | None = None
    averaging: Averaging | None = None
    galore: GaLore | None = None
    radius: float | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        plain(self)
        for name, (module, *members) in (_STAGES | _EXTRAS).items():
            value, extra = getattr(self, name), name in _EXTRAS
            missing = [member for member in members if isinstance(value, type) or not hasattr(value, member)]
            if missing and not (extra and value is None):
                words = "None or" if extra else "a stage"
                given = repr(value) if "\n" not in repr(value) else type(value).__name__  # some are long
                own = f"; one of your own must have {', '.join(missing)}, too" if len(missing) < len(members) else ""
                raise ArgumentTypeError(f"{name}={given}: must be {words} from dpcore.{module}{own}")
        for name in ("batch_size", "radius"):
            if getattr(self, name) is not None:
                positive(**{name: getattr(self, name)})
        self._check_combination()

    def _check_combination(self) -> None:
        """Refuse stages whose combination has no meaning, or none that is private."""
        update, adaptive, scaled = self.update, self.filter.adaptive, self.preconditioning
        moment, strategy, clip = update.second_moment, self.noise.strategy, getattr(self.clip, "adaptive", None)
        released, corrected = moment in ("filtered", "released", "public"), update.bias_corrected
        galore_fits = moment in ("filtered", "released") and update.rule != "accelerated" and not (adaptive or scaled)
        # fmt: off
        _refuse(scaled and scaled.max_scaled_norm is not None and not isinstance(self.clip.groups, str),
                "max_scaled_norm: must be None with a mapping of clipping_groups, which gives the norms itself")
        _refuse(scaled and update.rule not in SECOND_MOMENT,
                f"query=Preconditioned(...): needs an update with a second moment, such as Adam; "
                f"{update.rule!r} has none")
        _refuse(scaled and not (released or moment in ("delayed", "noiseless")),  # noiseless: claims no sensitivity
                f"second_moment={moment!r}: must be 'filtered', 'released' or 'public', or 'delayed', under a "
                "preconditioned query, which the sensitivity of a separate second moment does not cover")
        _refuse(moment == "delayed" and not (scaled and scaled.unscaled_steps),
                "second_moment='delayed': needs query=Preconditioned(...) with unscaled_steps of at least 1, whose "
                "average it squares")
        _refuse(scaled and (corrected or adaptive),
                "query=Preconditioned(...): the noise of its average differs from coordinate to coordinate, which "
                "bias_corrected and an adaptive filter do not allow for; take one of them away")
        # An adaptive clip norm: refuse methods whose derivation needs one clip norm throughout the run.
        _refuse(clip and strategy is not None,
                "adaptive_clip: must be None with correlated noise, whose seed noise has one standard deviation in all "
                "steps, while a clip norm that changes needs another in each; give strategy=None")
        _refuse(clip and not released,
                f"adaptive_clip: must be None with second_moment={moment!r}, whose sensitivity and noise are derived "
                "only for a gradient and its square; use variant='post_processing'")
        _refuse(clip and scaled,
                "adaptive_clip: must be None with a preconditioned query, whose scaled and unscaled vectors have norms "
                "in other units")
        _refuse(clip and corrected,
                "adaptive_clip: must be None with bias_corrected, which takes off the variance of noise that is known "
                "before the run, while a clip norm that changes changes it")
        _refuse(adaptive and strategy is not None,
                "filter: an adaptive filter estimates autocorrelations under independent noise; give strategy=None, or "
                "another filter")
        _refuse(adaptive and corrected and moment == "filtered",
                "bias_corrected=True: the noise behind an adaptive filter is not known beforehand; give "
                "second_moment='released'")
        plain_sgd = update.rule == "sgd" and isinstance(self.query, Plain) and isinstance(self.filter, Identity)
        _refuse(is_adaptive(self.schedule) and not (plain_sgd and strategy is None and self.galore is None),
                f"schedule={self.schedule!r}: is derived for released gradients with independent noise, and for SGD; "
                "take dp_sgd with base='sgd', without a strategy or galore")
        _refuse(self.galore is not None and not galore_fits,
                "galore: takes filters and second moments of the released gradient only, no preconditioned query and "
                "no accelerated coupling")
        # fmt: on
        inner = getattr(self.query, "query", None)
        while inner is not None:
            if isinstance(inner, Preconditioned):
                raise ArgumentError(
                    f"query={type(self.query).__name__}(...): Preconditioned is inside it, where nothing would "
                    "be scaled; put it outermost, Preconditioned(query=...)"
                )
            inner = getattr(inner, "query", None)

    @property
    def preconditioning(self) -> Preconditioned | None:
        """The query if it scales gradients before the clip, else None."""
        return self.query if isinstance(self.query, Preconditioned) else None

    def with_noise_multiplier(self, noise_multiplier: float) -> "Method":
        """Return the same method at another noise multiplier."""
        return replace(self, noise=self.noise.with_noise_multiplier(noise_multiplier))

    def describe(self) -> dict[str, Any]:
        """Return every setting as plain JSON values."""
        stages = {name: getattr(self, name) for name in (*_STAGES, *_EXTRAS)}
        described = {name: None if value is None else describe(value) for name, value in stages.items()}
        return {"name": self.name, "batch_size": self.batch_size, **described, "radius": self.radius}


# The module of each stage or optional part, and its required members.
_STAGES = {
    "query": ("queries", "points", "uses_displacement", "lags"),
    "clip": ("clipping", "rule", "grouping", "sensitivity"),
    "noise": ("noise", "noise_multiplier", "with_noise_multiplier", "strategy"),
    "filter": ("filters", "order", "coefficients", "adaptive"),
    "update": ("updates", "rule", "second_moment", "bias_corrected", "settings", "prepared"),
}
_EXTRAS = {
    "schedule": ("schedules", "factor", "check"), "averaging": ("averaging", "weight"),
    "galore": ("galore", "projection", "projects", "rank", "every"),
}  # fmt: skip


def _refuse(condition: object, message: str) -> None:
    if condition:
        raise ArgumentError(message)


def describe(stage: Any) -> dict[str, Any]:
    """Return a stage's kind and settings as plain JSON values."""
    if hasattr(stage, "describe"):
        return dict(stage.describe())
    described: dict[str, Any] = {"kind": type(stage).__name__}
    if is_dataclass(stage):
        settings = {setting.name: _plain(getattr(stage, setting.name)) for setting in fields(stage)}
        # Later settings are left out if they are not used: earlier states and statements stay equal.
        later = {setting.name for setting in fields(stage) if setting.metadata.get("described") == "if set"}
        described |= {name: value for name, value in settings.items() if value is not None or name not in later}
    return described


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return describe(value)
