"""Public names of deeper rooms: ``dpcore.filters`` is `dpcore.stages.filters`, one module with two names."""

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
    "dpcore.strategies.workloads": "dpcore.stages.strategies.workloads",
    "dpcore.analysis": "dpcore.theory.analysis",
    **{f"dpcore.analysis.{name}": f"dpcore.theory.analysis.{name}" for name in ("filters", "spectrum", "recorded")},
    "dpcore.analysis.moments": "dpcore.theory.analysis.moments",
    "dpcore.datasets": "dpcore.cli.datasets",
    "dpcore.verify": "dpcore.statement.verify",
    "dpcore.report": "dpcore.statement",
    "dpcore.report.gradients": "dpcore.cli.gradients",
    "dpcore.report.intervals": "dpcore.cli.intervals",
    "dpcore.report.plots": "dpcore.cli.plots",
}


class _PublicNames(MetaPathFinder, Loader):
    """Finds the module itself, so that a class never exists twice; refuses a second copy."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in PUBLIC_NAMES:
            return ModuleSpec(name, self)
        parent, _, last = name.rpartition(".")
        if parent in PUBLIC_NAMES:
            room = PUBLIC_NAMES[parent]
            raise ModuleNotFoundError(f"{name}: is no public name; import {parent}, or {room}.{last}", name=name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        # The import statement gets the entry of sys.modules after the execution.
        sys.modules[module.__name__] = import_module(PUBLIC_NAMES[module.__name__])


def install() -> None:
    """Let import statements find the public names; before the path finder, which would load submodules once more."""
    if not any(isinstance(finder, _PublicNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PublicNames())
