"""One function from a name to a data set."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

import numpy as np

from dpcore.cli.datasets import idx
from dpcore.cli.datasets.archive import read_arrays
from dpcore.cli.datasets.dataset import Dataset, Targets, as_images, class_numbers, scaled
from dpcore.errors import ArgumentError, DataError
from dpcore.spec.validate import nearest

# Collections in the IDX format of MNIST: public facts (classes, image size) that the files must agree with.
_IDX_SETS = {"mnist": (10, (28, 28)), "fashion-mnist": (10, (28, 28)), "kmnist": (10, (28, 28))}
_ROLES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

KEYS = ("x_train", "y_train", "x_test", "y_test")

NAMES = ("digits", *_IDX_SETS, "idx", "npz")


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
