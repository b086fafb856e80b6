"""CIFAR-10 and CIFAR-100 from their binary files, as https://www.cs.toronto.edu/~kriz/cifar.html describes them.

A record is one byte for the class (CIFAR-100: one for the superclass, then one for the class), then 3,072 bytes: the
red, green and blue planes of 32x32 points, row by row. The files have no header and no checksum, so the published
ones are known by their SHA-256.
"""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.cli.datasets.files import listed
from dpcore.errors import DataError

SHAPE = (3, 32, 32)
CLASSES = {"cifar-10": 10, "cifar-100": 100}
# The folders that the published archives unpack to.
FOLDERS = {"cifar-10": "cifar-10-batches-bin", "cifar-100": "cifar-100-binary"}
# SHA-256 of each file of the published archives, the last one for testing.
FILES = {
    "cifar-10": {
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    "cifar-100": {
        "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    },
}

Part = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def read(name: str, folder: Path) -> tuple[Part, Part]:
    """Return the images, (n, 3, 32, 32), and classes of both parts.

    DataError if a file is missing, has no whole records, has a class that is not there, or has the published length
    and another digest: one of that length is the published file, damaged or exchanged. Files of other lengths are
    somebody's own data in this format.
    """
    inner = folder / FOLDERS[name]
    place = inner if inner.is_dir() else folder
    parts = [_records(name, place / file, digest) for file, digest in FILES[name].items()]
    images, classes = zip(*parts[:-1], strict=True)
    return (np.concatenate(images), np.concatenate(classes)), parts[-1]


def _records(name: str, path: Path, digest: str) -> Part:
    labels = 1 if name == "cifar-10" else 2
    size = labels + int(np.prod(SHAPE))
    published = size * (50_000 if path.name == "train.bin" else 10_000)
    try:
        content = path.read_bytes()
    except FileNotFoundError as cause:
        raise DataError(
            f"data_dir={str(path.parent)!r}: has no {path.name}; it has {listed(path.parent)}, and {name} needs "
            f"{', '.join(FILES[name])}, or {name}.npz"
        ) from cause
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    if not content or len(content) % size:
        raise DataError(f"{path}: has {len(content):,} bytes, no whole number of {name}'s records of {size:,}")
    found = sha256(content).hexdigest()
    if len(content) == published and found != digest:
        raise DataError(f"{path}: has SHA-256 {found}, the published file {digest}; fetch {FOLDERS[name]} again")
    records: npt.NDArray[Any] = np.frombuffer(content, np.uint8).reshape(-1, size)
    classes = records[:, labels - 1].astype(np.int64)
    if classes.max() >= CLASSES[name]:
        row = int(np.argmax(classes >= CLASSES[name]))
        raise DataError(
            f"{path}: record {row} has class {classes[row]}; {name} has classes 0 to {CLASSES[name] - 1}, "
            "so that it is another file"
        )
    return records[:, labels:].reshape(-1, *SHAPE), classes
