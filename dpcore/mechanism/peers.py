"""The processes that take a run's steps together: each sums its share of the batch, and owns a piece of the state."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dpcore import errors
from dpcore.spec.layout import Layout, Piece
from dpcore.spec.ops import Backend
from dpcore.stages.clipping.clipped_sum import add_sums

T = TypeVar("T")

LOST = (
    "a process of this run was lost, or the network, or one asked for something that the others did not (state_dict(), "
    "output, negative_share(): all must): this one cannot go on alone; the step under way counts as released, start "
    "all processes again from the last checkpoint"
)


class Peers:
    """What one of `world_size` processes asks of the others; this base class is one process alone, which sends nothing.

    All must ask for the same, in the same order.

    Notes
    -----
    The noise is drawn once: for each coordinate by the one process that owns it, on the sum over all processes. Its
    bits follow from the coordinate's element of the stream, whatever the number of processes.
    """

    rank, world_size = 0, 1
    shards = False  # whether a process holds its own pieces of the parameters alone, and not all of them

    def pieces(self, layout: Layout) -> tuple[Piece, ...]:
        """Return what this process owns of the tensors."""
        return layout.pieces(self.rank, self.world_size)

    def totals(self, like: Sequence[Any], backend: Backend[Any]) -> list[Any]:
        """Make the vectors of a step's sum, float64 zeros of these sizes."""
        return [backend.zeros_like(vector, "float64") for vector in like]

    def rounds(self, count: int) -> int:
        """Return how many micro-batches of a step this process takes part in, of which `count` are its own."""
        return count

    # Add the weighted sums of clipped blocks, by `join` at the latest. Plain, for it is an argument of what a backend
    # may repeat.
    add_sums = staticmethod(add_sums)

    def join(self, totals: Sequence[Any], layout: Layout, backend: Backend[Any]) -> None:
        """End a micro-batch: what was added is in the sum."""

    def drop(self) -> None:
        """Forget what was added and not joined."""

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
        """Raise PrivacyError in every process where one failed, or would release another step or by other settings."""

    def check_alike(self, settings: Mapping[str, Any]) -> None:
        """Refuse processes in which these differ, and name all that do."""


def by_the_first(peers: Peers, work: Callable[[], T], *, sent: bool = True) -> T | None:
    """Let the first process do what only one may, and give all what it found (the first alone if not `sent`).

    What it raises, all raise: none waits for a process that is gone.
    """
    found, failure, told = None, None, None
    if peers.rank == 0:
        try:
            found = work()
        except BaseException as cause:  # noqa: BLE001 - an interruption, too
            failure, told = cause, (type(cause).__name__, str(cause))
    value, told = peers.same((found if sent else None, told))
    if failure is not None:
        raise failure
    if told is not None:
        name, sentence = told
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, errors.DpcoreError):
            raise kind(sentence)
        raise errors.PrivacyError(f"rank 0 ended with {name}: {sentence}")
    return found if peers.rank == 0 else value
