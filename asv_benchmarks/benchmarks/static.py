"""What the compiler makes of each kernel, and whole steps predicted from it: no GPU, and no clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "static.py"
NAMES = tuple(json.loads((SCRIPT.parent / "recorded" / "static.json").read_text()))


class _Static:
    timeout = 1200

    def setup_cache(self) -> Any:
        """Compile once, in a process of its own, for this one may run Triton's interpreter."""
        return json.loads(subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, check=True).stdout)


class Steps(_Static):
    """Private over plain steps, predicted for a model and a chip."""

    params: Any = ([name for name in NAMES if name.startswith("step of")],)
    param_names = ("step",)

    def track_ratio(self, found: Any, step: str) -> float:
        return float(found[step]["private / plain"])


class Compiled(_Static):
    """Static figures of a kernel for a chip."""

    params: Any = ([name for name in NAMES if not name.startswith("step of")],)
    param_names = ("kernel",)

    def track_registers(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["registers"])

    def track_spills(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["spills"])

    def track_instructions(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["all instructions an element"])

    def track_memory(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["memory instructions an element"])

    def track_bytes(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["bytes of loads and stores"])

    def track_products(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["instructions of the loop"])
