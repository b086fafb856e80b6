"""A fresh interpreter, for what this process has imported or is about to lose."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python(
    *arguments: object, folder: Path = ROOT, seconds: float = 600, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with these arguments, ours on its path, and return what it said."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "backends"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True, text=True, check=False, timeout=seconds,
    )  # fmt: skip


def after(code: str) -> str:
    """Return the last line that this code prints in a fresh interpreter, where it must not fail."""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n").rpartition("\n")[2]
