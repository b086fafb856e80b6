"""A model's proved graphs, repeated as CUDA graphs.

A proved graph is a list of operations on its inputs: no Python decides anything in between, nothing else is read, and
torch's generator draws the random numbers. So a replay on other values is the graph itself, if all of it is on one
device. `dpcore_triton.passes` says what the backend captures, and where its inputs lie.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from itertools import compress
from typing import Any

from dpcore.errors import SpeedWarning
from dpcore.stages.clipping.blocks import Block
from dpcore.torch.gradients.proved import Inputs, Program
from dpcore.torch.model.functional import Values

CAPTURES = 8
"""Captures allowed at first, and replays that allow one more: a capture waits for the device."""


class RepeatedPasses:
    """Repeats the graphs of one model by a backend with CUDA graphs."""

    def __init__(self, values: Values, backend: Any) -> None:
        self._values = values
        self.passes = backend.passes()
        self.refused: str | None = None
        self._captured = self._replayed = 0

    def __call__(
        self,
        program: Program,
        name: Hashable,
        inputs: Inputs,
        guarded: Callable[[Callable[[], Any]], Any],
    ) -> list[Block]:
        """Return ``program(*inputs)``, run inside of `guarded`, which sets the generators.

        The result lies where that of the next call with the same name and form will be.
        """
        if self.refused is None and program.obstacle is not None:
            self._refuse(program.obstacle)
        found: list[Block]
        if self.refused is not None:
            found = guarded(lambda: program(*inputs))
            return found
        point, held, batch = inputs
        # Values made for this call will lie elsewhere at the next one: they are passed like the batch.
        lasting = {parameter.data_ptr() for parameter in self._values.parameters()}
        made = [place for place, value in enumerate(point) if value.data_ptr() not in lasting]
        given = [*batch, *(point[place] for place in made)]
        kept = [value for place, value in enumerate(point) if place not in made]
        read = [*kept, *compress(held, program.read), *program.constants]

        def work(own: list[Any]) -> list[Block]:
            moved = dict(zip(made, own[len(batch) :], strict=True))
            return program([moved.get(place, value) for place, value in enumerate(point)], held, own[: len(batch)])

        one = self.passes.of((program, name), given, read)
        if one.seen and not one.captured:
            self._captured += 1
            if self._captured > CAPTURES + self._replayed // CAPTURES:
                self._refuse("parameters or buffers lie elsewhere in nearly every step")
            else:
                guarded(lambda: one.capture(work, given))
                if one.refused is not None:
                    self._refuse(one.refused)
        if one.captured:
            self._replayed += 1
            found = guarded(lambda: one.replay(given))
        else:
            one.seen = True  # the first call runs as usual, since libraries allocate in it
            found = guarded(lambda: program(*inputs))
        return found

    def _refuse(self, why: str) -> None:
        self.refused = why
        self.passes.forget()
        warnings.warn(
            f"cuda_graphs='model': the model's passes are not repeated ({why}); they run as without",
            SpeedWarning,
            stacklevel=2,
        )
