"""Data sets as NumPy arrays: built-in digits, IDX files, CIFAR's, .npz archives, texts; and folders of images."""

import gzip
import io
import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.cli.datasets import cifar, image_folder, text, tokens
from dpcore.cli.datasets.files import listed, reading
from dpcore.cli.datasets.image_folder import Images
from dpcore.errors import ArgumentError, DataError
from dpcore.spec.validate import nearest

__all__ = ["NAMES", "Dataset", "TextDataset", "load"]

# A file of a few megabytes can unpack to thousands of times its size.
MOST_BYTES = 4 << 30
_CHUNK = 1 << 18

# Exceptions that zipfile, zlib and numpy.lib.format raise on damaged archives.
_DAMAGE: dict[type[Exception], str] = {
    zipfile.BadZipFile: "is not a .npz archive, or it is truncated or corrupt ({})",
    **dict.fromkeys(
        (zlib.error, lzma.LZMAError, EOFError, ValueError, TypeError, SyntaxError, KeyError, IndexError,
        OverflowError, MemoryError, NotImplementedError, RuntimeError), "the .npz archive is damaged ({})"
    ),
}  # fmt: skip
_DAMAGED = dict.fromkeys(
    (EOFError, zlib.error, gzip.BadGzipFile), "the gzip data is truncated or corrupt ({}); fetch the file again"
)


