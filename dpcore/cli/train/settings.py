"""The settings of a training run: public values, written to config.json unchanged."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dpcore.cli.train.training_options import TrainingOptions
from dpcore.errors import ArgumentError
from dpcore.methods import BASES, METHODS, keywords
from dpcore.spec.validate import choice, decay, integer, positive
from dpcore.stages.clipping import AdaptiveClip
from dpcore.stages.method import Method
from dpcore.stages.strategies import NamedStrategy, load
from dpcore.stages.strategies.saved import ENDINGS
from dpcore.stages.updates.averaging import ExponentialAverage
from dpcore.stages.updates.schedules import WarmupCosine

# Learning rates where none is given, by update rule: public constants, the reasons in docs/command-line.md. Those of
# adagrad and accelerated are reasoned, not searched.
DEFAULT_LR = {"sgd": 0.5, "momentum": 0.05, "nesterov": 0.05, "adam": 0.005, "adamw": 0.005, "adagrad": 0.05,
    "accelerated": 0.1}  # fmt: skip
# Methods call these by another name.
_CALLED = {"filter_b": "b", "filter_a": "a"}
_ONLY_BESIDE = {"clip_lr": "clip-quantile", "bit_noise": "clip-quantile", "warmup_steps": "schedule cosine",
    "bands": "strategy banded-inverse-square-root"}  # fmt: skip
_ONLY_SAMPLING = {"max_batch_size": "truncated-poisson", "groups": "cyclic-poisson"}


@dataclass(frozen=True)
class Settings(TrainingOptions):
    """One training run: public values only, written to config.json as they are, and checked against each other."""

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
        for name in KEYWORDS:
            if getattr(self, name) is not None:
                self._check_taken(name)
        for name, other in _ONLY_BESIDE.items():
            if getattr(self, name) is not None and getattr(self, other.split()[0].replace("-", "_")) is None:
                raise ArgumentError(f"{name}={getattr(self, name)!r}: is only for --{other}")
        if self.ema is not None:
            decay(ema=self.ema)
        if self.record_gradients is not None:
            integer(1, record_gradients=self.record_gradients)
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
        self._choose_sampling(self.build_method())

    def _check_taken(self, name: str) -> None:
        """Refuse a setting that the method, or the update beneath it, does not take."""
        keyword = _CALLED.get(name, name)
        taken = keywords(self.method)
        if keyword in (keywords(self.method, self.update) if "base" in taken else taken):
            return
        start = f"{name}={getattr(self, name)!r}: is only for"
        if keyword in taken:
            bases = [base for base in BASES if keyword in keywords(self.method, base)]
            raise ArgumentError(f"{start} --base {_listed(bases)}, not for {self.update}")
        methods = [method for method in METHODS if keyword in keywords(method)]
        raise ArgumentError(f"{start} the method {_listed(methods)}, not for {self.method}")

    def _choose_sampling(self, method: Method) -> None:
        reason, unfit = "", ["poisson", "fixed-size"]
        if method.noise.strategy is not None:
            reason = "correlated noise is accounted for by the steps at which an example takes part"
            unfit.append("truncated-poisson")
        elif method.update.second_moment in ("independent", "joint"):
            reason = f"the sensitivity of {self.variant} grows with the largest batch"
        if self.sampling is None:
            object.__setattr__(self, "sampling", "fixed-order" if reason else "poisson")
        elif reason and self.sampling in unfit:
            raise ArgumentError(
                f"sampling={self.sampling!r}: {reason}, which must be fixed; use --sampling fixed-order"
            )
        for name, sampling in _ONLY_SAMPLING.items():
            value = getattr(self, name)
            if value is not None and self.sampling != sampling:
                raise ArgumentError(f"{name}={value!r}: is only for --sampling {sampling}")
        if self.sampling == "cyclic-poisson" and self.groups is None:
            raise ArgumentError("groups=None: give --groups with --sampling cyclic-poisson, for example --groups 8")

    @property
    def update(self) -> str:
        """The update rule."""
        return self.base or _own_update(self.method)

    @property
    def learning_rate(self) -> float:
        """The learning rate given, or the default of the update rule."""
        return DEFAULT_LR[self.update] if self.lr is None else self.lr

    def batch_size_for(self, examples: int) -> int:
        """The batch size given, or the power of two nearest to twice the square root of the number of examples."""
        if self.batch_size is not None:
            return self.batch_size
        return min(examples, 1 << round(math.log2(2 * math.sqrt(examples))))

    def resolved(self, examples: int) -> Settings:
        """Return the same settings with the batch size and the learning rate filled in."""
        return replace(self, batch_size=self.batch_size_for(examples), lr=self.learning_rate)

    def build_method(self, examples: int | None = None) -> Method:
        """Return the method.

        Where no batch size was given it follows from `examples`, a public number; without that it stays open.
        """
        given: dict[str, Any] = {_CALLED.get(name, name): getattr(self, name) for name in KEYWORDS}
        given |= {"lr": self.learning_rate}
        given |= {"batch_size": self.batch_size if examples is None else self.batch_size_for(examples)}
        if self.clip_quantile is not None:
            rate = 0.2 if self.clip_lr is None else self.clip_lr
            given["adaptive_clip"] = AdaptiveClip(self.clip_quantile, rate, self.bit_noise)
        if self.strategy is not None:
            name = self.strategy
            given["strategy"] = load(name) if Path(name).suffix.lower() in ENDINGS else NamedStrategy(name, self.bands)
        if self.schedule is not None:
            given["schedule"] = WarmupCosine(self.warmup_steps or 0)
        if self.ema is not None:
            given["averaging"] = ExponentialAverage(self.ema)
        return METHODS[self.method](**{name: value for name, value in given.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)


def settings_from(given: dict[str, Any]) -> Settings:
    """Return the settings of the options that were given: those that are not None."""
    return Settings(**{name: value for name, value in given.items() if value is not None})


@cache
def _own_update(method: str) -> str:
    """Return the update rule of a method whose base is not given."""
    return type(METHODS[method](lr=1.0).update).__name__.lower()


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


SETTINGS = tuple(item.name for item in fields(TrainingOptions))
# The settings that are keywords of methods.
KEYWORDS = tuple(name for name in SETTINGS if any(_CALLED.get(name, name) in keywords(method) for method in METHODS))
