"""Checks of what `dpcore.minimize` is given, and of what the caller's functions return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.errors import ArgumentError, ArgumentTypeError
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches, Sampler
from dpcore.spec.validate import function, integer
from dpcore.stages.method import Method

Gradient = Callable[[NDArray[Any], NDArray[np.int64]], NDArray[Any]]


def planned(batches: Sampler | Sequence[Sequence[int] | NDArray[np.int64]], method: Method, steps: int | None) -> Plan:
    """Return the plan of a call."""
    if isinstance(batches, (str, bytes)):
        raise ArgumentTypeError(
            f"batches={batches!r}: must be a sampler from dpcore.sampling, such as PoissonSampler(dataset_size=..., "
            "batch_size=...), or a list of index arrays"
        )
    sampler: Sampler = (
        batches if hasattr(batches, "event") else FixedBatches(batches, batch_size=method.batch_size)  # type: ignore[assignment]
    )
    if steps is None:
        if not isinstance(sampler, FixedBatches):
            raise ArgumentError("steps=None: must be given with a sampler")
        steps = len(sampler.batches)
    plan = Plan(method, sampler, integer(1, steps=steps))
    groups = getattr(method.clip, "groups", "flat")
    if groups in ("per_layer", "per_tensor"):
        raise ArgumentError(
            f"clipping_groups={groups!r}: must be 'flat', since x is one vector without layers; make_private and "
            "dpcore.mechanism.mechanism.Mechanism take several tensors"
        )
    return plan


def start_of(x0: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of where to start."""
    x = np.array(x0)
    if x.dtype not in (np.float32, np.float64):
        raise ArgumentTypeError(f"x0.dtype={x.dtype}: must be float32 or float64")
    if x.ndim != 1:
        raise ArgumentError(f"x0.shape={x.shape}: must be (d,)")
    if not np.isfinite(x).all():
        raise ArgumentError("x0: must be finite in every coordinate")
    return x


def normals_of(noise: NDArray[Any] | None, plan: Plan, x: NDArray[Any], ledger: bool) -> NDArray[Any] | None:
    """Return the caller's normals as (T, 1 or 2, d), with one more column for an adaptive clip."""
    if noise is None:
        return None
    if ledger:
        raise ArgumentError(
            "noise with a ledger: noise of the caller's hides nothing, and the ledger counts a private run; leave out "
            "one of them"
        )
    normals = np.asarray(noise)
    separate = plan.method.update.second_moment in ("independent", "joint")
    columns = x.size + int(plan.adaptive_clip is not None)
    shape = (plan.steps, 2, x.size) if separate else (plan.steps, columns)
    if normals.shape != shape:
        raise ArgumentError(
            f"noise.shape={normals.shape}: must be {shape}, one row of normals for each step's releases"
        )
    return normals.reshape(plan.steps, -1, columns)


def check_public(method: Method, public_gradient: Any) -> None:
    """Refuse a gradient of public data that is no function, or that is given or left out where it must not be."""
    if public_gradient is not None:
        function(public_gradient=public_gradient)
    if (method.update.second_moment == "public") != (public_gradient is not None):
        raise ArgumentError(
            f"public_gradient={public_gradient!r}: must be given for second_moment='public', and for no other"
        )


def checked_public(public_gradient: Callable[[NDArray[Any]], NDArray[Any]], x: NDArray[Any]) -> NDArray[Any]:
    """Return the gradient of public data at x."""
    gradient = np.asarray(public_gradient(x))
    if gradient.shape != x.shape or gradient.dtype != x.dtype:
        raise ArgumentError(
            f"public_gradient: returned {gradient.shape} of {gradient.dtype}, must be {x.shape} of {x.dtype} as x"
        )
    if not np.isfinite(gradient).all():  # of public data and released parameters: refusing tells nothing
        raise ArgumentError("public_gradient: returned a value that is not finite; must be finite in every coordinate")
    return gradient


def checked_gradient(per_example_gradient: Gradient, x: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    """Return the examples' gradients at x, (B, d)."""
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
