"""The expected loss of a method on a quadratic, exactly, without data and without drawing noise.

In a direction of curvature h the gradient is h x + e: linear in the point x, plus the mechanism's noise and that of
the batch. Queries, filters and SGD with or without momentum are linear, too. So one step maps the vector z of all that
a method keeps in this direction (x, earlier points, the filter's state, momentum, average) to

    z_{t+1} = A_t z_t + b_t e_t,        e_t independent, of mean 0.

The last point (or the average) is c' z_T, c a unit vector. Backwards from there, with r_T = c and r_t = A_t' r_{t+1},

    c' z_T = r_0' z_0 + sum_t (r_{t+1}' b_t) e_t,
    E[(c' z_T)^2] = (r_0' z_0)^2 + sum_t (r_{t+1}' b_t)^2 E[e_t^2].

A_t and b_t are read off the step itself, taken with one unit vector of (z, e) after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.spec.recurrence import advance
from dpcore.spec.validate import integer, non_negative
from dpcore.stages.method import Method
from dpcore.stages.updates.schedules import is_adaptive

Floats = NDArray[np.float64]
# SGD is stable up to 2 / h; the gain of a query, a filter or momentum moves that by less than the rest of the range.
_FROM, _TO, _A_DECADE = -6, 2, 24


class BestRate(NamedTuple):
    """The learning rate of the least expected loss, and that loss: numbers, or arrays of shape (N,)."""

    lr: Any
    loss: Any


def expected_loss(
    method: Method,
    curvatures: ArrayLike,
    steps: int,
    *,
    noise_std: float,
    start: ArrayLike = 1.0,
    gradient_std: ArrayLike = 0.0,
    rates: ArrayLike | None = None,
) -> Any:
    """Return ``E[sum_i h_i x_i^2 / 2]`` after the last step: the loss above its minimum.

    Parameters
    ----------
    method : Method
        Of stages that are linear: any query but `Preconditioned`, any filter but an adaptive one, independent noise,
        and SGD, momentum or Nesterov, with a schedule or an average (whose loss is then returned). Its clip and its
        noise multiplier are not looked at: gradients count as not clipped.
    curvatures : array, shape (H,)
        h, the Hessian's eigenvalues, at least 0.
    steps : int
        Steps of the run.
    noise_std : float
        Standard deviation of the noise on the average, in each coordinate: noise_multiplier times max_grad_norm over
        batch_size.
    start, gradient_std : float or array, shape (H,)
        In each direction, the distance from the minimum at the start, and the standard deviation that the draw of a
        batch gives the average gradient. An example has the same deviation at all points of a query.
    rates : array, shape (R,), optional
        Learning rates to be taken instead of the method's.

    Returns
    -------
    float, or array of shape (R,) with `rates`
        Infinite where the recursion overflows.

    Raises
    ------
    ArgumentError
        If a stage is not linear, or a number is out of range.
    """
    _check_linear(method)
    h, x0, spread = _directions(curvatures, start, gradient_std)
    given = _numbers(method.update.settings().learning_rate if rates is None else rates)
    if given.ndim > 1 or not (given > 0).all() or not np.isfinite(given).all():
        raise ArgumentError(f"rates={rates!r}: must be finite learning rates above 0, one or a list of them")
    squares = _squares(method, h, integer(1, steps=steps), np.atleast_1d(given))
    loss = _loss(squares, h, x0, spread, np.array([non_negative(noise_std=noise_std)]))[0]
    return loss if given.ndim else float(loss[0])


def best_rate(
    method: Method,
    curvatures: ArrayLike,
    steps: int,
    *,
    noise_std: ArrayLike,
    start: ArrayLike = 1.0,
    gradient_std: ArrayLike = 0.0,
) -> BestRate:
    """Return the learning rate of the least `expected_loss` among 24 a decade, and that loss.

    Rates go from 1e-6 to 1e2 over the largest curvature; the method's own is not looked at. With almost no noise some
    rate between two of them may end a little or much lower, since oscillations happen to cancel at the last step.

    Parameters
    ----------
    method, curvatures, steps, start, gradient_std
        As in `expected_loss`.
    noise_std : float or array, shape (N,)
        As there; for several the best rate of each.
    """
    _check_linear(method)
    h, x0, spread = _directions(curvatures, start, gradient_std)
    noise = np.atleast_1d(_numbers(noise_std))
    if noise.ndim > 1 or not noise.size or not np.isfinite(noise).all() or (noise < 0).any():
        raise ArgumentError(f"noise_std={noise_std!r}: must be a finite number of at least 0, or a list of them")
    rates = np.logspace(_FROM, _TO, (_TO - _FROM) * _A_DECADE + 1) / h.max()
    losses = _loss(_squares(method, h, integer(1, steps=steps), rates), h, x0, spread, noise)
    found = BestRate(rates[losses.argmin(axis=1)], losses.min(axis=1))
    return found if np.ndim(noise_std) else BestRate(*(float(part[0]) for part in found))


def _loss(squares: Sequence[Floats], h: Floats, x0: Floats, spread: Floats, noise_std: Floats) -> Floats:
    """Return the losses at each noise and rate, (N, R); infinite where a square overflowed."""
    by_start, by_noise, by_batch = squares
    with np.errstate(all="ignore"):
        without = (by_start * x0**2 + by_batch * spread**2) @ h
        return np.nan_to_num((without + np.outer(noise_std**2, by_noise @ h)) / 2, nan=np.inf, posinf=np.inf)


class Query(NamedTuple):
    """What a query costs once the run is under way."""

    gradients: int  #: of an example in a step
    size: float  #: norm of its vector over that of a gradient, if an example's gradients at all points are equal


def query_of(method: Method) -> Query:
    """Return how many gradients a method's query takes, and how long its vector is for equal ones.

    A clip norm that cuts no gradient must be `size` times as large for the vector: DiSK's and DP-PMLF's weights add up
    to 1, InnerOuter's to more. Differences have no size: what is left of them is not that of equal gradients.
    """
    points = method.query.points(method.query.lags + 1)
    return Query(len(points), max(1.0, abs(sum(point.weight for point in points))))


def _directions(curvatures: ArrayLike, start: ArrayLike, gradient_std: ArrayLike) -> tuple[Floats, Floats, Floats]:
    h = _numbers(curvatures)
    if h.ndim != 1 or not h.size or not (h >= 0).all() or not np.isfinite(h).all() or not h.any():
        raise ArgumentError("curvatures: must be a list of finite numbers of at least 0, one of them above 0")
    others: list[Floats] = []
    for name, value in (("start", start), ("gradient_std", gradient_std)):
        array = _numbers(value)
        if array.shape not in ((), h.shape) or not np.isfinite(array).all() or (array < 0).any():
            raise ArgumentError(f"{name}: must be a number of at least 0, or one for each of the {len(h)} curvatures")
        others.append(np.broadcast_to(array, h.shape))
    return h, others[0], others[1]


def _numbers(values: ArrayLike) -> Floats:
    """Return an array of float64, NaN for what is none, which every check refuses."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        return np.array([np.nan])


