"""The processes that take a run's steps together: each sums its share of the batch, and owns a piece of the state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dpcore import errors
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.clipped_sum import add_sums

T = TypeVar("T")

LOST = (
    "a process of this run was lost, or the network, or one called something that the others did not (state_dict(), "
    "output, negative_share(): all must): this one cannot continue alone; the step under way counts as released, start "
    "all processes again from the last checkpoint"
)


class Peers:
    """The exchanges of one of `world_size` processes with the others; this base class is a single process.

    All must make the same calls, in the same order.

    Notes
    -----
    The noise is drawn once: for each coordinate by the one process that owns it, on the sum over all processes. Its
    bits follow from the coordinate's element of the stream, whatever the number of processes.
    """

    rank, world_size = 0, 1
    shards = False  # whether a process stores only its own pieces of the parameters

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """Return the pieces of the tensors that this process owns."""
        return layout.pieces(self.rank, self.world_size)

    def totals(self, like: Sequence[Any], backend: Backend[Any]) -> list[Any]:
        """Make the vectors of a step's sum, float64 zeros of these sizes."""
        return [backend.zeros_like(vector, "float64") for vector in like]

    def rounds(self, count: int) -> int:
        """Return the number of micro-batches of a step that this process takes part in; `count` are its own."""
        return count

    # Add the weighted sums of clipped blocks, by `join` at the latest. A plain function, since it is an argument of an
    # operation that a backend may repeat.
    add_sums = staticmethod(add_sums)

    def join(self, totals: Sequence[Any], layout: Layout, backend: Backend[Any]) -> None:
        """End a micro-batch: everything added is in the sum."""

    def drop(self) -> None:
        """Forget additions that were not joined."""

    def reduced(self, totals: list[Any], pieces: Sequence[Piece]) -> list[Any]:
        """Return the own pieces of the sum of all processes' totals, which may be overwritten."""
        return totals

    def whole(self, parts: Sequence[Any], pieces: Sequence[Piece], layout: Layout) -> list[Any]:
        """Return all tensors' flat vectors, put together from each process's pieces."""
        return list(parts)

    def added(self, values: Sequence[float]) -> list[float]:
        """Return the sums over the processes."""
        return list(values)

    def same(self, value: T) -> T:
        """Return the first process's value."""
        return value

    def agree(self, failed: bool, state: str = "", settings: str = "") -> None:
        """Raise PrivacyError in all processes if one failed, or would release another step or use other settings."""

    def check_alike(self, settings: Mapping[str, Any]) -> None:
        """Refuse processes whose settings differ, and name every such setting."""


def by_the_first(peers: Peers, work: Callable[[], T], *, sent: bool = True) -> T | None:
    """Do the work in the first process only, and return its result in all (only in the first if not `sent`).

    If it raises, all raise: none waits for a process that is gone.
    """
    result, failure, report = None, None, None
    if peers.rank == 0:
        try:
            result = work()
        except BaseException as cause:  # noqa: BLE001 - an interruption, too
            failure, report = cause, (type(cause).__name__, str(cause))
    value, report = peers.same((result if sent else None, report))
    if failure is not None:
        raise failure
    if report is not None:
        name, sentence = report
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.DpcoreError):
            raise kind(sentence)
        raise errors.PrivacyError(f"rank 0 ended with {name}: {sentence}")
    return result if peers.rank == 0 else value
