"""A chunk's results on disk: written again after every part, whole or not at all."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CHUNKS = ("checks", "kernels", "training", "models")
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "triton", "numpy", "scipy", "cryptography", "opacus", "pytest", "hypothesis")
NOT_A_TIMING = "interpreter: not a timing"


def path_of(out: Path, chunk: str) -> Path:
    """Return the path of a chunk's results."""
    return out / f"{chunk}.json"


def load(out: Path, chunk: str) -> dict[str, Any]:
    """Return a chunk's results so far."""
    return dict(json.loads(path_of(out, chunk).read_text()))


def save(out: Path, chunk: str, record: dict[str, Any]) -> None:
    """Write a chunk's results; by a rename, for the process may be ended at any moment."""
    path = path_of(out, chunk)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record, indent=1) + "\n")
    part.replace(path)


def machine(small: bool) -> dict[str, Any]:
    """Describe the machine, the versions, and the commit of this tree."""
    import torch

    found = {
        "commit": os.environ.get("DPCORE_COMMIT") or _output("git", "rev-parse", "HEAD") or "unknown: no git here",
        "uncommitted": _output("git", "status", "--porcelain").splitlines(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "gpu": None,
        **{package: _version(package) for package in PACKAGES},
        # The distribution's number lacks the build, "+cu130" or "+cpu".
        "torch": torch.__version__,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    if not small and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": torch.cuda.get_device_name(0),
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "clocks": _output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv"),
            "cuda": torch.version.cuda,
            "capability": list(torch.cuda.get_device_capability(0)),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    """Return a program's output; an empty text if it is missing or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
