"""Data sets and records: archives and IDX files are read back, damaged ones are refused or come back true."""

import contextlib
import functools
import gzip
import io
import struct
import tracemalloc
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpcore.cli import datasets
from dpcore.cli.datasets import KEYS, Dataset, load, scaled
from dpcore.cli.gradients import load_gradients, save_gradients
from dpcore.errors import ArgumentError, DataError
from tests.depth import chosen
from tests.refused import refused

read_npz = functools.partial(datasets.read_arrays, keys=KEYS, optional=("classes",))
FILES = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {"x_train": generator.integers(0, 256, (6, 4, 4), dtype=np.uint8), "y_train": np.arange(6) % 3,
        "x_test": generator.integers(0, 256, (3, 4, 4), dtype=np.uint8), "y_test": np.arange(3)}  # fmt: skip


def packed(save: Any = np.savez_compressed, **changes: Any) -> bytes:
    file = io.BytesIO()
    save(file, **{key: value for key, value in (arrays() | changes).items() if value is not None})
    return file.getvalue()


def same(read: dict[str, np.ndarray]) -> bool:
    return all(read[key].dtype == v.dtype and np.array_equal(read[key], v) for key, v in arrays().items())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_read_back(tmp_path, save: Any):
    path = tmp_path / "data.npz"
    path.write_bytes(packed(save, classes=np.int64(7)))
    read = read_npz(path)
    assert set(read) == {*KEYS, "classes"}
    assert same(read)


@given(compressed=st.booleans(), data=st.data())
@settings(FILES, max_examples=chosen(100, 300))
def test_a_cut_archive_is_refused_and_a_damaged_one_too_or_true(tmp_path, compressed: bool, data: st.DataObject):
    content = bytearray(packed(np.savez_compressed if compressed else np.savez))
    path = tmp_path / "data.npz"
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refused(DataError, "data", read_npz, path)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        assert same(read_npz(path))


def test_a_shape_that_hides_a_part_of_the_data_is_refused(tmp_path):
    # numpy.load returns the first four rows without a word: the checksum is right, the header is not.
    member = io.BytesIO()
    np.save(member, arrays()["x_train"])
    shortened = member.getvalue().replace(b"(6, 4, 4)", b"(4, 4, 4)")
    source, path = io.BytesIO(packed()), tmp_path / "data.npz"
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, shortened if name == "x_train.npy" else old.read(name))
    assert len(np.load(path)["x_train"]) == 4
    refused(DataError, "x_train has more data than its header states", read_npz, path)


def test_a_pickle_is_never_loaded(tmp_path):
    ran = []

    class Trap:
        def __reduce__(self) -> Any:
            return ran.append, (1,)

    path = tmp_path / "data.npz"
    path.write_bytes(packed(x_test=np.array([Trap()], dtype=object)))
    refused(DataError, "x_test has Python objects", read_npz, path)
    assert not ran


