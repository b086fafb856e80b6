"""Callbacks of a run. They see released values only: noisy vectors and evaluations on held-out data."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.errors import DpcoreError
from dpcore.spec.canonical import plain
from dpcore.spec.extras import needs
from dpcore.spec.whole_file import whole_file

if TYPE_CHECKING:
    from dpcore.statement.statement import Statement


@dataclass(frozen=True)
class StepReleased:
    """A private step was taken.

    Carries no training loss, batch size, clipped share or duration: those are functions of the private data, or of the
    secret sample, that no noise covers.
    """

    step: int
    steps_planned: int


@dataclass(frozen=True)
class EpochReleased:
    """The model was evaluated on held-out data. `test_loss` is the mean over the held-out set."""

    epoch: float
    step: int
    epsilon: float
    delta: float
    test_accuracy: float
    test_loss: float
    learning_rate: float


class Callback:
    """Told of a run's progress, in order; a class that inherits it hears nothing of what it does not define."""

    def on_step(self, released: StepReleased) -> None:
        """Hear of a step."""

    def on_epoch(self, released: EpochReleased) -> None:
        """Hear of an evaluation."""

    def on_end(self, statement: Statement) -> None:
        """Hear of the end, also of an early one."""


class JsonLines(Callback):
    """One JSON object a line, for each evaluation; each line is on disk before the next step begins.

    Parameters
    ----------
    path : path
        The file, made new.
    earlier : sequence of EpochReleased
        Evaluations of a run that goes on: the file's first lines.
    """

    def __init__(self, path: str | os.PathLike[str], earlier: Sequence[EpochReleased] = ()) -> None:
        self._path = Path(path)
        with whole_file(self._path) as file:
            file.write(b"".join(map(_line, earlier)))

    def on_epoch(self, released: EpochReleased) -> None:
        """Write one line."""
        # One write of a whole line: killed before it, the file ends with the line before.
        line = _line(released)
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                taken = file.write(line)
            except OSError as cause:
                raise OSError(cause.errno, cause.strerror, str(self._path)) from cause
            if taken != len(line):  # a disk that is nearly full takes a part, and says nothing
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))


def _line(released: EpochReleased) -> bytes:
    return (json.dumps(plain(asdict(released)), allow_nan=False) + "\n").encode()


class TensorBoard(Callback):
    """Scalars for TensorBoard: held-out accuracy and loss, epsilon, learning rate.

    Parameters
    ----------
    folder : path
        Where the event files go.
    after : int, optional
        The step that a run goes on from: what stands there of later ones is shown no more.

    Raises
    ------
    DpcoreError
        Where tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], after: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as cause:
            raise DpcoreError(needs("tensorboard=True", "tensorboard")) from cause
        self._writer: Any = SummaryWriter(str(folder), purge_step=None if after is None else after + 1)

    # No on_step: TensorBoard stamps each value with the time, and a step's time tells its batch's size.

    def on_epoch(self, released: EpochReleased) -> None:
        """Write the scalars of an evaluation."""
        for name in ("test_accuracy", "test_loss", "epsilon", "learning_rate"):
            self._writer.add_scalar(name, getattr(released, name), released.step)
        self._writer.flush()

    def on_end(self, statement: Statement) -> None:
        """Write the statement as text and close the file."""
        self._writer.add_text("privacy statement", f"```\n{statement.text()}\n```", statement.steps_taken)
        self._writer.close()
