"""The one container of all data sets, and the function that reads one by its name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.cli.datasets import idx
from dpcore.cli.datasets.archive import read_arrays
from dpcore.errors import ArgumentError, DataError
from dpcore.spec.validate import nearest

# Collections in the IDX format of MNIST: public facts (classes, image size) that the files must agree with.
_IDX_SETS = {"mnist": (10, (28, 28)), "fashion-mnist": (10, (28, 28)), "kmnist": (10, (28, 28))}
_ROLES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

KEYS = ("x_train", "y_train", "x_test", "y_test")

NAMES = ("digits", *_IDX_SETS, "idx", "npz")

Inputs = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled examples, split into a private training set and a held-out test set.

    The sizes of both sets, the shape of an example and the number of classes are treated as public. The test set is
    declared not to be in the training set, so that accuracy on it costs no privacy.

    Parameters
    ----------
    name : str
        Name for reports.
    train_inputs, test_inputs : ndarray of float32, shape (n, ...) and (m, ...)
        Images are (n, channels, height, width); anything else is (n, features...).
    train_targets, test_targets : ndarray of int64, shape (n,) and (m,)
        Class numbers, 0 <= target < `classes`.
    classes : int
        Number of classes.

    Raises
    ------
    DataError
        Where shapes, lengths or class numbers do not fit together.
    """

    name: str
    train_inputs: Inputs
    train_targets: Targets
    test_inputs: Inputs
    test_targets: Targets
    classes: int

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            shape = getattr(self, f"{part}_inputs").shape
            if 0 in shape:
                raise DataError(
                    f"{self.name}: the {part} set is empty (inputs of shape {shape}); it needs at least one example"
                )
        for part in ("train", "test"):
            inputs: npt.NDArray[Any] = getattr(self, f"{part}_inputs")
            targets: npt.NDArray[Any] = getattr(self, f"{part}_targets")
            where = f"{self.name}: the {part} set"
            if inputs.dtype != np.float32 or targets.dtype != np.int64:
                raise DataError(f"{where} must have float32 inputs, int64 targets; not {inputs.dtype}, {targets.dtype}")
            if inputs.ndim < 2 or targets.ndim != 1:
                raise DataError(
                    f"{where} must have inputs of shape (examples, ...) and targets of shape (examples,), "
                    f"not {inputs.shape} and {targets.shape}"
                )
            if len(inputs) != len(targets):
                raise DataError(f"{where} has {len(inputs):,} inputs but {len(targets):,} targets; they must pair up")
            if not np.isfinite(inputs).all():
                row = int(np.argmin(np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1)))
                raise DataError(
                    f"{where} has values that are not finite (NaN, or too large for float32), the first in row {row}; "
                    "leave such examples out, or put numbers in their place"
                )
            if targets.min() < 0:
                raise DataError(f"{where} has a target below 0; number the classes 0, 1, 2, ... (0 and 1 for -1 and 1)")
            if targets.max() >= self.classes:
                raise DataError(f"{where} has a target outside 0..{self.classes - 1}, with {self.classes} classes")
            # Every run may share one loaded data set: nobody gets to write into it.
            inputs.flags.writeable = False
            targets.flags.writeable = False
        if self.train_inputs.shape[1:] != self.test_inputs.shape[1:]:
            raise DataError(
                f"{self.name}: an example has shape {self.train_inputs.shape[1:]} in the train set but "
                f"{self.test_inputs.shape[1:]} in the test set; they must be equal"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.train_inputs.shape[1:])

    def __len__(self) -> int:
        """Return the number of training examples, the public n of the privacy statement."""
        return len(self.train_inputs)


def scaled(values: npt.NDArray[Any], where: str) -> Inputs:
    """Convert to float32 by a constant that depends on the dtype alone, never on the values.

    Unsigned integers are divided by the largest value of their dtype (255 for uint8) and booleans become 0 and 1.
    Floating-point values are taken as they are: a scale estimated from the training set would be a release that nobody
    accounted for. Non-finite values stay too, and `Dataset` refuses them.
    """
    if values.dtype == np.bool_:
        return values.astype(np.float32)
    if values.dtype.kind == "u":
        result: Inputs = np.divide(values, np.float32(np.iinfo(values.dtype).max), dtype=np.float32)
        return result
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    raise DataError(
        f"{where}: inputs have dtype {values.dtype}; store them as unsigned integers (scaled by their largest "
        "possible value) or as floating-point numbers (taken as they are)"
    )


def class_numbers(values: npt.NDArray[Any], where: str) -> Targets:
    """Convert class numbers, integers of any kind, to int64; a column of shape (n, 1) is flattened."""
    if values.dtype.kind not in "iu":
        raise DataError(f"{where}: targets have dtype {values.dtype}; they must be integers, the class numbers from 0")
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(f"{where}: a target is larger than 64-bit signed integers can hold; number the classes from 0")
    return values.astype(np.int64)