def _check_linear(method: Method) -> None:
    """Refuse a method whose step is not linear in what it keeps."""
    if not isinstance(method, Method):
        raise ArgumentTypeError(f"method={method!r}: must be a dpcore.Method, as dpcore.methods.dp_sgd(...) returns")
    update, remedy = method.update, "the prediction is for linear methods; run dpcore compare for others"
    refused = {
        f"update={type(update).__name__}(...)": update.rule not in ("sgd", "momentum", "nesterov"),
        f"filter={type(method.filter).__name__}(...)": method.filter.adaptive,
        f"query={type(method.query).__name__}(...)": method.preconditioning is not None,
        "strategy": method.noise.strategy is not None,
        "galore": method.galore is not None,
        "radius": method.radius is not None,
        f"schedule={method.schedule!r}": is_adaptive(method.schedule),
        "adaptive_clip": getattr(method.clip, "adaptive", None) is not None,
    }
    for name, found in refused.items():
        if found:
            raise ArgumentError(f"{name}: cannot be predicted; {remedy}")


def _squares(method: Method, h: Floats, steps: int, rates: Floats) -> tuple[Floats, Floats, Floats]:
    """Return what x_T^2 is made of, each (R, H): factors of the start's square and of both noises' variances."""
    state = _State(method)
    r = np.broadcast_to(np.eye(state.size)[state.answer], (len(rates), len(h), state.size))
    by_noise, by_batch = np.zeros((2, len(rates), len(h)))
    with np.errstate(all="ignore"):
        for step in reversed(range(steps)):
            A, b, share = state.step(step, steps, rates[:, None, None], h[:, None])
            square = np.einsum("rhi,rhi->rh", r, b) ** 2
            by_noise += square
            by_batch += share**2 * square
            r = np.einsum("rhi,rhij->rhj", r, A)
        by_start: Floats = (r @ state.start) ** 2
    return by_start, by_noise, by_batch


class _State:
    """What a method keeps in one direction: x, earlier points, the filter's vectors, momentum, the average."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.lags = max(method.query.lags, int(method.query.uses_displacement))
        points, order = 1 + self.lags, method.filter.order
        self.size = points + order + 2
        self.parts = (slice(0, points), slice(points, points + order))
        self.answer = 0 if method.averaging is None else self.size - 1
        # No displacement before the first step: all earlier points are the first one. The first average has weight 1.
        self.start = np.zeros(self.size)
        self.start[self.parts[0]] = 1.0

    def step(self, step: int, steps: int, lr: Floats, h: Floats) -> tuple[Floats, Floats, float]:
        """Return A_t (R, H, S, S), b_t (R, H, S), and by which factor an example's deviation enters: a sum of weights.

        A quantity is an array whose last axis has its coefficients: of each number of the state, then of the noise e.
        """
        method, numbers = self.method, self.method.update.settings()
        units = np.broadcast_to(np.eye(self.size + 1), (len(lr), len(h), self.size + 1, self.size + 1))
        z = list(np.moveaxis(units, -2, 0))
        x, kept, (momentum, average, noise) = z[self.parts[0]], z[self.parts[1]], z[-3:]
        if method.schedule is not None:
            lr = lr * method.schedule.factor(step, steps)

        g, share = noise, 0.0
        for weight, displacement, lag in method.query.points(step):
            moved = displacement * (x[lag] - x[lag + 1]) if displacement else 0.0
            g = g + weight * h * (x[lag] + moved)
            share += weight
        g = advance(g, kept, method.filter.coefficients(step)) + numbers.weight_decay * x[0]
        direction = g
        if method.update.rule != "sgd":
            direction = momentum = numbers.beta1 * momentum + g
        if method.update.rule == "nesterov":
            direction = g + numbers.beta1 * momentum
        moved_x = x[0] - lr * direction
        if method.averaging is not None:
            average = average + method.averaging.weight(step) * (moved_x - average)
        whole = np.stack([moved_x, *x[: self.lags], *kept, momentum, average], axis=-2)
        return whole[..., :-1], whole[..., -1], share