def test_messages_name_what_is_missing(tmp_path):
    path = tmp_path / "data.npz"
    refused(DataError, "no such file", read_npz, path)
    refused(DataError, "cannot be read", read_npz, tmp_path)
    path.write_bytes(packed(y_test=None, x_train=None))
    refused(DataError, r"lacks x_train, y_test; it has x_test, y_train, and must have", read_npz, path)
    path.write_text("nonsense")
    refused(DataError, "is not a", read_npz, path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb.npz"
    path.write_bytes(packed(x_train=np.zeros(10_000_000, np.uint8)))
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(datasets, "MOST_BYTES", 1_000_000)
    tracemalloc.start()
    refused(DataError, r"bomb\.npz: unpacks to 10,000,\d+ bytes; must be at most 1,000,000", read_npz, path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    # A directory that states less than there is: no more than it states is unpacked, and the checksum tells.
    content = bytearray(path.read_bytes())
    start = content.rindex(b"PK\x01\x02", 0, content.rindex(b"x_train.npy"))
    content[start + 24 : start + 28] = (1000).to_bytes(4, "little")
    path.write_bytes(content)
    tracemalloc.reset_peak()
    refused(DataError, "truncated or corrupt", read_npz, path)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    # What is not compressed is as large on the disk, and is taken.
    path.write_bytes(packed(np.savez, x_train=np.zeros(2_000_000, np.uint8)))
    assert read_npz(path)["x_train"].size == 2_000_000


# gradients.npz: written whole, read back the same, and refused in one sentence where it is damaged.


def record(**changes: object) -> dict[str, object]:
    g = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    whole = {"released": g, "filtered": g / 2, "negative_share": np.array([np.nan, 0, 0.25, 0.5, 1, 0], np.float32),
        "dimension": 10, "noise_std": 0.1}  # fmt: skip
    return {**whole, **changes}


def save_record(path: Path, **changes: object) -> Path:
    return save_gradients(path, **record(**changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("white", [True, False])
def test_what_is_saved_is_loaded(tmp_path, white: bool):
    assert save_record(tmp_path, white_noise=white) == tmp_path / "gradients.npz"
    assert [path.name for path in tmp_path.iterdir()] == ["gradients.npz"]
    for place in (tmp_path, tmp_path / "gradients.npz"):
        back = load_gradients(place)
        for key, value in record(white_noise=white).items():
            np.testing.assert_array_equal(getattr(back, key), value)
        assert back.released.dtype == back.filtered.dtype == back.negative_share.dtype == np.float32


@pytest.mark.parametrize(("changes", "said"), [
    ({"released": np.array([["a"]])}, "must be real numbers"),
    ({"released": np.ones(6)}, r"released: has shape \(6,\)"),
    ({"released": np.ones((0, 4))}, "at least one of each"),
    ({"released": np.full((6, 4), np.nan)}, "released: has values that are not finite"),
    ({"filtered": np.full((6, 4), 1e39)}, "filtered: has values that are not finite"),
    ({"filtered": np.ones((6, 3))}, r"filtered: has shape \(6, 3\); must be \(6, 4\)"),
    ({"negative_share": np.ones(5)}, r"negative_share: has shape \(5,\)"),
    ({"negative_share": np.full(6, 1.5)}, r"must lie in \[0, 1\]"),
    ({"negative_share": np.full(6, -0.5)}, r"must lie in \[0, 1\]"),
    ({"dimension": 3}, "dimension=3: must be at least the 4 coordinates recorded"),
    ({"dimension": 0}, "dimension=0"), ({"noise_std": -1.0}, "noise_std=-1"),
    ({"noise_std": float("nan")}, "noise_std=nan"),
])  # fmt: skip
def test_what_does_not_fit_is_not_written(tmp_path, changes: dict[str, object], said: str):
    refused(ArgumentError, said, save_record, tmp_path, **changes)
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused(tmp_path):
    refused(DataError, "no such file; `dpcore train --record-gradients N", load_gradients, tmp_path)
    file = tmp_path / "gradients.npz"
    file.write_bytes(b"not a zip")
    refused(DataError, r"is not a \.npz archive", load_gradients, tmp_path)
    np.savez(file, released=np.ones((2, 2)))
    refused(DataError, "lacks filtered, negative_share, dimension, noise_std", load_gradients, tmp_path)
    np.savez(file, **record(white_noise=True, released=np.array([[1, "a"]], dtype=object)))  # type: ignore[arg-type]
    refused(DataError, "released has Python objects", load_gradients, tmp_path)
    np.savez(file, **record(white_noise=True, dimension=2))  # type: ignore[arg-type]
    refused(DataError, "dimension=2: must be at least the 4 coordinates", load_gradients, tmp_path)
    np.savez(file, **record(white_noise=True, noise_std=np.ones(2)))  # type: ignore[arg-type]
    refused(DataError, "size 1", load_gradients, tmp_path)


# IDX files: what is written is read; what is damaged is refused, or comes back true.


def encode(values: np.ndarray) -> bytes:
    """Write IDX by the format's own words, independently of the reader."""
    header = bytes([0, 0, 8, values.ndim]) + b"".join(struct.pack(">I", size) for size in values.shape)
    return header + values.tobytes()


idx_arrays = hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=5))


def same_bits(read: np.ndarray, values: np.ndarray) -> bool:
    return (read.dtype, read.shape, read.tobytes()) == (values.dtype, values.shape, values.tobytes())


@given(values=idx_arrays, packed=st.booleans(), extra=st.binary(min_size=1, max_size=20), data=st.data())
@FILES
def test_a_file_is_read_back_bit_for_bit_and_refused_in_any_other_length(
    tmp_path, values: np.ndarray, packed: bool, extra: bytes, data: st.DataObject
):
    path, pack = tmp_path / "values", gzip.compress if packed else bytes
    path.write_bytes(pack(encode(values)))
    assert same_bits(datasets.read_idx(path, values.ndim), values)
    path.write_bytes(pack(encode(values) + extra))
    refused(DataError, "more data", datasets.read_idx, path, values.ndim)
    content = pack(encode(values))
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    refused(DataError, "values", datasets.read_idx, path, values.ndim)


@given(content=st.binary(max_size=60))
@FILES
def test_any_bytes_give_an_array_or_a_data_error(tmp_path, content: bytes):
    path = tmp_path / "values"
    for start in (b"", b"\0\0\x08", b"\x1f\x8b\x08"):
        path.write_bytes(start + content)
        with contextlib.suppress(DataError):
            assert isinstance(datasets.read_idx(path, 1), np.ndarray)


def test_a_packed_bomb_is_refused_before_it_is_unpacked(tmp_path, monkeypatch):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(encode(np.zeros(10_000_000, np.uint8))))
    monkeypatch.setattr(datasets, "MOST_BYTES", 1_000_000)
    tracemalloc.start()
    refused(DataError, "bomb: unpacks to 10,000,000 bytes; must be at most 1,000,000", datasets.read_idx, path, 1)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()
    # What is not compressed is as large on the disk, and is taken.
    path.write_bytes(encode(np.zeros(2_000_000, np.uint8)))
    assert datasets.read_idx(path, 1).size == 2_000_000


def test_messages_name_the_file_and_the_remedy(tmp_path):
    refused(DataError, "no such file", datasets.read_idx, tmp_path / "absent", 1)
    refused(DataError, "cannot be read", datasets.read_idx, tmp_path, 1)
    labels = tmp_path / "labels"
    labels.write_bytes(encode(np.arange(5, dtype=np.uint8)))
    refused(DataError, "1 dimensions, expected 3", datasets.read_idx, labels, ndim=3)
    labels.write_bytes(b"\0\0\x0d\1" + labels.read_bytes()[4:])
    refused(DataError, "does not start like an IDX file of bytes", datasets.read_idx, labels, 1)


# Names, folders, public scales and the held-out split.


def folder(path: Path, *, size: tuple[int, int] = (28, 28), labels: int = 10, missing: int = 0) -> Path:
    for name, count in (("train", 20), ("t10k", 10)):
        images = np.arange(count * size[0] * size[1]).reshape(count, *size) % 256
        (path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(encode(images.astype(np.uint8))))
        (path / f"{name}-labels-idx1-ubyte").write_bytes(encode((np.arange(count - missing) % labels).astype(np.uint8)))
    return path


def test_the_digits_are_scikit_learns():
    source = pytest.importorskip("sklearn.datasets").load_digits()
    digits = load()
    assert (len(digits), len(digits.test_inputs), digits.classes, digits.shape) == (1438, 359, 10, (1, 8, 8))
    together = np.concatenate([digits.train_inputs, digits.test_inputs]).reshape(-1, 64)
    targets = np.concatenate([digits.train_targets, digits.test_targets])
    rows = sorted(map(tuple, np.column_stack([together * 16, targets]).tolist()))
    assert rows == sorted(map(tuple, np.column_stack([source.data, source.target]).tolist()))


def test_the_split_is_stratified_and_disjoint():
    digits = load("digits")
    train = np.bincount(digits.train_targets)
    test = np.bincount(digits.test_targets)
    assert np.all(np.abs(test - 0.2 * (train + test)) <= 0.5)
    seen = {row.tobytes() for row in digits.train_inputs}
    assert not any(row.tobytes() in seen for row in digits.test_inputs)


def test_mnist_files_are_read_and_scaled_by_255(tmp_path):
    data = load("mnist", folder(tmp_path))
    assert (len(data), data.shape, data.classes, data.name) == (20, (1, 28, 28), 10, "mnist")
    expected = (np.arange(20 * 784) % 256).reshape(20, 1, 28, 28) / 255
    np.testing.assert_allclose(data.train_inputs, expected, rtol=1e-7)
    np.testing.assert_array_equal(data.test_targets, np.arange(10))
    own = load("idx", folder(tmp_path, size=(5, 6), labels=4))
    assert (own.shape, own.classes) == ((1, 5, 6), 4)


def test_what_has_mnists_sizes_is_mnist(tmp_path, monkeypatch):
    made, digests = folder(tmp_path), []
    for role in datasets.IDX_FILES:
        path = datasets.find_idx(made, role)
        content = path.read_bytes()
        digests.append(sha256(gzip.decompress(content) if path.suffix == ".gz" else content).hexdigest())
    monkeypatch.setattr(datasets, "MNIST_SIZES", (20, 20, 10, 10))
    refused(DataError, "train-images.* is not MNIST's .* data 'idx' reads any", load, "mnist", made)
    monkeypatch.setattr(datasets, "MNIST_DIGESTS", digests)
    assert len(load("mnist", made)) == 20
    refused(DataError, "train-images.* is MNIST's, not kmnist's; wrong folder", load, "kmnist", made)
    monkeypatch.setattr(datasets, "MNIST_DIGESTS", ["no"] * 4)
    assert len(load("kmnist", made)) == len(load("idx", made)) == 20


def test_folders_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"images of \(5, 6\) pixels, but mnist has \(28, 28\)"):
        load("mnist", folder(tmp_path, size=(5, 6)))
    refused(DataError, "20 inputs but 17 targets", load, "mnist", folder(tmp_path, missing=3))
    refused(DataError, r"target outside 0\.\.9, with 10 classes", load, "mnist", folder(tmp_path, labels=12))
    refused(DataError, "no such folder", load, "mnist", tmp_path / "absent")
    swapped = folder(tmp_path) / "train-images-idx3-ubyte.gz"
    swapped.write_bytes((tmp_path / "train-labels-idx1-ubyte").read_bytes())
    refused(DataError, "1 dimensions, expected 3", load, "mnist", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    refused(DataError, r"has no t10k-labels-idx1-ubyte\[\.gz\]", load, "mnist", tmp_path)


def test_unknown_names_get_the_nearest_known_one(tmp_path):
    refused(ArgumentError, r"data='mnits': did you mean 'mnist'\?", load, "mnits")
    refused(ArgumentError, r"did you mean 'digits'\?", load, "Digit")
    refused(ArgumentError, "read from files; name their folder", load, "mnist")
    refused(ArgumentError, "digits is built in", load, "digits", tmp_path)


def test_archives_by_name_by_folder_and_by_file(tmp_path):
    images = np.arange(2 * 5 * 4 * 3, dtype=np.uint16).reshape(2, 5, 4, 3)
    np.savez(tmp_path / "own.npz", x_train=images, y_train=[[0], [1]], x_test=images, y_test=np.array([1, 0], np.uint8))
    for data in (load("own", tmp_path), load("npz", tmp_path), load("npz", tmp_path / "own.npz")):
        assert (data.name, data.shape, data.classes) == ("own", (3, 5, 4), 2)
        np.testing.assert_allclose(data.train_inputs, np.moveaxis(images, 3, 1) / 65535, rtol=1e-6)
    np.savez(tmp_path / "other.npz", x=images)
    refused(DataError, "must have one", load, "npz", tmp_path)


def test_the_number_of_classes_never_comes_from_private_targets(tmp_path):
    arrays = {"x_train": np.zeros((3, 2)), "y_train": [0, 1, 5], "x_test": np.zeros((2, 2)), "y_test": [0, 1]}
    np.savez(tmp_path / "data.npz", **arrays)
    refused(DataError, "store the number of classes in the archive", load, "npz", tmp_path)
    np.savez(tmp_path / "data.npz", classes=6, **arrays)
    assert load("npz", tmp_path).classes == 6
    np.savez(tmp_path / "data.npz", classes=-1, **arrays)
    refused(DataError, "one positive integer", load, "npz", tmp_path)


def test_labels_below_zero_are_named_and_not_the_number_of_classes(tmp_path):
    inputs = {"x_train": np.zeros((3, 2)), "x_test": np.zeros((2, 2))}
    for signs in ({}, {"classes": 2}):
        np.savez(tmp_path / "data.npz", y_train=[1, -1, 1], y_test=[1, -1], **inputs, **signs)
        with pytest.raises(DataError, match=r"train set has a target below 0; number the classes 0, 1, 2") as told:
            load("npz", tmp_path)
        assert "store" not in str(told.value)


@pytest.mark.parametrize(("values", "expected"), [
    (np.array([[0, 255]], np.uint8), [[0, 1]]), (np.array([[0, 65535]], np.uint16), [[0, 1]]),
    (np.array([[True, False]]), [[1, 0]]), (np.array([[3.5, -2.0]], np.float64), [[3.5, -2]]),
    (np.array([[1e300, np.nan]]), [[np.inf, np.nan]]),
])  # fmt: skip
def test_scales_depend_on_the_dtype_alone(values: np.ndarray, expected: list[list[float]]):
    result = scaled(values, "x")
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, np.array(expected, np.float32))


def test_unusable_arrays_are_refused():
    refused(DataError, "inputs have dtype int64", scaled, np.zeros((2, 2), np.int64), "x")
    inputs, targets = np.zeros((2, 3), np.float32), np.zeros(2, np.int64)
    for broken in (
        {"train_inputs": np.zeros((0, 3), np.float32), "train_targets": np.zeros(0, np.int64)},
        {"test_inputs": np.zeros((2, 4), np.float32)},
        {"test_targets": np.array([0, -1])},
        {"train_inputs": np.zeros(2, np.float32)},
        {"train_targets": np.zeros(2, np.float64)},
    ):
        parts = {"train_inputs": inputs, "train_targets": targets, "test_inputs": inputs, "test_targets": targets}
        with pytest.raises(DataError):
            Dataset("x", **(parts | broken), classes=1)  # type: ignore[arg-type]
