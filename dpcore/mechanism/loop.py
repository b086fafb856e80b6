"""One private training step: gradients at the query's points, their combination, users' sums, clip, sum, release.

`dpcore.minimize`, the PyTorch edge and the audit take their steps here, so that the audit tests the code that runs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.mechanism.composed_step import Normals, Observer
from dpcore.mechanism.mechanism import Mechanism
from dpcore.mechanism.recorder import Recorder
from dpcore.sampling.users import portions
from dpcore.spec.ops import UpdateSettings
from dpcore.stages.clipping.blocks import Block, as_block, combined, joined, of_units
from dpcore.stages.queries import Point

Blocks = Callable[[slice], Sequence[Any]]
"""Per-example gradients of a part of the batch at one point: a `Block` or array (b, d_l) of the backend a tensor."""

BlocksAt = Callable[[list[Any], Point], Blocks]
"""Makes the `Blocks` of a point, given the parameters there; called once a point and step."""

Gradient = Callable[[Sequence[Any], NDArray[np.int64], Point], Sequence[Any]]
"""``gradient(parameters, indices, point)``: the examples' gradients, one (B, d_l) NumPy array or `Block` a tensor."""


class Loop:
    """Takes a mechanism's steps, with gradients of `microbatch_size` examples at once (None: of the whole batch).

    `views` neighboring rows of a batch are views of one example: the mean of their gradients is its vector, which is
    clipped as one, so that its sensitivity is that of one row. `recorder` keeps coordinates of the releases.
    """

    def __init__(self, mechanism: Mechanism, microbatch_size: int | None = None) -> None:
        self.mechanism = mechanism
        self.microbatch_size = microbatch_size
        self.views = 1
        self.recorder: Recorder | None = None
        self._public: Sequence[Any] | None = None

    def sum_clipped(
        self,
        parameters: Sequence[Any],
        blocks_at: BlocksAt,
        count: int,
        public: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """Clip the vectors of a batch and add them to the mechanism's sum; nothing leaves it yet.

        After an exception the same batch may be tried once more: the noise of a step depends on its number only, and
        nothing of this step was released. `public` returns a flat gradient of public data, if the update needs one.
        """
        mechanism = self.mechanism
        self._public = None if public is None else public()
        # An attempt that failed midway left a part of its sum; on top of it an example would count twice.
        mechanism.discard()
        points = mechanism.points()
        gradients = [blocks_at(mechanism.at(parameters, point), point) for point in points]
        weights = [float(point.weight) / self.views for point in points]
        begun: list[Block] | None = None  # the sum so far of a unit larger than a micro-batch
        for part, sizes, more in self._rounds(count):
            blocks = combined(mechanism.backend, weights, (at(part) for at in gradients))
            for units in [blocks] if sizes is None else of_units(blocks, sizes):
                if begun is not None:
                    units = [joined(both) for both in zip(units, begun, strict=True)]
                # As rows: the pairs of all parts together may not fit into memory, their one vector does. As a copy:
                # the gradients of the next part may use the same memory.
                begun = [as_block(block.rows() + 0) for block in units] if more else None
                if not more:
                    mechanism.add(units)
            mechanism.join()
            blocks = units = []  # their memory is for the next part's

    def _rounds(self, count: int) -> list[tuple[slice, list[int] | None, bool]]:
        """Return the micro-batches, and empty ones if other processes have more and need this one's part in them."""
        own = list(self._parts(count))
        return own + [(slice(count, count), None, False)] * (self.mechanism.peers.rounds(len(own)) - len(own))

    def _parts(self, count: int) -> Iterator[tuple[slice, list[int] | None, bool]]:
        """Yield each micro-batch; for units of several rows their sizes, and whether a unit continues in the next."""
        share, most = self.mechanism.share, self.microbatch_size or max(count, 1)
        units = share.units(self.mechanism.keys.sampling, self.mechanism.step)
        if units is None and self.views > 1:
            units = np.ones(count // self.views, dtype=np.int64)
        if units is not None:
            for start, stop, sizes, more in portions(units * self.views, most):
                yield slice(start, stop), sizes, more
            return
        for start in range(0, count, most):
            yield slice(start, min(start + most, count)), None, False

    def release_sum(
        self,
        parameters: Sequence[Any],
        settings: Sequence[UpdateSettings] | None = None,
        *,
        normals: Normals | None = None,
        observe: Observer | None = None,
    ) -> None:
        """Let the mechanism add noise, filter and move the parameters; see `Mechanism.release`."""
        public, self._public = self._public, None
        if self.recorder is not None:
            observe = self.recorder.see
        self.mechanism.release(parameters, settings, normals=normals, public=public, observe=observe)
        if self.recorder is not None:
            self.recorder.keep(self.mechanism.negative_share())

    def step(
        self,
        parameters: Sequence[Any],
        gradient: Gradient,
        *,
        public: Callable[[], Sequence[Any]] | None = None,
        normals: Normals | None = None,
        observe: Observer | None = None,
    ) -> None:
        """Draw a batch and take one whole step on it."""
        indices, backend = self.mechanism.draw(), self.mechanism.backend

        def blocks_at(values: list[Any], point: Point) -> Blocks:
            return lambda part: [as_block(g).map(backend.from_numpy) for g in gradient(values, indices[part], point)]

        self.sum_clipped(parameters, blocks_at, len(indices), public)
        self.release_sum(parameters, normals=normals, observe=observe)


def private_step(
    mechanism: Mechanism, parameters: list[Any], gradient: Gradient, public: Any = None, observe: Any = None
) -> None:
    """Take one step the way `dpcore.minimize` does; an audit of another training loop brings its own.

    Parameters
    ----------
    mechanism : Mechanism
    parameters : list of arrays
        Arrays of the mechanism's backend; they are moved.
    gradient : callable
        See `Gradient`.
    public, observe
        For `Mechanism.release`.
    """
    given = None if public is None else lambda: public
    Loop(mechanism).step(parameters, gradient, public=given, observe=observe)
