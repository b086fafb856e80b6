"""Private minimization on arrays: the methods without any machine-learning framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.accounting import Event, NonPrivate
from dpcore.config import load_backend
from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.keys import Provenance, RunKeys
from dpcore.mechanism import Mechanism
from dpcore.method import Method
from dpcore.plan import Plan
from dpcore.report.statement import Statement
from dpcore.sampling import FixedBatches, Sampler
from dpcore.spec.layout import Layout
from dpcore.validate import integer

Gradient = Callable[[NDArray[Any], NDArray[np.int64]], NDArray[Any]]


@dataclass(frozen=True)
class MinimizeResult:
    """What `minimize` found.

    Attributes
    ----------
    x : (d,) array
        The last parameters.
    path : (T + 1, d) array or None
        All parameters from x0 on, where recorded.
    event : Event
        What was released; `NonPrivate` where the caller supplied the noise.
    plan : Plan
        What was run.
    backend : str
        What it was run on.
    provenance : Provenance
        Where its keys came from; the keys themselves are forgotten.
    """

    x: NDArray[Any]
    path: NDArray[Any] | None
    event: Event
    plan: Plan
    backend: str
    provenance: Provenance

    def statement(self, delta: float) -> Statement:
        """Return the privacy statement at `delta`."""
        return self.plan.statement(
            delta,
            steps_taken=self.plan.steps,
            keys=self.provenance,
            backend=self.backend,
            layout=Layout.of([("x", self.x.shape)]),
            caller_noise=isinstance(self.event, NonPrivate),
        )


def minimize(
    per_example_gradient: Gradient,
    x0: NDArray[Any],
    batches: Sampler | Sequence[Sequence[int] | NDArray[np.int64]],
    method: Method,
    *,
    steps: int | None = None,
    noise: NDArray[Any] | None = None,
    key: bytes | None = None,
    exact_key: bool = False,
    record: bool = False,
) -> MinimizeResult:
    """Minimize a sum of per-example losses privately.

    Parameters
    ----------
    per_example_gradient : callable
        ``per_example_gradient(x, indices)`` with x of shape (d,) and B indices returns the B gradients, (B, d), of
        x's dtype. B may be 0.
    x0 : (d,) array of float32 or float64
        Where to start.
    batches : Sampler or sequence of index arrays
        A sampler from `dpcore.sampling`, or the batches themselves: these are then public and fixed, and accounted
        without amplification, with the participation they really show.
    method : Method
        With a noise multiplier.
    steps : int, optional
        Number of steps; required with a sampler, the number of batches otherwise.
    noise : (T, d) array, optional
        Standard normals to use instead of the secret stream's, for tests and study. Then nothing is private, and the
        event says so.
    key : bytes, optional
        32 bytes; see `dpcore.keys.RunKeys.new`, also for `exact_key`.
    record : bool
        Keep all parameters on the way (they are released, so this costs no privacy).

    Returns
    -------
    MinimizeResult

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For shapes, dtypes or numbers that do not fit.
    PrivacyError
        If no accountant covers the sampler.
    """
    backend = load_backend()
    x = _start(x0)
    sampler: Sampler = (
        batches if hasattr(batches, "event") else FixedBatches(batches, batch_size=method.batch_size)  # type: ignore[assignment]
    )
    if steps is None:
        if not isinstance(sampler, FixedBatches):
            raise ArgumentError("steps=None: must be given with a sampler")
        steps = len(sampler.batches)
    plan = Plan(method, sampler, integer(1, steps=steps))
    normals = _normals(noise, plan.steps, x)
    keys = RunKeys.new(key, exact_key=exact_key)
    device_x = backend.from_numpy(x)
    mechanism = Mechanism(plan, Layout.of([("x", x.shape)]), [device_x], backend=backend, keys=keys)
    path = [x.copy()] if record else None
    for step in range(plan.steps):
        indices = sampler.indices(keys.sampling, step)
        rows: NDArray[Any] | None = None
        for point in mechanism.points():
            (at,) = mechanism.displaced([device_x], point.displacement)
            gradient = _gradient(per_example_gradient, backend.to_numpy(at), indices)
            # A sum of two points is formed before it is clipped: its sensitivity is then one clip norm.
            weighted = gradient if point.weight == 1 else x.dtype.type(point.weight) * gradient
            rows = weighted if rows is None else rows + weighted
        assert rows is not None
        mechanism.add([backend.from_numpy(rows)])
        mechanism.release([device_x], normals=None if normals is None else [backend.from_numpy(normals[step])])
        if path is not None:
            path.append(backend.to_numpy(device_x))
    event = plan.event if noise is None else NonPrivate("the noise was supplied by the caller")
    return MinimizeResult(
        x=backend.to_numpy(device_x),
        path=None if path is None else np.stack(path),
        event=event,
        plan=plan,
        backend=backend.name,
        provenance=keys.provenance,
    )


def _start(x0: NDArray[Any]) -> NDArray[Any]:
    x = np.array(x0)
    if x.dtype not in (np.float32, np.float64):
        raise ArgumentTypeError(f"x0.dtype={x.dtype}: must be float32 or float64")
    if x.ndim != 1:
        raise ArgumentError(f"x0.shape={x.shape}: must be (d,)")
    if not np.isfinite(x).all():
        raise ArgumentError("x0: must be finite in every coordinate")
    return x


def _normals(noise: NDArray[Any] | None, steps: int, x: NDArray[Any]) -> NDArray[Any] | None:
    if noise is None:
        return None
    normals = np.asarray(noise)
    if normals.shape != (steps, x.size):
        raise ArgumentError(f"noise.shape={normals.shape}: must be {(steps, x.size)}, one row of normals for each step")
    return normals.astype(x.dtype)


def _gradient(per_example_gradient: Gradient, x: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    gradient = np.asarray(per_example_gradient(x, indices))
    if gradient.shape != (len(indices), x.size):
        # Without the shapes: under Poisson sampling the number of indices is secret.
        raise ArgumentError(
            f"per_example_gradient: must return one row of {x.size} numbers for each index, an array of shape "
            f"(len(indices), {x.size})"
        )
    if gradient.dtype != x.dtype:
        raise ArgumentTypeError(f"per_example_gradient: returned dtype {gradient.dtype}, must be {x.dtype} as x0")
    return gradient
