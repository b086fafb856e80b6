"""Progress on the terminal: steps, held-out accuracy, and the privacy spent so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from dpcore.statement.text import format_epsilon


class Display(Progress):
    """A bar on a terminal, one line an epoch elsewhere; of `steps` and `epochs` planned."""

    def __init__(self, console: Console, steps: int, epochs: int, epsilon_after: Callable[[int], float]) -> None:
        self._epochs, self._epsilon_after = epochs, epsilon_after
        self._target = format_epsilon(epsilon_after(steps), digits=3)
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("accuracy {task.fields[accuracy]}"),
            TextColumn("epsilon {task.fields[epsilon]} of " + self._target),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.add_task("training", total=steps, accuracy="--", epsilon="0")

    def steps(self, taken: int, _planned: int) -> None:
        """Move the bar."""
        if self.console.is_terminal:
            spent = format_epsilon(self._epsilon_after(taken), digits=3)
            self.update(self._task, completed=taken, epsilon=spent)

    def evaluated(self, evaluation: Mapping[str, Any]) -> None:
        """Show the held-out accuracy."""
        accuracy = f"{100 * evaluation['test_accuracy']:.1f}%"
        spent = format_epsilon(evaluation["epsilon"], digits=3)
        self.update(self._task, completed=evaluation["step"], accuracy=accuracy, epsilon=spent)
        self.console.print(
            f"epoch {evaluation['epoch']:.4g} of {self._epochs}: held-out accuracy {accuracy}, "
            f"epsilon {spent} of {self._target}"
        )
