"""Writes a state with its secret part: one file, replaced whole, that its owner alone can read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from dpcore.errors import DataError
from dpcore.spec.whole_file import whole_file


def save_state(path: str | os.PathLike[str], state: Any) -> None:
    """Write what `torch.save` writes, readable by its owner only (mode 0600), whatever the umask.

    A private optimizer's `state_dict` holds the run's keys: whoever can read it can subtract the noise. A crash leaves
    the file that was there or the new one, never a part.

    Parameters
    ----------
    path : path
    state : object
        Whatever `torch.save` takes; read again by ``torch.load(path, weights_only=True)``.

    Raises
    ------
    DataError
        Where the file cannot be written.
    """
    _replace(path, lambda file: torch.save(state, file))


def save_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file as `save_state` does."""
    _replace(path, lambda file: file.write(content))


def _replace(path: str | os.PathLike[str], write: Callable[[IO[bytes]], Any]) -> None:
    target = Path(path)
    try:
        with whole_file(target, secret=True) as file:
            write(file)
    except (OSError, RuntimeError) as cause:  # torch says RuntimeError where the disk is full
        reason = cause.strerror if isinstance(cause, OSError) else "the disk may be full"
        raise DataError(f"checkpoint {target}: cannot be written ({reason})") from cause