def read_arrays(
    path: str | os.PathLike[str], keys: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of these names, and the `optional` ones that the archive has.

    DataError if the file is missing, damaged, lacks a key, unpacks to more than `MOST_BYTES`, or has pickled objects,
    which are never loaded: a pickle can run code. Every member is read to its end, so that the archive's checksum is
    verified; `numpy.load` stops at the end stated by the array's header and can miss damage there. Never more is read
    than the archive's directory states.
    """
    path = Path(path)
    with reading(path, _DAMAGE), zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        missing = [key for key in keys if f"{key}.npy" not in names]
        if missing:
            present = ", ".join(sorted(name.removesuffix(".npy") for name in names)) or "nothing"
            raise DataError(f"{path}: lacks {', '.join(missing)}; it has {present}, and must have {', '.join(keys)}")
        wanted = [*keys, *(key for key in optional if f"{key}.npy" in names)]
        members = (archive.getinfo(f"{key}.npy") for key in wanted)
        if (unpacked := sum(info.file_size for info in members if info.compress_type)) > MOST_BYTES:
            raise DataError(
                f"{path}: unpacks to {unpacked:,} bytes; must be at most {MOST_BYTES:,}, or be stored without "
                "compression (numpy.savez)"
            )
        return {key: _member(archive, key, path) for key in wanted}


def _member(archive: zipfile.ZipFile, key: str, path: Path) -> npt.NDArray[Any]:
    content = io.BytesIO()
    with archive.open(f"{key}.npy") as packed:
        # In chunks: a single read would unpack everything, whatever the directory states, and cut it afterwards.
        while chunk := packed.read(_CHUNK):
            content.write(chunk)
    content.seek(0)
    try:
        values: npt.NDArray[Any] = np.lib.format.read_array(content, allow_pickle=False)
    except ValueError as cause:
        if "Object arrays" in str(cause) or "pickle" in str(cause):
            message = f"{path}: {key} has Python objects, which are never loaded; save a numeric array"
            raise DataError(message) from cause
        raise DataError(f"{path}: {key} is not a readable array ({str(cause).splitlines()[0]})") from cause
    if content.read(1):
        raise DataError(f"{path}: {key} has more data than its header states; the file is corrupt")
    return values


# IDX files, the format of MNIST and its relatives: two zero bytes, one byte for the element type (8: unsigned bytes,
# which these have), one for the number of dimensions, each dimension as a big-endian 32-bit integer, then the
# elements in row-major order (LeCun, Cortes, Burges, "The MNIST database of handwritten digits"). A reader that trusts
# any of these fields can silently return a wrong array, so each is checked, and the data must have the length that the
# dimensions imply.
def read_idx(path: str | os.PathLike[str], ndim: int) -> npt.NDArray[np.uint8]:
    """Read one IDX file of bytes; gzip is recognized by its first two bytes, not by its name.

    DataError if it is missing, unreadable, truncated, too long, corrupt, has another number of dimensions, or unpacks
    to more than `MOST_BYTES`. Guarantee: damage to a gzip-compressed file gives DataError or the true array (gzip
    has a checksum). No reader can see damage to the elements of a plain IDX file; damage to its header or length is
    found.
    """
    path = Path(path)
    with reading(path, _DAMAGED), path.open("rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=file) as content:
                return _parse(content, path, ndim, MOST_BYTES)
        return _parse(file, path, ndim)


def _parse(file: io.BufferedIOBase, path: Path, ndim: int, most: float = math.inf) -> npt.NDArray[np.uint8]:
    magic = _take(file, 4, path)
    if magic[:3] != b"\0\0\x08":
        raise DataError(f"{path}: does not start like an IDX file of bytes (first bytes {magic.hex(' ')})")
    if magic[3] != ndim:
        raise DataError(f"{path}: has {magic[3]} dimensions, expected {ndim}; is it the right file?")
    shape = tuple(int(size) for size in np.frombuffer(_take(file, 4 * ndim, path), ">u4"))
    size = math.prod(shape)
    if size > most:
        raise DataError(f"{path}: unpacks to {size:,} bytes; must be at most {most:,}, or be unpacked before (gunzip)")
    content = _take(file, size, path)
    # Reading past the end also makes gzip verify its checksum.
    if file.read(1):
        raise DataError(f"{path}: has more data than its header states ({shape}); it is corrupt")
    return np.frombuffer(content, np.uint8).reshape(shape)


def _take(file: io.BufferedIOBase, size: int, path: Path) -> bytearray:
    """Read exactly `size` bytes, in chunks: a corrupt header must not reserve memory that the file cannot fill."""
    content = bytearray()
    while len(content) < size:
        chunk = file.read(min(_CHUNK, size - len(content)))
        if not chunk:
            raise DataError(f"{path}: ends {size - len(content):,} bytes before its header says; the file is truncated")
        content += chunk
    return content


def find_idx(folder: str | os.PathLike[str], name: str) -> Path:
    """Return the file for `name`, plain before ``.gz``. Some mirrors spell it ``train-images.idx3-ubyte``."""
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"data_dir={str(folder)!r}: is not a folder")
    stem, dot_spelling = name, ".idx".join(name.rsplit("-idx", 1))
    for candidate in (stem, dot_spelling, f"{stem}.gz", f"{dot_spelling}.gz"):
        path = folder / candidate
        if path.is_file():
            return path
    raise DataError(f"data_dir={str(folder)!r}: has no {name}[.gz]; it has {listed(folder)}")


# Collections in the IDX format of MNIST: public facts (classes, image size) that the files must agree with.
IDX_SETS = {"mnist": (10, (28, 28)), "fashion-mnist": (10, (28, 28)), "kmnist": (10, (28, 28))}
# Sizes of MNIST's four files, and the SHA-256 of each, unpacked.
MNIST_SIZES = (60_000, 60_000, 10_000, 10_000)
MNIST_DIGESTS = (
    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
)
IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

KEYS = ("x_train", "y_train", "x_test", "y_test")

NAMES = ("digits", *IDX_SETS, "cifar-10", "cifar-100", "image-folder", "idx", "npz", *text.TASKS)

MAX_LENGTH = 128
"""Tokens of a text, if not given."""

Inputs = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled examples, split into a private training set and a held-out test set.

    Inputs are float32: images (n, channels, height, width), anything else (n, features...); targets are int64, (n,).
    Images of files are read one by one, and not looked at here.
    The sizes of both sets, the shape of an example and the number of classes are treated as public. The test set is
    declared not to be in the training set, so that accuracy on it costs no privacy. DataError if shapes, lengths or
    class numbers do not fit together.
    """

    name: str
    train_inputs: Inputs | Images
    train_targets: Targets
    test_inputs: Inputs | Images
    test_targets: Targets
    classes: int

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            inputs: Inputs | Images = getattr(self, f"{part}_inputs")
            targets: npt.NDArray[Any] = getattr(self, f"{part}_targets")
            where = f"{self.name}: the {part} set"
            if 0 in inputs.shape:
                raise DataError(f"{where} is empty (inputs of shape {inputs.shape}); it needs at least one example")
            if inputs.dtype != np.float32 or targets.dtype != np.int64:
                raise DataError(f"{where} must have float32 inputs, int64 targets; not {inputs.dtype}, {targets.dtype}")
            if inputs.ndim < 2 or targets.ndim != 1:
                raise DataError(
                    f"{where} must have inputs of shape (examples, ...) and targets of shape (examples,), "
                    f"not {inputs.shape} and {targets.shape}"
                )
            if len(inputs) != len(targets):
                raise DataError(f"{where} has {len(inputs):,} inputs but {len(targets):,} targets; they must pair up")
            if isinstance(inputs, np.ndarray) and not np.isfinite(inputs).all():
                row = int(np.argmin(np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1)))
                raise DataError(
                    f"{where} has values that are not finite (NaN, or too large for float32), the first in row {row}; "
                    "leave such examples out, or put numbers in their place"
                )
            if targets.min() < 0:
                raise DataError(f"{where} has a target below 0; number the classes 0, 1, 2, ... (0 and 1 for -1 and 1)")
            if targets.max() >= self.classes:
                raise DataError(f"{where} has a target outside 0..{self.classes - 1}, with {self.classes} classes")
            # Runs may share one loaded data set, so it is read-only.
            if isinstance(inputs, np.ndarray):
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

    def at(self, size: int | None) -> "Dataset":
        """Return it with images of files read at another size; arrays, and a size of None, change nothing."""
        if size is None or not isinstance(self.train_inputs, Images) or not isinstance(self.test_inputs, Images):
            return self
        train, test = replace(self.train_inputs, size=size), replace(self.test_inputs, size=size)
        return replace(self, train_inputs=train, test_inputs=test)

    def tested_on(self, half: int) -> "Dataset":
        """Return it with one half of the test set, 0 or 1: every second example, so that an order by class is kept."""
        if len(self.test_inputs) < 2:
            raise DataError(f"{self.name}: the test set has one example; choosing settings takes half of at least two")
        return replace(self, test_inputs=self.test_inputs[half::2], test_targets=self.test_targets[half::2])


