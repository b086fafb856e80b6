"""What an update is: a rule of the port and its numbers."""

from __future__ import annotations

from typing import Protocol

from dpcore.spec.ops import UpdateSettings


class Update(Protocol):
    """A rule of `dpcore.spec.ops.UPDATE_RULES` with its default numbers.

    The numbers are defaults: at the PyTorch edge each parameter group carries its own, and schedulers change them.
    """

    @property
    def rule(self) -> str:
        """Name of the rule."""

    def settings(self) -> UpdateSettings:
        """Return the numbers."""
