"""Reads the accountant's history from a checkpoint of Opacus."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpcore.accounting.other_libraries import accountant_state
from dpcore.errors import ArgumentTypeError, DataError


def read_opacus_checkpoint(path: str | Path) -> Mapping[str, Any]:
    """Return the accountant's state in a file that Opacus's `PrivacyEngine.save_checkpoint` wrote.

    The file is read as plain values and tensors (``weights_only=True``), never unpickled; the tensors' numbers are not
    read at all, so that a checkpoint of a GPU, or of a large model, costs nothing here. Opacus itself is not needed.

    Parameters
    ----------
    path : str or Path
        The checkpoint, or a file of ``torch.save(accountant.state_dict(), path)``.

    Returns
    -------
    mapping
        "history" and "mechanism"; for `dpcore.accounting.from_opacus`.

    Raises
    ------
    DataError
        If the file cannot be read, has objects, or has no accountant's state.
    """
    try:
        # On the device "meta" a tensor has a shape and no numbers.
        content = torch.load(path, map_location="meta", weights_only=True)
    except OSError as cause:
        raise DataError(f"{path}: {cause.strerror or cause}") from cause
    except Exception as cause:
        raise DataError(
            f"{path}: cannot be read as plain values and tensors (it is damaged, or has objects, which are never "
            "unpickled here); if it is yours, load it with Opacus and save json.dumps(engine.accountant.state_dict())"
        ) from cause
    try:
        return accountant_state(content)
    except ArgumentTypeError as cause:
        raise DataError(f"{path}: {str(cause).removeprefix('state: ')}") from cause
