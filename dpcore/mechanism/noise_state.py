"""Correlated noise step by step, the reconstruction of its state, and the check that noise fits the dtype."""

from collections.abc import Collection, Sequence
from typing import Any, Final, Protocol

from dpcore.errors import ArgumentError
from dpcore.plan.plan import Plan
from dpcore.spec.canonical import digest
from dpcore.spec.grid import nearest
from dpcore.spec.keys import RunKeys
from dpcore.spec.layout import Entry, Layout
from dpcore.spec.ops import Backend, RingCoefficients
from dpcore.stages.strategies import InBlocks, Strategy
from dpcore.stages.strategies.streaming import way

# Coordinates of a block's sums that are worked on together: they stay in a processor's cache from row to row.
_PIECE: Final = 1 << 16
# Noise outside of this range is rounded to infinity or to 0, and does not hide sums.
_RANGE: Final = {"float32": (1e-30, 1e30), "float64": (1e-290, 1e290)}


def check_noise_range(plan: Plan, dtype: str) -> None:
    """Refuse clip norms and noise multipliers whose noise is out of the range of `dtype`."""
    query, (least, most) = plan.method.preconditioning, _RANGE[dtype]
    cases = [(0, None), (0 if query is None else query.unscaled_steps, None), *((0, norm) for norm in plan.clip_limits)]
    for step, norm in cases:
        for scale in (plan.noise_standard_deviation(step, norm), plan.square_noise_standard_deviation(step)):
            if scale and not least <= scale <= most:
                raise ArgumentError(
                    f"max_grad_norm={plan.clip_at(step, norm).max_grad_norm!r} and "
                    f"noise_multiplier={plan.noise_multiplier!r}: the noise then has the standard deviation "
                    f"{scale:.3g}, which is out of the range of {dtype}; take values nearer to 1"
                )


class Rows(Protocol):
    """Rows of Z for one tensor."""

    def __call__(self, row: int, start: int = 0, stop: int | None = None) -> Any:
        """Return coordinates `start` .. `stop` of a row, to the end if `stop` is None."""


def correlated(
    backend: Backend[Any], strategy: Strategy, row: int, state: Sequence[Any], normal: Rows, bits: int
) -> Any:
    """Return row `row` of C^{-1} Z for one tensor times its normalizer, flat, on the grid (`dpcore.spec.grid`).

    `state` advances to the next step. Do not write to the result: it may be memory of the state.
    """
    coefficients = strategy.coefficients(row)
    if coefficients is not None:
        return backend.correlate(normal(row), state, coefficients, bits=bits)
    normalizer = normalizer_of(strategy, row)
    if not state:
        r: Any = 0.0
        for earlier, weight in strategy.rows(row):
            if earlier != row:
                r = r + float(weight) * normal(earlier)
        return _added(normal(row), r, normalizer, bits)
    assert isinstance(strategy, InBlocks)
    first, additions, size = strategy.first(row), list(strategy.additions(row)), len(state[0])
    piece = max(size, 1) if backend.name == "triton" else _PIECE
    for start in range(0, size, piece):
        stop = min(start + piece, size)
        sums = [vector[start:stop] for vector in state]
        for part in sums if row == first else ():
            part[...] = 0
        for addition in additions:
            z = normal(addition.row, start, stop)
            for place, weight in addition.weights:
                part = sums[place]
                if first + place == addition.row:  # the row's own: the sum before it is rounded to the grid
                    part[...] = _added(z, part, normalizer, bits)
                else:
                    part += weight * z
    return state[row - first]


def normalizer_of(strategy: Strategy | None, row: int) -> float:
    """Return the divisor of the noise of a row that has its own row of Z with weight 1."""
    if strategy is None:
        return 1.0
    coefficients = strategy.coefficients(row)
    if coefficients is not None:
        return float(coefficients.normalizer)
    (own,) = (weight for earlier, weight in strategy.rows(row) if earlier == row)
    return 1.0 / float(own)


def _added(z: Any, r: Any, normalizer: float, bits: int) -> Any:
    """Return ``z + nearest(2^bits r normalizer) 2^-bits``."""
    return z + nearest(r * (normalizer * 2.0**bits)) * 2.0**-bits


def rows_of(backend: Backend[Any], keys: RunKeys, stream: int, entry: Entry, bits: int, rng: str) -> Rows:
    """Return the rows of a stream for one tensor, each under the key of the branch that released it."""

    def normal(row: int, start: int = 0, stop: int | None = None) -> Any:
        size = (entry.size if stop is None else stop) - start
        return backend.normal(keys.noise_of(row), row, stream, entry.first + start, size, bits=bits, rng=rng)

    return normal


def first_needed(strategy: Strategy, steps: int) -> int:
    """Return the first of the rows 0 .. steps - 1 from which on the state after them can be made."""
    coefficients = strategy.coefficients(0)
    if isinstance(coefficients, RingCoefficients) and coefficients.keeps == "input":
        return max(steps - strategy.order, 0)
    return strategy.first(steps) if isinstance(strategy, InBlocks) else 0


def rebuild(
    states: Sequence[Sequence[Any]],
    stream: int,
    backend: Backend[Any],
    strategy: Strategy,
    keys: RunKeys,
    layout: Layout,
    rng: str,
    steps: int,
    bits: int,
) -> None:
    """Reconstruct, in place, the state that correlates the noise of `stream` after rows 0 .. steps - 1.

    `states` are those of each tensor; empty ones are skipped. A recurrence and a ring of noise run from row 0, a ring
    of Z takes its last rows, and the sums of a block are added up again: the same operations, and the same bits.
    """
    for entry, state in zip(layout.entries, states, strict=True):
        for vector in state:
            vector[...] = 0

        if state:
            normal = rows_of(backend, keys, stream, entry, bits, rng)
            for row in range(first_needed(strategy, steps), steps):
                correlated(backend, strategy, row, state, normal, bits)


def described(strategy: Strategy | None) -> list[str]:
    """Return a saved state's description of its noise: the strategy, and its kept vectors."""
    if strategy is None:
        return []
    said = strategy.describe()
    return [f"{said['kind']} {digest(said)[:16]}", f"{way(strategy)} {strategy.order}"]


def is_lost(saved: Sequence[str], arrays: Collection[str], own: Sequence[str], mine: Collection[str]) -> bool:
    """Return whether the noise's state must be reconstructed: it is not in a state's `arrays`, or has another form.

    `saved` and `own` are the `described` noise of the state and of this run, which has the arrays `mine`.

    Raises
    ------
    ArgumentError
        If the noise is of another matrix.
    """
    if list(saved[:1]) != list(own[:1]):
        raise ArgumentError(
            f"state: its noise was correlated by {(*saved, 'no strategy')[0]}, this run's by "
            f"{(*own, 'no strategy')[0]}; the rows of one matrix cannot follow those of another"
        )
    return list(saved) != list(own) or (bool(mine) and not arrays)
