"""What shapes a run's sums besides its settings: the code and the machine, as digests.

A row of noise may be drawn a second time only for the very same sum. So everything that could make the sum another one
is part of the digest by which a replay is allowed (`dpcore.ledger`).
"""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from dpcore.errors import ArgumentError


@lru_cache(maxsize=8)
def code_digest(*folders: str) -> str:
    """Return the SHA-256 of all Python files below the folders, by relative path; edits to the library are noticed."""
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            content = path.read_bytes()
            total.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode())
            total.update(content)
    return total.hexdigest()


def package_folder(package: ModuleType) -> str:
    """Return the folder of a package's files.

    Raises
    ------
    ArgumentError
        For a module that does not come from a file.
    """
    if package.__file__ is None:
        raise ArgumentError(f"package={package.__name__!r}: must be a package with files")
    return str(Path(package.__file__).parent)


def machine() -> dict[str, Any]:
    """Return what of this machine decides how floating-point sums round."""
    return {"machine": platform.machine(), "processor": _processor(), "system": platform.system()}


@lru_cache(maxsize=1)
def _processor() -> str:
    # Numerical libraries choose their kernels by the processor's features.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    kept = {line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "flags", "Features"))}
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()
