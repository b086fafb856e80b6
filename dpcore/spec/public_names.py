"""Public names of rooms that lie deeper: ``dpcore.filters`` is `dpcore.stages.filters`, one module with two names."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

PUBLIC_NAMES: Final = {
    **{f"dpcore.{stage}": f"dpcore.stages.{stage}" for stage in ("clipping", "filters", "method", "noise", "queries")},
    **{f"dpcore.{stage}": f"dpcore.stages.{stage}" for stage in ("strategies", "updates")},
    **{f"dpcore.{name}": f"dpcore.stages.updates.{name}" for name in ("averaging", "galore", "schedules")},
    "dpcore.analysis": "dpcore.theory.analysis",
    "dpcore.datasets": "dpcore.cli.datasets",
    "dpcore.verify": "dpcore.statement.verify",
    "dpcore.report": "dpcore.statement",
    "dpcore.report.gradients": "dpcore.cli.reports.gradients",
    "dpcore.report.intervals": "dpcore.cli.reports.intervals",
    "dpcore.report.plots": "dpcore.cli.plots.plots",
}


class _PublicNames(MetaPathFinder, Loader):
    """Finds the module itself, so that a class is never there twice."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if _moved(name) else None

    def exec_module(self, module: ModuleType) -> None:
        # What stands in sys.modules after the execution is what the import statement gets.
        sys.modules[module.__name__] = import_module(_moved(module.__name__))


def _moved(name: str) -> str:
    """Return the name of the module behind a public name, or of one below it; empty for any other name."""
    parts = name.split(".")
    for head in (".".join(parts[:count]) for count in range(len(parts), 1, -1)):
        if head in PUBLIC_NAMES:
            return PUBLIC_NAMES[head] + name[len(head) :]
    return ""


def install() -> None:
    """Let import statements find the public names; before the path finder, which would load submodules once more."""
    if not any(isinstance(finder, _PublicNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PublicNames())