def as_images(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return (n, height, width) as (n, 1, height, width), and (n, height, width, 1 or 3) with the channels first."""
    if values.ndim == 3:
        return values[:, None]
    if values.ndim == 4 and values.shape[3] in (1, 3) and values.shape[1] not in (1, 3):
        return np.ascontiguousarray(np.moveaxis(values, 3, 1))
    return values


def load(name: str = "digits", data_dir: str | os.PathLike[str] | None = None) -> Dataset:
    """Load a data set by name.

    Parameters
    ----------
    name : str
        ``digits`` (built in); ``mnist``, ``fashion-mnist`` or ``kmnist`` (their four IDX files, plain or .gz, in
        `data_dir`); ``idx`` (any four IDX files with MNIST's names); ``npz`` (the one .npz file in `data_dir`, or
        `data_dir` is that file); or any NAME for which ``data_dir/NAME.npz`` exists.
    data_dir : path, optional
        Where the files are; needed for everything but ``digits``.

    Returns
    -------
    Dataset
        Unsigned integers come scaled to [0, 1] by the largest value of their dtype (digits: by 16, their format's
        maximum); floating-point inputs come as they are.

    Raises
    ------
    ArgumentError
        For an unknown name (the message has the nearest known one) or a `data_dir` that is missing or not used.
    DataError
        Where files are missing, damaged, or do not fit together.
    """
    if name == "digits":
        if data_dir is not None:
            raise ArgumentError(f"data_dir={str(data_dir)!r}: digits is built in and takes no folder; name other data")
        return _digits()
    folder = Path(data_dir) if data_dir is not None else None
    own = None if folder is None else folder / f"{name}.npz"
    if name not in NAMES and not (own is not None and own.is_file()):
        near = nearest(name.lower(), NAMES)
        hint = f"did you mean {near!r}? " if near else ""
        elsewhere = f", or NAME where {folder}/NAME.npz exists" if folder is not None else ""
        raise ArgumentError(f"data={name!r}: {hint}known data are {', '.join(NAMES)}{elsewhere}")
    if folder is None:
        raise ArgumentError(f"data_dir=None: {name} is read from files; name their folder")
    if not folder.exists():
        raise DataError(f"data_dir={str(folder)!r}: no such folder")
    if name in _IDX_SETS:
        return _idx(name, folder, *_IDX_SETS[name])
    if name == "idx":
        return _idx(name, folder, None, None)
    return _npz(own if own is not None and own.is_file() else _single_npz(folder))


def _digits() -> Dataset:
    with resources.as_file(resources.files("dpcore.cli.datasets") / "digits.npz") as path:
        arrays = read_arrays(path, KEYS)
    # Pixels count the set points of a 4 x 4 block: 16 is the format's maximum, whatever the data.
    train, test = (np.divide(arrays[key], np.float32(16), dtype=np.float32)[:, None] for key in ("x_train", "x_test"))
    train_targets, test_targets = (class_numbers(arrays[key], "digits") for key in ("y_train", "y_test"))
    return Dataset("digits", train, train_targets, test, test_targets, classes=10)


def _idx(name: str, folder: Path, classes: int | None, shape: tuple[int, int] | None) -> Dataset:
    train_images, train_labels, test_images, test_labels = (idx.find(folder, role) for role in _ROLES)
    parts = []
    for images, labels in ((train_images, train_labels), (test_images, test_labels)):
        pixels = idx.read(images, dtype=np.uint8, ndim=3)
        if shape is not None and pixels.shape[1:] != shape:
            raise DataError(
                f"{images}: holds images of {pixels.shape[1:]} pixels, but {name} has {shape}; wrong folder?"
            )
        numbers = idx.read(labels, dtype=np.uint8, ndim=1)
        parts.append((scaled(pixels, str(images))[:, None], class_numbers(numbers, str(labels))))
    return Dataset(name, *parts[0], *parts[1], classes=classes or _public_classes(parts[1][1]))


def _npz(path: Path) -> Dataset:
    arrays = read_arrays(path, KEYS, optional=("classes",))
    parts = {}
    for part in ("train", "test"):
        inputs = scaled(as_images(arrays[f"x_{part}"]), f"{path}: x_{part}")
        parts[part] = (inputs, class_numbers(arrays[f"y_{part}"], f"{path}: y_{part}"))
    if "classes" in arrays:
        stated = arrays["classes"]
        if stated.ndim or stated.dtype.kind not in "iu" or stated < 1:
            raise DataError(f"{path}: classes must be one positive integer, the number of classes")
        classes = int(stated)
    else:
        classes = _public_classes(parts["test"][1])
    try:
        return Dataset(path.stem, *parts["train"], *parts["test"], classes=classes)
    except DataError as cause:
        if "classes" not in arrays and "outside 0" in str(cause):
            remedy = "store the number of classes in the archive as `classes`"
            raise DataError(f"{cause} (counted from y_test); {remedy}") from cause
        raise


def _public_classes(test_targets: Targets) -> int:
    """Count the classes from the held-out targets: the largest training target is a fact about private data."""
    return int(test_targets.max(initial=0)) + 1


def _single_npz(folder: Path) -> Path:
    if folder.is_file():
        return folder
    found = sorted(folder.glob("*.npz"))
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise DataError(f"data_dir={str(folder)!r}: must hold one .npz file (found {there}), or name the file itself")
    return found[0]
