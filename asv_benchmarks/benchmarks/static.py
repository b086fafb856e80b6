"""What the compiler makes of each kernel, and whole steps predicted from it: no GPU, and no clock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[1] / "static.py"
KERNELS = tuple(json.loads((SCRIPT.parent / "recorded" / "static.json").read_text()))


class Compiled:
    """Static figures of a kernel for a chip."""

    params: Any = (KERNELS,)
    param_names = ("kernel",)
    timeout = 1200

    def setup_cache(self) -> Any:
        """Compile in a process of its own, for this one may run Triton's interpreter."""
        return json.loads(subprocess.run([sys.executable, SCRIPT, "--json"], capture_output=True, check=True).stdout)

    def track_registers(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["registers"])

    def track_spills(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["spills"])

    def track_instructions(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["all instructions an element"])

    def track_memory(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["memory instructions an element"])

    def track_products(self, found: Any, kernel: str) -> float:
        return float(found[kernel]["instructions of the loop"])