@dataclass(frozen=True, eq=False)
class TextDataset(Dataset):
    """Texts as token ids, int32, (n, positions), or (n, 2, positions) with the kinds of tokens after the ids.

    Targets are classes, (n,), or for the tasks `text.NEXT` and `text.MASKED` ids, (n, positions), with `tokens.IGNORED`
    where nothing is predicted; `classes` counts what a target may be. Texts end with ids `pad`; all ids of their
    tokenizer are below `tokens`.
    """

    task: str
    pad: int
    tokens: int

    def __post_init__(self) -> None:  # the tokenizer made them: nothing to examine
        for values in (self.train_inputs, self.train_targets, self.test_inputs, self.test_targets):
            np.asarray(values).flags.writeable = False


def scaled(values: npt.NDArray[Any], where: str) -> Inputs:
    """Convert to float32 by a constant that depends only on the dtype, never on the values.

    Unsigned integers are divided by the largest value of their dtype (255 for uint8) and booleans become 0 and 1.
    Floating-point values are unchanged: a scale estimated from the training set would be a release without accounting.
    Non-finite values stay, too, and `Dataset` refuses them.
    """
    if values.dtype == np.bool_:
        return values.astype(np.float32)
    if values.dtype.kind == "u":
        return np.asarray(np.divide(values, np.float32(np.iinfo(values.dtype).max), dtype=np.float32))
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
        raise DataError(f"{where}: a target exceeds 64-bit signed integers; number the classes from 0")
    return values.astype(np.int64)


