"""Progress on the terminal: steps, held-out accuracy, and the privacy spent so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dpcore.cli.train.callbacks import Callback, EpochReleased, StepReleased
from dpcore.statement.text import format_epsilon

_SECONDS_BETWEEN_UPDATES = 0.25


class Bars:
    """What is drawn while a block runs, on a terminal only, and gone after it."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._console = console
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


class Display(Bars, Callback):
    """A bar on a terminal, one line an epoch elsewhere; of `steps` and `epochs` planned."""

    def __init__(self, console: Console, steps: int, epochs: int, epsilon_after: Callable[[int], float]) -> None:
        self._epochs, self._epsilon_after = epochs, epsilon_after
        self._target = format_epsilon(epsilon_after(steps), digits=3)
        self._accuracy = "--"
        self._last = 0.0
        super().__init__(
            console,
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TextColumn("epsilon {task.fields[epsilon]} of " + self._target),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("training", total=steps, accuracy=self._accuracy, epsilon="0")

    def on_step(self, released: StepReleased) -> None:
        """Move the bar, a few times a second."""
        now = time.monotonic()
        if not self._console.is_terminal or (
            now - self._last < _SECONDS_BETWEEN_UPDATES and released.step < released.steps_planned
        ):
            return
        self._last = now
        spent = format_epsilon(self._epsilon_after(released.step), digits=3)
        self._progress.update(self._task, completed=released.step, epsilon=spent)

    def on_epoch(self, released: EpochReleased) -> None:
        """Show the held-out accuracy."""
        self._accuracy = f"{100 * released.test_accuracy:.1f}%"
        spent = format_epsilon(released.epsilon, digits=3)
        self._progress.update(self._task, completed=released.step, accuracy=self._accuracy, epsilon=spent)
        self._console.print(
            f"epoch {released.epoch:.4g} of {self._epochs}: held-out accuracy {self._accuracy}, "
            f"epsilon {spent} of {self._target}"
        )
