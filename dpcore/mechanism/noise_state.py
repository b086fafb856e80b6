"""Checks that the noise fits the dtype; rebuilds correlated-noise state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from dpcore.errors import ArgumentError
from dpcore.plan.plan import Plan
from dpcore.spec.check import dtype_name
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Layout
from dpcore.spec.ops import Backend
from dpcore.stages.strategies import Strategy

# Noise outside of these is rounded to infinity or to nothing, and sums beside it are not hidden.
_RANGE: Final = {"float32": (1e-30, 1e30), "float64": (1e-290, 1e290)}


def check_noise_range(plan: Plan, dtype: str) -> None:
    """Refuse clip norms whose noise `dtype` numbers do not hold."""
    query, (least, most) = plan.method.preconditioning, _RANGE[dtype]
    cases = [(0, None), (0 if query is None else query.unscaled_steps, None), *((0, norm) for norm in plan.clip_limits)]
    for step, norm in cases:
        for scale in (plan.noise_standard_deviation(step, norm), plan.square_noise_standard_deviation(step)):
            if scale and not least <= scale <= most:
                raise ArgumentError(
                    f"max_grad_norm={plan.clip_at(step, norm).max_grad_norm!r}: the noise then has the standard "
                    f"deviation {scale:.3g}, which {dtype} numbers do not hold; take a clip norm nearer to 1"
                )


def rebuild(
    states: Sequence[Sequence[Any]],
    stream: int,
    backend: Backend[Any],
    strategy: Strategy,
    keys: RunKeys,
    layout: Layout,
    rng: str,
    steps: int,
) -> None:
    """Run the recurrence that correlates the noise of `stream` for rows 0 .. steps - 1, in place.

    `states` holds those of each tensor; empty ones are left alone. The strategy is one that streams by a recurrence.
    """
    for entry, state in zip(layout.entries, states, strict=True):
        for vector in state:
            vector[...] = 0
        for row in range(steps if state else 0):
            z = backend.normal(
                keys.noise_of(row), row, stream, entry.first, entry.size, dtype=dtype_name(state[0]), rng=rng
            )
            coefficients = strategy.coefficients(row)
            assert coefficients is not None
            backend.recurrence(z, state, coefficients)