def load(
    name: str = "digits",
    data_dir: str | os.PathLike[str] | None = None,
    model_dir: str | None = None,
    max_length: int | None = None,
) -> Dataset:
    """Load a data set by name.

    ``digits`` is built in. All others are read from `data_dir`: ``mnist``, ``fashion-mnist`` or ``kmnist`` (their four
    IDX files, plain or .gz); ``idx`` (any four IDX files with MNIST's names); ``cifar-10`` or ``cifar-100`` (their
    binary files); ``image-folder`` (train/CLASS and val/CLASS with images, which are read when they are drawn); ``npz``
    (the one .npz file there, or `data_dir` is that file); or any NAME for which
    ``data_dir/NAME.npz`` exists, which comes before binary files. Unsigned integers come scaled to
    [0, 1] by the largest value of their dtype (digits: by 16, their format's maximum); floating-point inputs are
    unchanged. Those of `text.TASKS` are texts, of `max_length` tokens at most (`MAX_LENGTH`) by the tokenizer
    in `model_dir`. ArgumentError for an unknown name, DataError if files are missing, damaged, or do not fit together.
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
        elsewhere = f", or NAME if {folder}/NAME.npz exists" if folder is not None else ""
        raise ArgumentError(f"data={name!r}: {hint}known data are {', '.join(NAMES)}{elsewhere}")
    if folder is None:
        raise ArgumentError(f"data_dir=None: {name} is read from files; name their folder")
    if not folder.exists():
        raise DataError(f"data_dir={str(folder)!r}: no such folder")
    if name == "image-folder":
        (train_images, train_classes), (val_images, val_classes), classes = image_folder.read(folder)
        return Dataset(name, train_images, train_classes, val_images, val_classes, classes)
    if name in IDX_SETS:
        return _idx(name, folder, *IDX_SETS[name])
    if name in text.TASKS:
        return _texts(name, folder, model_dir, MAX_LENGTH if max_length is None else max_length)
    if name == "idx":
        return _idx(name, folder, None, None)
    if own is not None and own.is_file():
        return _npz(own)
    if name in cifar.FILES:
        train, test = cifar.read(name, folder)
        inputs = [scaled(images, f"data_dir={str(folder)!r}") for images in (train[0], test[0])]
        return Dataset(name, inputs[0], train[1], inputs[1], test[1], cifar.CLASSES[name])
    files = [folder] if folder.is_file() else sorted(folder.glob("*.npz"))
    if len(files) != 1:
        there = ", ".join(path.name for path in files) or "none"
        raise DataError(f"data_dir={str(folder)!r}: must have one .npz file (found {there}), or name the file itself")
    return _npz(files[0])


def _digits() -> Dataset:
    with resources.as_file(resources.files("dpcore.cli.datasets") / "digits.npz") as path:
        arrays = read_arrays(path, KEYS)
    # Pixels count the set points of a 4 x 4 block: 16 is the format's maximum, whatever the data.
    train, test = (np.divide(arrays[key], np.float32(16), dtype=np.float32)[:, None] for key in ("x_train", "x_test"))
    train_targets, test_targets = (class_numbers(arrays[key], "digits") for key in ("y_train", "y_test"))
    return Dataset("digits", train, train_targets, test, test_targets, classes=10)


def _idx(name: str, folder: Path, classes: int | None, shape: tuple[int, int] | None) -> Dataset:
    files, parts, contents = [find_idx(folder, role) for role in IDX_FILES], list[Any](), list[npt.NDArray[np.uint8]]()
    for path, labels in (files[:2], files[2:]):
        pixels = read_idx(path, ndim=3)
        if shape is not None and pixels.shape[1:] != shape:
            raise DataError(f"{path}: has images of {pixels.shape[1:]} pixels, but {name} has {shape}; wrong folder?")
        numbers = read_idx(labels, ndim=1)
        contents += [pixels, numbers]
        parts += [scaled(pixels, str(path))[:, None], class_numbers(numbers, str(labels))]
    _check_mnist(name, files, contents)
    train_inputs, train_targets, test_inputs, test_targets = parts
    classes = classes or _public_classes(test_targets)
    return Dataset(name, train_inputs, train_targets, test_inputs, test_targets, classes)


def _check_mnist(name: str, files: list[Path], contents: list[npt.NDArray[np.uint8]]) -> None:
    """Refuse MNIST's files under another collection's name, and files of MNIST's sizes that are not MNIST's.

    These collections are public, and told apart by nothing else: their files have the same names, sizes and forms.
    """
    if name not in IDX_SETS or tuple(map(len, contents)) != MNIST_SIZES:
        return
    for path, content, digest in zip(files, contents, MNIST_DIGESTS, strict=True):
        header = bytes([0, 0, 8, content.ndim]) + np.array(content.shape, ">u4").tobytes()
        found = sha256(header + content.tobytes()).hexdigest()
        if found == digest and name != "mnist":
            raise DataError(f"{path}: is MNIST's, not {name}'s; wrong folder?")
        if found != digest and name == "mnist":
            raise DataError(
                f"{path}: is not MNIST's (SHA-256 {found[:16]}... unpacked, must be {digest[:16]}...); data 'idx' "
                "reads any images in this format"
            )


def _texts(name: str, folder: Path, model_dir: str | None, length: int) -> TextDataset:
    if model_dir is None:
        raise ArgumentError(f"model_dir=None: {name} is read by a model's tokenizer; name the folder of both")
    task, tokenizer = text.TASKS[name], tokens.tokenizer_of(model_dir)
    parts = [tokens.encode(tokenizer, part, task, length) for part in text.read(name, folder)]
    classes = len(text.GLUE[name].labels) if task == text.CLASSES else len(tokenizer)
    known = tokens.pad_of(tokenizer), tokens.most_tokens(tokenizer)
    return TextDataset(name, *parts[0], *parts[1], classes, task, *known)  # type: ignore[arg-type]


def _npz(path: Path) -> Dataset:
    arrays = read_arrays(path, KEYS, optional=("classes",))
    parts = {}
    for part in ("train", "test"):
        values = arrays[f"x_{part}"]
        if values.ndim == 3:  # images with one channel
            values = values[:, None]
        elif values.ndim == 4 and values.shape[3] in (1, 3) and values.shape[1] not in (1, 3):  # channels come first
            values = np.ascontiguousarray(np.moveaxis(values, 3, 1))
        inputs = scaled(values, f"{path}: x_{part}")
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
