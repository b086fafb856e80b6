"""Where and with what something was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("dpcore", "numpy", "torch", "cryptography", "opacus", "opt_einsum", "fastDP")


def machine() -> dict[str, Any]:
    """Describe processor, system, versions, and the commit of this tree."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain").splitlines(),
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_before": os.getloadavg(),
        "system": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _git(*arguments: str) -> str:
    here = Path(__file__).parent
    found = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=here)
    return found.stdout.strip() or ""
