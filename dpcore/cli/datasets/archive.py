"""Reads arrays from .npz archives that a stranger may have written: damage, pickles and bombs end in a sentence."""

from __future__ import annotations

import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import DataError

# A file of a few megabytes can unpack to thousands of times its size.
MOST_BYTES = 4 << 30
_CHUNK = 1 << 18

# What zipfile, zlib and numpy.lib.format are seen to raise on damaged archives.
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, TypeError, SyntaxError, KeyError,
    IndexError, OverflowError, MemoryError, NotImplementedError, RuntimeError)  # fmt: skip


def read_arrays(
    path: str | os.PathLike[str], keys: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of these names; `optional` ones where the archive holds them.

    DataError where the file is missing, damaged, lacks a key, unpacks to more than `MOST_BYTES`, or holds pickled
    objects, which are never loaded: a pickle can run code. Every member is read to its end, so that the archive's
    checksum is verified; `numpy.load` stops where the array's own header says and can miss damage there. No more of it
    is read than the archive's directory states.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            missing = [key for key in keys if f"{key}.npy" not in names]
            if missing:
                held = ", ".join(sorted(name.removesuffix(".npy") for name in names)) or "nothing"
                raise DataError(f"{path}: lacks {', '.join(missing)}; it holds {held}, and must hold {', '.join(keys)}")
            wanted = [*keys, *(key for key in optional if f"{key}.npy" in names)]
            packed = [info for info in (archive.getinfo(f"{key}.npy") for key in wanted) if info.compress_type]
            unpacked = sum(info.file_size for info in packed)
            if unpacked > MOST_BYTES:
                raise DataError(
                    f"{path}: unpacks to {unpacked:,} bytes; must be at most {MOST_BYTES:,}, or be stored without "
                    "compression (numpy.savez)"
                )
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
    content = io.BytesIO()
    with archive.open(f"{key}.npy") as packed:
        # In chunks: a whole read unpacks all that there is, whatever the directory states, and cuts it afterwards.
        while chunk := packed.read(_CHUNK):
            content.write(chunk)
    content.seek(0)
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
