"""The checkpoint of a run that a ledger pays for: one file, replaced whole, and as secret as the data.

It holds the run's keys: whoever has it can subtract the noise. So it is readable by its owner only, and does not lie in
the run folder, whose files are all public (`RunFolder.checkpoint`).
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from dpcore.errors import DataError

PARTS = {"settings", "evaluations", "model", "optimizer", "ledger"}


def read(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint of `dpcore train`; DataError where it is damaged or something else."""
    try:
        # torch.load does not look at the checksums: a flipped bit of a key would be read as another key.
        with zipfile.ZipFile(path) as archive:
            whole = archive.testzip() is None
        content = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except OSError as cause:
        raise DataError(f"checkpoint {path}: cannot be read ({cause.strerror})") from cause
    except Exception as cause:  # torch has many kinds
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy") from cause
    if not isinstance(content, dict) or set(content) != PARTS:
        raise DataError(f"checkpoint {path}: is damaged, or no checkpoint; take an undamaged copy")
    return content
