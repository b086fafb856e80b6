"""A function of tensors, captured: the same kernels on other values of its inputs.

A graph repeats kernels and no Python. What makes a replay right is that nothing but tensors changes from one call to
the next, and that all of them are where the kernels read them. The work is a graph of torch's own operations on what
it is given (`dpcore.torch.gradients.proved`), all on one device, so that two things are left to do here:

- **inputs are written to the captured graph's own memory before each replay**; parameters and buffers are read where
  they lie. The key holds the forms of the former and the addresses of the latter;
- **random numbers are drawn anew**: a replay takes them from torch's generator as it is at that time.

What cannot be captured is refused, and the work goes on as without.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from dpcore_triton import launch
from dpcore_triton.described import places
from dpcore_triton.kept import Kept
from dpcore_triton.recording import Recording, beside, captured, repeated

Tensor = torch.Tensor
Work = Callable[[list[Tensor]], Any]
"""A function of the values of its inputs, and of torch's random numbers."""


class Pass:
    """One piece of work: run once as ever, then captured, then replayed."""

    def __init__(self) -> None:
        self.seen = False
        self.replays = 0
        self.refused: str | None = None  # why it is not captured
        self._repeat: Callable[[], None] | None = None

    @property
    def captured(self) -> bool:
        """Whether it can be replayed."""
        return self._repeat is not None

    def capture(self, work: Work, inputs: Sequence[Tensor]) -> None:
        """Capture the work for later calls; where it cannot be, `refused` says why. What it raises itself goes up."""
        own = [tensor.clone() for tensor in inputs]
        device = own[0].device
        if launch.INTERPRETED:
            # Nothing is refused: its shapes depend on no value, though an index could, and its draws are made anew.
            with Recording({}) as record:
                result = work(own)
            self.refused, self._kept = record.refused, record.kept
            repeat = repeated(record.calls, device)
        else:
            # Beside, so that libraries have their memory on that stream: torch does not recover from a failed capture.
            beside(lambda: work(own), device)
            try:
                repeat, result = captured(lambda: work(own), device)
            except Exception as cause:  # noqa: BLE001 - of any kind: it computes nothing, and runs as without
                self.refused = (str(cause) or type(cause).__name__).splitlines()[0]
        if self.refused is None:
            self._repeat, self._inputs, self._result = repeat, own, result

    def replay(self, inputs: Sequence[Tensor]) -> Any:
        """Return the work's result for these inputs, in the same tensors at every replay."""
        assert self._repeat is not None
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, list(inputs))
        self._repeat()
        self.replays += 1
        return self._result


class Passes:
    """The passes of one run that were asked for last."""

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self.forget()

    def forget(self) -> None:
        """Give back the memory that captured passes keep."""
        self.kept = Kept[Pass](self._most)

    def of(self, key: Hashable, inputs: Sequence[Tensor], read: Sequence[Tensor]) -> Pass:
        """Return the pass of a work that `key` tells from others, on inputs of this form and these tensors."""
        forms = tuple([(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in inputs])
        whole = key, forms, places(read), launch.current_stream(inputs[0].device)
        return self.kept.get(whole) or self.kept.put(whole, Pass())
