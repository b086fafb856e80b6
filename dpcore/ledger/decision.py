"""How a run goes on from a checkpoint: whether its rows may be drawn again, follow, or must be drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from dpcore.ledger.owner import lives, this_process
from dpcore.ledger.state import Branch


def decide(branch: Branch, row: int, digest: str, owner: Mapping[str, Any] | None, force_fork: bool) -> tuple[str, str]:
    """Return how a run goes on from row `row` of a branch, and why in one sentence."""
    if force_fork:
        return "fork", "A fork was asked for."
    if owner is not None and owner != this_process() and lives(owner):
        return "fork", f"Process {owner['pid']} still holds the branch {branch.branch_id}."
    if row == branch.mark:
        return "continue", f"No row from {row} on has left."
    if row > branch.mark:
        # An older copy was put back. What left after the checkpoint is known to nobody, so its noise must not be used.
        return "fork", (
            f"The ledger is older than the checkpoint: rows {branch.mark} to {row - 1} are charged now, and what left "
            "after them is not known."
        )
    rows = f"Rows {row} to {branch.mark - 1} may have left"
    if not digest:
        return "fork", f"{rows}, and what shaped them is not known."
    if branch.digests_between(row, branch.mark) == {digest}:
        return "replay", f"{rows}, and are made once more, the very same."
    return "fork", f"{rows}, and {_changed(branch.digests_between(row, branch.mark), digest)}."


def _changed(before: Set[str], now: str) -> str:
    """Say what differs between digests that are made of parts, "name:digest", as those of a torch run are."""
    if "" in before:
        return "what shaped them is not known"
    if not all(":" in one for one in (*before, now)):
        return "something that shapes them has changed since"
    parts = [dict(item.split(":", 1) for item in one.split()) for one in (*before, now)]
    every = dict.fromkeys(name for one in parts for name in one)
    names = [name for name in every if len({one.get(name) for one in parts}) > 1]
    return f"what shapes them ({', '.join(name.replace('-', ' ') for name in names)}) has changed since"
