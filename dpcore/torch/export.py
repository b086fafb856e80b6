"""A trained model with its privacy statement and a card, and nothing of the run's secret part."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dpcore.errors import DataError
from dpcore.spec.extras import needs
from dpcore.spec.whole_file import whole_file
from dpcore.statement.card import TITLE, model_card
from dpcore.statement.statement import Statement
from dpcore.torch.run import PrivateRun

WRITTEN = ("model.safetensors", "statement.json", "statement.txt", "README.md")
"""The files of an export, the card last: if it exists, the others are complete."""


def export(
    private: PrivateRun,
    folder: str | os.PathLike[str],
    delta: float | None = None,
    *,
    title: str = TITLE,
    trained: Mapping[str, Any] | None = None,
    note: str = "",
    overwrite: bool = False,
) -> Statement | None:
    """Write the model, its privacy statement and a card into a folder that can be published.

    Parameters
    ----------
    private : PrivateRun
        As `dpcore.torch.make_private` returned; the model's output is written (`PrivateRun.output_state_dict`).
    folder : path
        Made if it does not exist.
    delta : float, optional
        The delta of the stated epsilon; by default the target delta.
    title : str
        Title of the card.
    trained : mapping of str to str or number, optional
        Public facts about model and data for the card. They are published as they are.
    note : str
        One sentence for the statement.
    overwrite : bool
        Whether an earlier export in the folder is replaced.

    Returns
    -------
    Statement or None
        The one that was written; None in other processes than the first, which write nothing. With averaging, shards
        or the accelerated method all processes must call it.

    Raises
    ------
    DataError
        If the folder already has one of the files.

    Notes
    -----
    Guarantee: the files are functions of the released parameters, the public settings, and the arguments. Keys, drawn
    indices, realized batch sizes and the state of correlated noise never reach this module. Parameters and buffers that
    were not trained (frozen layers) are written too: they must be public.
    """
    # First, since all processes may be needed for it; without a module's extra state, which is no tensor.
    state = {k: v for k, v in private.output_state_dict().items() if isinstance(v, torch.Tensor)}
    if not private.loader.in_first_process:
        return None
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise DataError(f"folder={str(target)!r}: is a file; name a folder")
    present = [name for name in WRITTEN if (target / name).exists()]
    if present and not overwrite:
        raise DataError(f"folder={str(target)!r}: already has {present[0]}; name another folder or give overwrite=True")
    statement = private.statement(delta, note=note)
    counted = {"parameters": sum(p.numel() for p in private.model.parameters()), **(trained or {})}
    contents = files(statement, state, title=title, trained=counted)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise DataError(f"folder={str(target)!r}: cannot be made ({cause.strerror})") from cause
    write(target, contents)
    return statement


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files, the card last: an earlier one goes first, so that no card stands next to another run's files."""
    if "README.md" in contents:
        (folder / "README.md").unlink(missing_ok=True)
    for name, content in contents.items():
        with whole_file(folder / name) as file:
            file.write(content)


def files(
    statement: Statement,
    tensors: Mapping[str, Any],
    *,
    title: str,
    trained: Mapping[str, Any],
) -> dict[str, bytes]:
    """Return the content of each of `WRITTEN`, from public values only; tensors may be arrays."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise DataError(needs("a model's file", "safetensors")) from None
    # One entry: the format keeps no order of several, and the card states the SHA-256 of these bytes.
    metadata = {"statement": statement.statement_hash}
    # Copies, since the format refuses tensors that share memory, as tied weights do.
    copies = {k: torch.as_tensor(v).detach().cpu().clone() for k, v in tensors.items()}
    return stated(statement, {"model.safetensors": save(copies, metadata)}, title=title, trained=trained)


def stated(
    statement: Statement, model: Mapping[str, bytes], *, title: str = TITLE, trained: Mapping[str, Any]
) -> dict[str, bytes]:
    """Return a model's files with those of its statement, and a card that lists all of them, which comes last."""
    contents = {
        **model,
        "statement.json": (statement.to_json() + "\n").encode(),
        "statement.txt": statement.text().encode(),
    }
    return {**contents, "README.md": model_card(statement, title=title, trained=trained, files=contents).encode()}
