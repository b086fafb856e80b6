"""The steps at which a plan checks the caller's own stages."""

from typing import Final

# Asking one takes some microseconds: a run of a million steps is still planned at once.
CHECKED_STEPS: Final = 4096


def checked_steps(steps: int) -> tuple[int, ...]:
    """Return the first `CHECKED_STEPS` steps of a run, and its last."""
    return (*range(min(steps - 1, CHECKED_STEPS)), steps - 1)
