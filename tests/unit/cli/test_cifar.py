"""CIFAR's binary files: records as published, and what is none."""

from pathlib import Path

import numpy as np
import pytest

from dpcore.cli.datasets import cifar, load
from dpcore.errors import DataError


def record(labels: tuple[int, ...], red: int, blue: int) -> bytes:
    """An image whose first point has this red and whose last point has this blue."""
    return bytes(labels) + bytes([red]) + bytes(3070) + bytes([blue])


def write(folder: Path, name: str = "cifar-100", **own: bytes) -> Path:
    for number, file in enumerate(cifar.FILES[name]):
        labels = (number,) if name == "cifar-10" else (3, 90 + number)
        (folder / file).write_bytes(own.get(file.removesuffix(".bin"), record(labels, 51 * number, 255) * 2))
    return folder


@pytest.mark.parametrize("inner", [False, True])
def test_records_are_planes_after_the_class(tmp_path: Path, inner: bool) -> None:
    folder = tmp_path / cifar.FOLDERS["cifar-10"] if inner else tmp_path
    folder.mkdir(exist_ok=True)
    write(folder, "cifar-10")
    found = load("cifar-10", tmp_path)
    assert found.train_inputs.shape == (10, 3, 32, 32)
    assert found.train_targets.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    np.testing.assert_allclose(found.train_inputs[2:4, 0, 0, 0], 0.2, rtol=1e-6)
    assert found.train_inputs[0, 2, 31, 31] == 1
    assert found.test_targets.tolist() == [5, 5]
    assert found.classes == 10


def test_the_second_byte_is_the_class_of_cifar_100(tmp_path: Path) -> None:
    found = load("cifar-100", write(tmp_path))
    assert (found.train_targets[0], found.test_targets[0], found.classes) == (90, 91, 100)


@pytest.mark.parametrize(("own", "sentence"), [
    ({"test": record((3, 4), 0, 0)[:-1]}, "test.bin: has 3,073 bytes, no whole number of cifar-100's records of 3,074"),
    ({"test": b""}, "test.bin: has 0 bytes"),
    ({"train": record((3, 4), 0, 0) + record((0, 100), 0, 0)}, "train.bin: record 1 has class 100"),
    ({"test": bytes(3_074 * 10_000)}, f"the published file {cifar.FILES['cifar-100']['test.bin']}"),
])  # fmt: skip
def test_a_file_that_is_another_is_one_sentence(own: dict[str, bytes], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=sentence):
        load("cifar-100", write(tmp_path, **own))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "test.bin").unlink()
    with pytest.raises(DataError, match=r"has no test.bin; it has train.bin, and cifar-100 needs train.bin, test.bin"):
        load("cifar-100", tmp_path)
