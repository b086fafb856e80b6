"""Updates: rules of the port with their numbers, and the source of a second moment."""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, ArgumentTypeError, PrivacyError
from dpcore.spec.ops import UPDATE_RULES, UpdateSettings
from dpcore.spec.validate import Checked, Rules, choice, decay, non_negative, positive, sequence

# The source of the second moment -> how the port's step forms it (`dpcore.spec.ops.Backend.step`).
SECOND_MOMENTS: Final = {
    "filtered": "filtered",
    "released": "released",
    "independent": "separate",
    "joint": "separate",
    "noiseless": "separate",
    "public": "given",
    "delayed": "given",
}


class Update(Protocol):
    """A rule of `dpcore.spec.ops.UPDATE_RULES` with its default numbers.

    The numbers are defaults: at the PyTorch edge each parameter group carries its own, and schedulers change them.
    """

    @property
    def rule(self) -> str:
        """Name of the rule."""

    @property
    def second_moment(self) -> str:
        """One of `SECOND_MOMENTS`; "filtered" for rules without one."""

    @property
    def bias_corrected(self) -> bool:
        """Whether the noise's share is subtracted from the second moment."""

    def settings(self) -> UpdateSettings:
        """Return the numbers."""

    def prepared(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64] | None) -> UpdateSettings:
        """Return the numbers that the port's rule takes at step `step` (from 0).

        `numbers` are the present ones, of `settings` or of a parameter group; `variances`, (T,), the variance of the
        noise in each coordinate of the direction, by step, given if `bias_corrected`.
        """


def check_update(update: Update, steps: int) -> None:
    """Refuse an update with a rule or numbers unknown to the port: the caller's own may have any."""
    name = f"update={type(update).__name__}(...)"
    choice(UPDATE_RULES, **{f"{name}: rule": update.rule})
    for step in () if update.bias_corrected else sorted({0, steps - 1}):
        numbers: Any = update.prepared(update.settings(), step, None)
        if not isinstance(numbers, UpdateSettings) or not all(map(math.isfinite, numbers)):
            raise ArgumentTypeError(
                f"{name}: prepared(settings, {step}, None) must be dpcore.spec.ops.UpdateSettings of finite numbers, "
                f"not {numbers!r}"
            )


class WithoutSecondMoment(Checked):
    """Base of updates without a second moment."""

    second_moment = "filtered"
    bias_corrected = False

    def prepared(self, numbers: UpdateSettings, step: int, variances: Any) -> UpdateSettings:
        """Return the numbers as they are."""
        return numbers


