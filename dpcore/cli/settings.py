"""What a training run is set to: public values only, written to config.json as they are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from dpcore.errors import ArgumentError
from dpcore.method import Method
from dpcore.methods import METHODS
from dpcore.validate import choice

# Which methods take which of the options that not every method takes.
_ONLY_FOR = {
    "kappa": ("disk",),
    "gamma": ("disk",),
    "filter": ("doppler",),
    "filter_b": ("doppler",),
    "filter_a": ("doppler",),
    "base": ("dp_sgd", "doppler", "disk"),
}
_ADAPTIVE = ("adam", "adamw")

# Learning rates where none is given, by update rule: public constants, the reasons in docs/command-line.md.
DEFAULT_LR = {"sgd": 0.5, "momentum": 0.05, "adam": 0.005, "adamw": 0.005}


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
    kappa: float | None = None
    gamma: float | None = None
    filter: str | None = None
    filter_b: tuple[float, ...] | None = None
    filter_a: tuple[float, ...] | None = None
    sampling: str = "poisson"
    backend: str = "numpy"
    seed: int = 0
    tensorboard: bool = False

    def __post_init__(self) -> None:
        choice(METHODS, method=self.method)
        if self.epsilon is None and self.noise_multiplier is None:
            raise ArgumentError("epsilon=None: give --epsilon (the noise is calibrated to it) or --noise-multiplier")
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise ArgumentError(
                f"noise_multiplier={self.noise_multiplier!r}: must not be given with --epsilon, which decides it"
            )
        if self.epochs < 1:
            raise ArgumentError(f"epochs={self.epochs!r}: must be at least 1")
        for option, methods in _ONLY_FOR.items():
            if getattr(self, option) is not None and self.method not in methods:
                raise ArgumentError(
                    f"{option}={getattr(self, option)!r}: is only for the method {' or '.join(methods)}, "
                    f"not for {self.method}"
                )
        if self.momentum is not None and self.update != "momentum":
            raise ArgumentError(f"momentum={self.momentum!r}: is only for --base momentum")
        if self.betas is not None and self.update not in _ADAPTIVE:
            raise ArgumentError(f"betas={self.betas!r}: are only for --base adam or adamw, and for the method dp_adam")

    @property
    def update(self) -> str:
        """The update rule."""
        return "adam" if self.method == "dp_adam" else self.base or "sgd"

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
        options: dict[str, Any] = {
            "lr": self.learning_rate,
            "max_grad_norm": self.max_grad_norm,
            "clipping": self.clipping,
            "clipping_groups": self.clipping_groups,
            "noise_multiplier": self.noise_multiplier,
            "batch_size": self.batch_size_for(examples),
            "momentum": self.momentum,
            "betas": self.betas,
            "weight_decay": self.weight_decay,
            "base": self.base,
            "kappa": self.kappa,
            "gamma": self.gamma,
            "filter": self.filter,
            "b": self.filter_b,
            "a": self.filter_a,
        }
        return METHODS[self.method](**{name: value for name, value in options.items() if value is not None})

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return asdict(self)
