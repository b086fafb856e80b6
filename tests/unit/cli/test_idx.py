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

from dpcore.cli.datasets import idx
from dpcore.errors import DataError

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


@given(values=arrays, packed=st.booleans())
@FILES
def test_a_file_is_read_back_bit_for_bit(tmp_path, values: np.ndarray, packed: bool):
    path = tmp_path / "values"
    content = encode(values)
    path.write_bytes(gzip.compress(content) if packed else content)
    read = idx.read(path)
    assert read.dtype == values.dtype
    assert read.shape == values.shape
    assert read.tobytes() == values.tobytes()


@given(values=arrays, packed=st.booleans(), data=st.data())
@FILES
def test_every_truncation_is_refused(tmp_path, values: np.ndarray, packed: bool, data: st.DataObject):
    content = gzip.compress(encode(values)) if packed else encode(values)
    keep = data.draw(st.integers(0, len(content) - 1))
    path = tmp_path / "values"
    path.write_bytes(content[:keep])
    with pytest.raises(DataError):
        idx.read(path)


@given(values=arrays, packed=st.booleans(), extra=st.binary(min_size=1, max_size=20))
@FILES
def test_trailing_data_is_refused(tmp_path, values: np.ndarray, packed: bool, extra: bytes):
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(encode(values) + extra) if packed else encode(values) + extra)
    with pytest.raises(DataError, match="more data"):
        idx.read(path)


@given(values=arrays, data=st.data())
@FILES
def test_a_damaged_gzip_file_is_refused_or_gives_the_true_array(tmp_path, values: np.ndarray, data: st.DataObject):
    content = bytearray(gzip.compress(encode(values)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "values"
    path.write_bytes(content)
    try:
        read = idx.read(path, dtype=values.dtype, ndim=values.ndim)
    except DataError:
        return
    assert read.shape == values.shape
    assert read.tobytes() == values.tobytes()


@given(values=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=5)), data=st.data())
@FILES
def test_one_wrong_byte_in_a_plain_header_is_refused(tmp_path, values: np.ndarray, data: st.DataObject):
    content = bytearray(encode(values))
    content[data.draw(st.integers(0, 4 + 4 * values.ndim - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path / "values"
    path.write_bytes(content)
    with pytest.raises(DataError):
        idx.read(path, dtype=np.uint8, ndim=values.ndim)


@given(content=st.binary(max_size=60))
@FILES
def test_any_bytes_give_an_array_or_a_data_error(tmp_path, content: bytes):
    path = tmp_path / "values"
    for start in (b"", b"\0\0\x08", b"\x1f\x8b\x08"):
        path.write_bytes(start + content)
        with contextlib.suppress(DataError):
            assert isinstance(idx.read(path), np.ndarray)


def test_a_header_that_promises_petabytes_reserves_no_memory(tmp_path):
    path = tmp_path / "values"
    path.write_bytes(bytes([0, 0, 0x0E, 3]) + b"\xff" * 12 + b"few")
    with pytest.raises(DataError, match="truncated"):
        idx.read(path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(encode(np.zeros(10_000_000, np.uint8))))
    monkeypatch.setattr(idx, "MOST_BYTES", 1_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match="bomb: unpacks to 10,000,000 bytes; must be at most 1,000,000"):
        idx.read(path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    # What is not compressed is as large on the disk, and is taken.
    path.write_bytes(encode(np.zeros(2_000_000, np.uint8)))
    assert idx.read(path).size == 2_000_000


def test_messages_name_the_file_and_the_remedy(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        idx.read(tmp_path / "absent")
    with pytest.raises(DataError, match="cannot be read"):
        idx.read(tmp_path)
    labels = tmp_path / "labels"
    labels.write_bytes(encode(np.arange(5, dtype=np.uint8)))
    with pytest.raises(DataError, match="1 dimensions, expected 3"):
        idx.read(labels, ndim=3)
    with pytest.raises(DataError, match="uint8 numbers, expected float32"):
        idx.read(labels, dtype=np.float32)


def test_find_takes_both_spellings_and_says_what_is_there(tmp_path):
    name = "train-images-idx3-ubyte"
    (tmp_path / "train-images.idx3-ubyte.gz").touch()
    assert idx.find(tmp_path, name).name == "train-images.idx3-ubyte.gz"
    (tmp_path / name).touch()
    assert idx.find(tmp_path, name).name == name
    with pytest.raises(DataError, match=r"has no t10k-labels-idx1-ubyte\[\.gz\]; it holds train-images-idx3-ubyte, "):
        idx.find(tmp_path, "t10k-labels-idx1-ubyte")
    with pytest.raises(DataError, match="is not a folder"):
        idx.find(tmp_path / name, name)
