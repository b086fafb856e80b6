"""Names, folders, public scales and the held-out split."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from dpcore.cli.datasets import Dataset, load, scaled
from dpcore.errors import ArgumentError, DataError
from tests.refused import refused


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
    return header + values.astype(np.uint8).tobytes()


def folder(path: Path, *, size: tuple[int, int] = (28, 28), labels: int = 10, missing: int = 0) -> Path:
    for name, count in (("train", 20), ("t10k", 10)):
        images = np.arange(count * size[0] * size[1]).reshape(count, *size) % 256
        (path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (path / f"{name}-labels-idx1-ubyte").write_bytes(idx(np.arange(count - missing) % labels))
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
    refused(DataError, "must hold one", load, "npz", tmp_path)


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