@dataclass(frozen=True, kw_only=True)
class SecondMoment(Checked):
    """Settings of an adaptive update's second moment.

    Parameters
    ----------
    second_moment : str
        Its source:
        "filtered": the square of the update's input (post-processing);
        "released": the square of the released average before the filter;
        "independent": the square of the clipped average, released by itself with noise of its own;
        "joint": the same, released together with the gradient as one vector (batches of one example only);
        "public": the square of a gradient of public data that the caller supplies;
        "noiseless": the square of the clipped average without noise, which is **not private**;
        "delayed": once a cycle of a preconditioned query, the square of the mean of its unscaled released averages.
        Unscaled steps divide by 1, scaled ones by the root of nuhat, which they do not change.
    denominator : {"added", "floored"}
        ``sqrt(nuhat) + eps``, or ``max(sqrt(nuhat), eps)``.
    bias_corrected : bool
        Subtract the noise's expected share from nuhat before the root; the denominator is then floored.
    joint_scale : float or None
        c of the joint vector (g, c g^2); None takes 1 / (sqrt(2) C).
    allow_nonprivate : bool
        Must be True for "noiseless": its epsilon is infinity.
    unscaled_lr_factor : float or None
        Multiplies the learning rate of the unscaled steps of "delayed", which are not divided; None is 1.
    max_update_norm : float or None
        Largest norm of a step's move over the learning rate, of all tensors together; a longer move is shortened to it.

    Notes
    -----
    All but "noiseless" are functions of releases or public data, and so are the two last settings: they cost nothing.

    References
    ----------
    Private adaptive optimizers, sections 3 and 4 (max_update_norm: 4.4.2; "delayed": 3.4, Li et al. 2023); see
    docs/methods/dp_adam.md.
    """

    second_moment: str = "filtered"
    denominator: str = "added"
    bias_corrected: bool = False
    joint_scale: float | None = None
    allow_nonprivate: bool = False
    unscaled_lr_factor: float | None = field(default=None, metadata={"described": "if set"})
    max_update_norm: float | None = field(default=None, metadata={"described": "if set"})

    rules: ClassVar[Rules] = {
        "lr": positive,
        "weight_decay": non_negative,
        "second_moment": partial(choice, SECOND_MOMENTS),
        "denominator": partial(choice, ("added", "floored")),
        "joint_scale": positive,
        "unscaled_lr_factor": positive,
        "max_update_norm": positive,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.denominator == "floored":
            positive(eps=self.eps)  # type: ignore[attr-defined]
        if self.bias_corrected and self.second_moment not in ("filtered", "released"):
            raise ArgumentError(
                f"bias_corrected=True: must be False for second_moment={self.second_moment!r}, whose expectation the "
                "gradient's noise does not raise"
            )
        if self.bias_corrected and self.denominator != "floored":
            raise ArgumentError(
                "bias_corrected=True: needs denominator='floored', since the corrected moment can be negative"
            )
        if self.joint_scale is not None and self.second_moment != "joint":
            raise ArgumentError(f"joint_scale={self.joint_scale!r}: is only for second_moment='joint'")
        if self.unscaled_lr_factor is not None and self.second_moment != "delayed":
            raise ArgumentError(
                f"unscaled_lr_factor={self.unscaled_lr_factor!r}: is only for second_moment='delayed', "
                "variant='delayed_preconditioner' with unscaled_steps"
            )
        if self.second_moment == "noiseless" and not self.allow_nonprivate:
            raise PrivacyError(
                "second_moment='noiseless': reads the clipped gradients without noise, so that epsilon is infinity; "
                "give allow_nonprivate=True for a baseline, or take another variant"
            )

    def bias(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64]) -> float:
        """Return the expected share of the noise in nuhat, from the variances V of the steps up to `step`."""
        raise NotImplementedError

    def prepared(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64] | None) -> UpdateSettings:
        """Return the numbers with the noise's share of nuhat as `bias`, and eps as `floor` if it is one."""
        if self.denominator == "floored":
            numbers = numbers._replace(eps=0.0, floor=numbers.eps)
        if not self.bias_corrected:
            return numbers
        assert variances is not None
        return numbers._replace(bias=self.bias(numbers, step, variances[: step + 1]))


@dataclass(frozen=True)
class SGD(WithoutSecondMoment):
    """``x <- x - lr (g + weight_decay x)``."""

    lr: float
    weight_decay: float = 0.0
    rule: ClassVar[str] = "sgd"
    rules: ClassVar[Rules] = {"lr": positive, "weight_decay": non_negative}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay)


