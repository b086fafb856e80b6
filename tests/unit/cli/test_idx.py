"""IDX files: what is written is read; what is damaged is refused, or comes back true."""

from __future__ import annotations

import contextlib
import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpcore.cli import datasets
from dpcore.errors import DataError
from tests.refused import refused

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}
FILES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def encode(values: np.ndarray) -> bytes:
    """Write IDX by the format's own words, independently of the reader."""
    code = CODES[values.dtype.str[1:]]
    header = bytes([0, 0, code, values.ndim]) + b"".join(struct.pack(">I", size) for size in values.shape)
    return header + values.astype(values.dtype.newbyteorder(">")).tobytes()


arrays = st.sampled_from(sorted(CODES)).flatmap(
    lambda code: hnp.arrays(np.dtype(code), hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))
)


def same(read: np.ndarray, values: np.ndarray) -> bool:
    return (read.dtype, read.shape, read.tobytes()) == (values.dtype, values.shape, values.tobytes())


@given(values=arrays, packed=st.booleans(), extra=st.binary(min_size=1, max_size=20), data=st.data())
@FILES
def test_a_file_is_read_back_bit_for_bit_and_refused_in_any_other_length(
    tmp_path, values: np.ndarray, packed: bool, extra: bytes, data: st.DataObject
):
    path, pack = tmp_path / "values", gzip.compress if packed else bytes
    path.write_bytes(pack(encode(values)))
    assert same(datasets.read_idx(path), values)
    path.write_bytes(pack(encode(values) + extra))
    refused(DataError, "more data", datasets.read_idx, path)
    content = pack(encode(values))
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refused(DataError, "values", datasets.read_idx, path)


@given(values=arrays, plain=st.booleans(), data=st.data())
@FILES
def test_damage_is_refused_or_gives_the_true_array(tmp_path, values: np.ndarray, plain: bool, data: st.DataObject):
    """Anywhere in a gzip file, and one byte of a plain file's header."""
    content = bytearray(encode(values) if plain else gzip.compress(encode(values)))
    for _ in range(1 if plain else data.draw(st.integers(1, 3))):
        last = 4 + 4 * values.ndim if plain else len(content)
        content[data.draw(st.integers(0, last - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "values"
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        read = datasets.read_idx(path, dtype=values.dtype, ndim=values.ndim)
        assert same(read, values) or (plain and not values.size and not read.size)


@given(content=st.binary(max_size=60))
@FILES
def test_any_bytes_give_an_array_or_a_data_error(tmp_path, content: bytes):
    path = tmp_path / "values"
    for start in (b"", b"\0\0\x08", b"\x1f\x8b\x08"):
        path.write_bytes(start + content)
        with contextlib.suppress(DataError):
            assert isinstance(datasets.read_idx(path), np.ndarray)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(encode(np.zeros(10_000_000, np.uint8))))
    monkeypatch.setattr(datasets, "MOST_BYTES", 1_000_000)
    tracemalloc.start()
    refused(DataError, "bomb: unpacks to 10,000,000 bytes; must be at most 1,000,000", datasets.read_idx, path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    # What is not compressed is as large on the disk, and is taken.
    path.write_bytes(encode(np.zeros(2_000_000, np.uint8)))
    assert datasets.read_idx(path).size == 2_000_000


def test_messages_name_the_file_and_the_remedy(tmp_path):
    refused(DataError, "no such file", datasets.read_idx, tmp_path / "absent")
    refused(DataError, "cannot be read", datasets.read_idx, tmp_path)
    labels = tmp_path / "labels"
    labels.write_bytes(encode(np.arange(5, dtype=np.uint8)))
    refused(DataError, "1 dimensions, expected 3", datasets.read_idx, labels, ndim=3)
    refused(DataError, "uint8 numbers, expected float32", datasets.read_idx, labels, dtype=np.float32)


def test_find_takes_both_spellings_and_says_what_is_there(tmp_path):
    name = "train-images-idx3-ubyte"
    (tmp_path / "train-images.idx3-ubyte.gz").touch()
    assert datasets.find_idx(tmp_path, name).name == "train-images.idx3-ubyte.gz"
    (tmp_path / name).touch()
    assert datasets.find_idx(tmp_path, name).name == name
    with pytest.raises(DataError, match=r"has no t10k-labels-idx1-ubyte\[\.gz\]; it holds train-images-idx3-ubyte, "):
        datasets.find_idx(tmp_path, "t10k-labels-idx1-ubyte")
    refused(DataError, "is not a folder", datasets.find_idx, tmp_path / name, name)
