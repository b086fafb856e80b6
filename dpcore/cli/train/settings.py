"""What a training run is set to: public values only, written to config.json as they are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dpcore.errors import ArgumentError
from dpcore.methods import BASES, METHODS
from dpcore.spec.validate import choice, decay, integer, positive
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.method import Method
from dpcore.stages.strategies import NamedStrategy
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.schedules import WarmupCosine

_SCALED = ("dp_adam", "dp_adagrad")
# Which methods take which of the options that not every method takes.
_ONLY_FOR = {
    "kappa": ("disk",),
    "gamma": ("disk",),
    "filter": ("doppler", "pmlf", "disk"),
    "filter_b": ("doppler", "pmlf"),
    "filter_a": ("doppler", "pmlf"),
    "bias_corrected": ("doppler",),
    "window": ("pmlf", "inner_outer"),
    "beta": ("pmlf", "inner_outer"),
    "outer_momentum": ("inner_outer",),
    "decay": ("srg_memf",),
    "variant": (*_SCALED, "accelerated_srgd"),
    "scale_eps": _SCALED,
    "max_scaled_norm": _SCALED,
    "unscaled_steps": _SCALED,
    "scaled_steps": _SCALED,
    "joint_scale": _SCALED,
    "allow_nonprivate": _SCALED,
    "base": ("dp_sgd", "doppler", "disk", "pmlf", "memf", "srg_memf"),
}
# Which update rules take which.
_ONLY_WITH = {
    "momentum": ("momentum", "nesterov"),
    "betas": ("adam", "adamw"),
    "eps": ("adam", "adamw", "adagrad"),
    "weight_decay": ("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "inner_outer"),
}
_UPDATES = {
    "dp_adam": "adam",
    "dp_adagrad": "adagrad",
    "memf": "momentum",
    "srg_memf": "momentum",
    "accelerated_srgd": "accelerated",
}
_CORRELATED = ("memf", "srg_memf", "accelerated_srgd")
# Variants whose sensitivity grows with a hard maximum of examples in a batch, which Poisson sampling does not have.
_FIXED_BATCHES = ("independent_moments", "joint_moments")

# Learning rates where none is given, by update rule: public constants, the reasons in docs/command-line.md. Those of
# adagrad, accelerated and inner_outer are reasoned, not searched.
DEFAULT_LR = {
    "sgd": 0.5,
    "momentum": 0.05,
    "nesterov": 0.05,
    "adam": 0.005,
    "adamw": 0.005,
    "adagrad": 0.05,
    "accelerated": 0.1,
    "inner_outer": 0.05,
}


@dataclass(frozen=True)
class Settings:
    """One training run.

    None means: not given. The method, or the rule named at the field, then decides.
    """

    data: str = "digits"
    data_dir: str | None = None
    model: str = "logistic"
    method: str = "dp_sgd"
    epsilon: float | None = None
    delta: float = 1e-5
    noise_multiplier: float | None = None
    epochs: int = 10
    batch_size: int | None = None
    lr: float | None = None
    base: str | None = None
    momentum: float | None = None
    betas: tuple[float, ...] | None = None
    weight_decay: float | None = None
    max_grad_norm: float = 1.0
    clipping: str | None = None
    clipping_groups: str | dict[str, float] = "flat"
    clip_quantile: float | None = None
    clip_lr: float | None = None
    bit_noise: float | None = None
    eps: float | None = None
    radius: float | None = None
    schedule: str | None = None
    warmup_steps: int | None = None
    ema: float | None = None
    kappa: float | None = None
    gamma: float | None = None
    filter: str | None = None
    filter_b: tuple[float, ...] | None = None
    filter_a: tuple[float, ...] | None = None
    bias_corrected: bool | None = None
    window: int | None = None
    beta: float | None = None
    outer_momentum: float | None = None
    variant: str | None = None
    scale_eps: float | None = None
    max_scaled_norm: float | None = None
    unscaled_steps: int | None = None
    scaled_steps: int | None = None
    joint_scale: float | None = None
    allow_nonprivate: bool | None = None
    strategy: str | None = None
    bands: int | None = None
    decay: float | None = None
    sampling: str | None = None
    max_batch_size: int | None = None
    groups: int | None = None
    backend: str = "numpy"
    seed: int = 0
    tensorboard: bool = False
    record_gradients: int | None = None

    def __post_init__(self) -> None:
        choice(METHODS, method=self.method)
        if self.epsilon is None and self.noise_multiplier is None:
            raise ArgumentError("epsilon=None: give --epsilon (the noise is calibrated to it) or --noise-multiplier")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ArgumentError(
                f"noise_multiplier={self.noise_multiplier!r}: must not be given with --epsilon, which decides it"
            )
        if self.epsilon is not None:
            positive(epsilon=self.epsilon)
        if self.epochs < 1:
            raise ArgumentError(f"epochs={self.epochs!r}: must be at least 1")
        for option, methods in _ONLY_FOR.items():
            value = getattr(self, option)
            if value is not None and self.method not in methods:
                raise ArgumentError(
                    f"{option}={value!r}: is only for the method {_listed(methods)}, not for {self.method}"
                )
        for option, updates in _ONLY_WITH.items():
            value = getattr(self, option)
            if value is not None and self.update not in updates:
                bases = _listed(tuple(update for update in updates if update in BASES))
                raise ArgumentError(f"{option}={value!r}: is only for --base {bases}, not for {self.update}")
        if self.ema is not None:
            decay(ema=self.ema)
        if self.record_gradients is not None:
            integer(1, record_gradients=self.record_gradients)
        if self.bands is not None and self.strategy is None:
            raise ArgumentError(f"bands={self.bands!r}: is only for --strategy banded-inverse-square-root")
        if self.warmup_steps is not None and self.schedule is None:
            raise ArgumentError(f"warmup_steps={self.warmup_steps!r}: is only for --schedule cosine")
        for option in ("clip_lr", "bit_noise"):
            if getattr(self, option) is not None and self.clip_quantile is None:
                raise ArgumentError(f"{option}={getattr(self, option)!r}: is only for --clip-quantile")
        if self.variant == "side_information":
            raise ArgumentError(
                "variant='side_information': takes the second moment of public gradients, which the command line has "
                "no option for; use dpcore.torch.make_private"
            )
        if self.variant == "noiseless_preconditioner" and self.epsilon is not None:
            raise ArgumentError(
                f"epsilon={self.epsilon!r}: cannot be met by variant='noiseless_preconditioner', which guarantees "
                "nothing; use --noise-multiplier and --allow-nonprivate, or another variant"
            )
        self._choose_sampling()

    def _choose_sampling(self) -> None:
        reason, unfit = "", tuple[str, ...]()
        if self.strategy is not None or (self.method in _CORRELATED and self.variant != "independent"):
            reason = "correlated noise is accounted for by the steps at which an example takes part"
            unfit = ("truncated-poisson",)
        elif self.variant in _FIXED_BATCHES:
            reason = f"the sensitivity of {self.variant} grows with the largest batch"
        if reason and self.sampling in ("poisson", "fixed-size", *unfit):
            raise ArgumentError(
                f"sampling={self.sampling!r}: {reason}, which must be fixed; use --sampling fixed-order"
            )
        if self.sampling is None:
            object.__setattr__(self, "sampling", "fixed-order" if reason else "poisson")
        for option, sampling in (("max_batch_size", "truncated-poisson"), ("groups", "cyclic-poisson")):
            value = getattr(self, option)
            if value is not None and self.sampling != sampling:
                raise ArgumentError(f"{option}={value!r}: is only for --sampling {sampling}")
        if self.sampling == "cyclic-poisson" and self.groups is None:
            raise ArgumentError("groups=None: give --groups with --sampling cyclic-poisson, for example --groups 8")

    @property
    def update(self) -> str:
        """The update rule."""
        return self.base or _UPDATES.get(self.method, "inner_outer" if self.method == "inner_outer" else "sgd")

    def batch_size_for(self, examples: int) -> int:
        """The batch size given, or the power of two nearest to twice the square root of the number of examples."""
        if self.batch_size is not None:
            return self.batch_size
        return min(examples, 1 << round(math.log2(2 * math.sqrt(examples))))

    def resolved(self, examples: int) -> Settings:
        """Return the same settings with the batch size and the learning rate filled in."""
        return replace(self, batch_size=self.batch_size_for(examples), lr=self.learning_rate)

    @property
    def learning_rate(self) -> float:
        """The learning rate given, or the default of the update rule."""
        return DEFAULT_LR[self.update] if self.lr is None else self.lr

    def build_method(self, examples: int) -> Method:
        """Return the method, for a public number of examples.

        Raises
        ------
        ArgumentError
            Where a setting is out of range.
        """
        options: dict[str, Any] = {name: getattr(self, name) for name in _KEYWORDS}
        options |= {"lr": self.learning_rate, "batch_size": self.batch_size_for(examples)}
        options |= {"b": self.filter_b, "a": self.filter_a}
        if self.clip_quantile is not None:
            rate = 0.2 if self.clip_lr is None else self.clip_lr
            options["adaptive_clip"] = AdaptiveClip(self.clip_quantile, rate, self.bit_noise)
        if self.strategy is not None:
            options["strategy"] = NamedStrategy(self.strategy, self.bands)
        if self.schedule is not None:
            options["schedule"] = WarmupCosine(self.warmup_steps or 0)
        if self.ema is not None:
            options["averaging"] = ExponentialAverage(self.ema)
        return METHODS[self.method](**{name: value for name, value in options.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def _listed(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


SETTINGS = tuple(item.name for item in fields(Settings))
# What a method is given by the same name; the others are translated.
_KEYWORDS = (
    *("max_grad_norm", "clipping", "clipping_groups", "noise_multiplier", "base", "momentum", "betas", "eps"),
    *("weight_decay", "radius", "kappa", "gamma", "filter", "bias_corrected", "window", "beta", "outer_momentum"),
    *("variant", "scale_eps", "max_scaled_norm", "unscaled_steps", "scaled_steps", "joint_scale", "allow_nonprivate"),
    "decay",
)