@dataclass(frozen=True)
class Momentum(WithoutSecondMoment):
    """``m <- momentum m + (g + weight_decay x);  x <- x - lr m``, as in torch.optim.SGD (no dampening)."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    rule: ClassVar[str] = "momentum"
    rules: ClassVar[Rules] = {**SGD.rules, "momentum": decay}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, beta1=self.momentum)


@dataclass(frozen=True)
class Nesterov(Momentum):
    """``g <- g + weight_decay x;  m <- momentum m + g;  x <- x - lr (g + momentum m)`` (torch: nesterov=True)."""

    rule: ClassVar[str] = "nesterov"


def _decays(betas: Any) -> tuple[float, float]:
    if len(sequence(betas=betas)) != 2:
        raise ArgumentError(f"betas={betas!r}: must be two numbers, the decays of the first and second moment")
    return decay(beta1=betas[0]), decay(beta2=betas[1])


@dataclass(frozen=True)
class Adam(SecondMoment):
    """Adam with bias-corrected moments; weight decay is added to the gradient (torch.optim.Adam).

    ``x <- x - lr muhat / (sqrt(nuhat) + eps)``; see `SecondMoment` for the source of nu and for other denominators.

    References
    ----------
    Kingma and Ba 2015, algorithm 1; as `post_processing` in the private adaptive optimizers paper.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    rule: ClassVar[str] = "adam"
    rules: ClassVar[Rules] = {**SecondMoment.rules, "betas": _decays, "eps": positive}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, *self.betas, self.eps)

    def bias(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64]) -> float:
        """Return ``(1 - beta2) sum_{i=1..t} beta2^{t-i} V_i / (1 - beta2^t)``, t = step + 1.

        The same average of V as nuhat is of the squares. As a recursion it is
        ``bias_t = [(beta2 - beta2^t) bias_{t-1} + (1 - beta2) V_t] / (1 - beta2^t)`` (algorithms.md 5, 10.8).
        """
        if variances.min() == variances.max():
            return float(variances[0])
        weights = numbers.beta2 ** np.arange(step, -1, -1.0)
        return float(weights @ variances / weights.sum())


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019; torch.optim.AdamW)."""

    weight_decay: float = 0.01
    rule: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class AdaGrad(SecondMoment):
    """``nu <- nu + g^2;  x <- x - lr g / sqrt(nu)``, with 0/0 = 0; weight decay is added to the gradient.

    `eps` is added to the root, or, with ``denominator="floored"``, the least denominator (1 with independent moments).
    The other settings are those of `SecondMoment`.

    References
    ----------
    Private adaptive optimizers, algorithm 3.
    """

    lr: float
    eps: float = 0.0
    weight_decay: float = 0.0
    rule: ClassVar[str] = "adagrad"
    rules: ClassVar[Rules] = {**SecondMoment.rules, "eps": non_negative}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr, self.weight_decay, eps=self.eps)

    def bias(self, numbers: UpdateSettings, step: int, variances: NDArray[np.float64]) -> float:
        """Return ``sum_{i<=t} V_i``."""
        return float(variances.sum())


# The coupling of Accelerated-DP-SRGD: Nesterov's method in its form with three sequences.


COUPLINGS = ("accelerated", "unaccelerated", "independent")


@dataclass(frozen=True)
class Accelerated(WithoutSecondMoment):
    """``z <- z - lr S;  y = x - (lr / eta_t) S;  x <- (1 - tau_{t+1}) y + tau_{t+1} z`` with lr = 1/beta.

    S is a weighted sum of gradients, ``eta_t = t + 1`` and ``tau_t = eta_t / sum_{j<=t} eta_j = 2 / (t + 2)``. The
    method's answer is y, which `dpcore.minimize` returns.

    Parameters
    ----------
    lr : float
        1 / beta; beta at least the smoothness constant.
    variant : {"accelerated", "unaccelerated", "independent"}
        "unaccelerated" takes only the steps of y, ``x <- x - (lr / eta_t) S``; "independent" couples like
        "accelerated", but expects a gradient g of the batch instead of S, which is then eta_t g.

    References
    ----------
    DP-SRG, algorithm 1 (Accelerated-DP-SRGD); its unaccelerated variant, section 4.3; independent batch gradients,
    theorem 4.11.
    """

    lr: float
    variant: str = "accelerated"
    rule: ClassVar[str] = "accelerated"
    rules: ClassVar[Rules] = {"lr": positive, "variant": partial(choice, COUPLINGS)}

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
        return UpdateSettings(self.lr)

    def prepared(self, numbers: UpdateSettings, step: int, variances: Any) -> UpdateSettings:
        """Return the numbers with eta_t and tau_{t+1} of step t."""
        eta = step + 1.0
        rate = numbers.learning_rate * (eta if self.variant == "independent" else 1.0)
        coupling = 0.0 if self.variant == "unaccelerated" else 2.0 / (step + 3)
        return numbers._replace(learning_rate=rate, weight=eta, coupling=coupling)
