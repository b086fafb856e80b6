"""NumPy archives with the keys x_train, y_train, x_test, y_test."""

from __future__ import annotations

import io
import lzma
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import DataError

KEYS = ("x_train", "y_train", "x_test", "y_test")

# What zipfile, zlib and numpy.lib.format are seen to raise on damaged archives.
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    TypeError,
    SyntaxError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
)


def read(path: str | os.PathLike[str]) -> dict[str, npt.NDArray[Any]]:
    """Read the four arrays, and `classes` where the archive has it.

    Parameters
    ----------
    path : path
        A .npz file, as `numpy.savez` and `numpy.savez_compressed` write it.

    Returns
    -------
    dict
        Arrays by key: those of `KEYS`, and ``classes`` (an integer scalar) if present.

    Raises
    ------
    DataError
        Where the file is missing, damaged, lacks a key, or holds pickled objects, which are never loaded: a pickle can
        run code.

    Notes
    -----
    Every member is read to its end, so that the archive's checksum is verified; `numpy.load` stops where the array's
    own header says and can miss damage there.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            missing = [key for key in KEYS if f"{key}.npy" not in names]
            if missing:
                held = ", ".join(sorted(name.removesuffix(".npy") for name in names)) or "nothing"
                raise DataError(f"{path}: lacks {', '.join(missing)}; it holds {held}, and must hold {', '.join(KEYS)}")
            wanted = [*KEYS, *(["classes"] if "classes.npy" in names else [])]
            return {key: _member(archive, key, path) for key in wanted}
    except DataError:
        raise
    except FileNotFoundError as cause:
        raise DataError(f"{path}: no such file") from cause
    except zipfile.BadZipFile as cause:
        raise DataError(f"{path}: is not a .npz archive, or it is truncated or corrupt ({cause})") from cause
    except _DAMAGE as cause:
        raise DataError(f"{path}: the .npz archive is damaged ({cause})") from cause
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror or cause})") from cause


def _member(archive: zipfile.ZipFile, key: str, path: Path) -> npt.NDArray[Any]:
    content = io.BytesIO(archive.read(f"{key}.npy"))
    try:
        values: npt.NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
    except ValueError as cause:
        if "Object arrays" in str(cause) or "pickle" in str(cause):
            message = f"{path}: {key} holds Python objects, which are never loaded; save a numeric array"
            raise DataError(message) from cause
        raise DataError(f"{path}: {key} is not a readable array ({str(cause).splitlines()[0]})") from cause
    if content.read(1):
        raise DataError(f"{path}: {key} has more data than its header states; the file is corrupt")
    return values
