"""IDX files, plain or gzip-compressed: the format of MNIST and its relatives.

Layout: two zero bytes, one byte for the element type, one for the number of dimensions, each dimension as a big-endian
32-bit integer, then the elements, big-endian, in row-major order. A reader that trusts any of these fields can return a
wrong array without a word, so each is checked, and the data must end exactly where the dimensions say.

References
----------
Y. LeCun, C. Cortes, C. J. C. Burges, "The MNIST database of handwritten digits", section "File formats".
"""

from __future__ import annotations

import gzip
import io
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import DataError

_DTYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CHUNK = 1 << 20
# A compressed file of a few megabytes can unpack to thousands of times its size.
MOST_BYTES = 4 << 30


def read(
    path: str | os.PathLike[str], *, dtype: npt.DTypeLike | None = None, ndim: int | None = None
) -> npt.NDArray[Any]:
    """Read one IDX file, in native byte order; gzip is recognized by its first two bytes, not by its name.

    DataError where it is missing, unreadable, truncated, too long, corrupt, or not of the `dtype` and `ndim` asked for;
    where a compressed one unpacks to more than `MOST_BYTES`. Guarantee: damage to a gzip-compressed file gives
    DataError or the true array (gzip carries a checksum). Damage to the elements of a plain IDX file cannot be seen by
    any reader; damage to its header or length is.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if file.peek(2)[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=file) as content:
                    values = _parse(content, path, MOST_BYTES)
            else:
                values = _parse(file, path)
    except DataError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as cause:
        raise DataError(f"{path}: the gzip data is truncated or corrupt ({cause}); fetch the file again") from cause
    except FileNotFoundError as cause:
        raise DataError(f"{path}: no such file") from cause
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    if ndim is not None and values.ndim != ndim:
        raise DataError(f"{path}: has {values.ndim} dimensions, expected {ndim}; is it the right file?")
    if dtype is not None and values.dtype != np.dtype(dtype):
        raise DataError(f"{path}: holds {values.dtype} numbers, expected {np.dtype(dtype)}; is it the right file?")
    return values


def _parse(file: io.BufferedIOBase, path: Path, most: float = math.inf) -> npt.NDArray[Any]:
    magic = _take(file, 4, path)
    if magic[:2] != b"\0\0" or magic[2] not in _DTYPES:
        raise DataError(f"{path}: does not start like an IDX file (first bytes {magic.hex(' ')})")
    dtype, ndim = np.dtype(_DTYPES[magic[2]]), magic[3]
    if not 1 <= ndim <= 32:
        raise DataError(f"{path}: the header states {ndim} dimensions; between 1 and 32 can be read")
    header = _take(file, 4 * ndim, path)
    shape = tuple(int(size) for size in np.frombuffer(header, ">u4"))
    size = math.prod(shape) * dtype.itemsize
    if size > most:
        raise DataError(f"{path}: unpacks to {size:,} bytes; must be at most {most:,}, or be unpacked before (gunzip)")
    content = _take(file, size, path)
    # Reading past the end also makes gzip verify its checksum.
    if file.read(1):
        raise DataError(f"{path}: has more data than its header states ({shape} of {dtype.name}); it is corrupt")
    values = np.frombuffer(content, dtype).reshape(shape)
    return values.astype(dtype.newbyteorder("="))


def _take(file: io.BufferedIOBase, size: int, path: Path) -> bytearray:
    """Read exactly `size` bytes, in chunks: a corrupt header must not reserve memory that the file cannot fill."""
    content = bytearray()
    while len(content) < size:
        chunk = file.read(min(_CHUNK, size - len(content)))
        if not chunk:
            raise DataError(f"{path}: ends {size - len(content):,} bytes before its header says; the file is truncated")
        content += chunk
    return content


def find(folder: str | os.PathLike[str], name: str) -> Path:
    """Return the file for `name` (such as ``train-images-idx3-ubyte``) in a folder, plain or with ``.gz``.

    The spelling ``train-images.idx3-ubyte``, which some mirrors use, is found too. A plain file comes first.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"data_dir={str(folder)!r}: is not a folder")
    stem, dot_spelling = name, ".idx".join(name.rsplit("-idx", 1))
    for candidate in (stem, dot_spelling, f"{stem}.gz", f"{dot_spelling}.gz"):
        path = folder / candidate
        if path.is_file():
            return path
    there = sorted(path.name for path in folder.iterdir())
    seen = ", ".join(there[:6]) + (" ..." if len(there) > 6 else "") if there else "nothing"
    raise DataError(f"data_dir={str(folder)!r}: has no {name}[.gz]; it holds {seen}")
