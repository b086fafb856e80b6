"""Folders of images by class: what is read, when, and one sentence for a folder that is something else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("PIL.Image")
from PIL import Image

from dpcore.cli.datasets import load
from dpcore.cli.train.examples import examples_of
from dpcore.cli.train.settings import Settings
from dpcore.cli.train.training import Training
from dpcore.errors import DataError

CLASSES = ("n01", "n02", "n10")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four images a class to train on and two held out, each of its class's shade with a stripe at one side."""
    for part, count in (("train", 4), ("val", 2)):
        for shade, name in enumerate(CLASSES):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((20, 30, 3), 60 * shade + 10 * number, np.uint8)
                pixels[:, :5] = 255  # outside of the middle square
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    (tmp_path / "train" / ".hidden").touch()
    return tmp_path


def test_images_are_the_middle_squares_in_the_order_of_names(folder: Path) -> None:
    found = load("image-folder", folder).at(8)
    assert (found.shape, found.classes, len(found)) == ((3, 8, 8), 3, 12)
    assert found.train_targets.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for place in range(12):
        wanted = (60 * (place // 4) + 10 * (place % 4)) / 255
        np.testing.assert_allclose(found.train_inputs[place], np.full((3, 8, 8), wanted), atol=1e-6)
    half = found.tested_on(1)
    assert half.test_targets.tolist() == [0, 1, 2]
    np.testing.assert_allclose(half.test_inputs[2], found.test_inputs[5])
    assert load("image-folder", folder).shape == (3, 224, 224)


def test_a_file_is_read_when_it_is_drawn(folder: Path) -> None:
    found = load("image-folder", folder).at(8)
    data = examples_of(found.train_inputs, found.train_targets)
    Image.new("L", (9, 9), 100).save(folder / "train" / "n02" / "0.png")
    np.testing.assert_allclose(data[4][0], np.full((3, 8, 8), 100 / 255), atol=1e-6)
    copy = examples_of(found.train_inputs, found.train_targets, augmented=True)[11][0]
    np.testing.assert_allclose(copy, np.full((3, 8, 8), 150 / 255), atol=1e-6)


def test_a_class_without_private_images_is_a_class(folder: Path) -> None:
    shutil.rmtree(folder / "train" / "n01")
    for path in (folder / "train" / "n10").iterdir():
        path.unlink()
    found = load("image-folder", folder)
    assert (found.classes, found.train_targets.tolist()) == (3, [1] * 4)


@pytest.mark.parametrize("augmentations", [None, 2])
def test_a_run_reads_the_folder(folder: Path, augmentations: int | None) -> None:
    settings = Settings(data="image-folder", data_dir=str(folder), epsilon=3.0, delta=1e-3, batch_size=6, epochs=1,
        sampling="fixed-size", image_size=8, augmentations=augmentations)  # fmt: skip
    run = Training(settings.resolved(12), load("image-folder", folder))
    inputs, targets = next(iter(run.private.loader))
    assert inputs.shape == (6 * (augmentations or 1), 3, 8, 8)
    assert inputs.amax() <= 150 / 255 + 1e-6
    assert (inputs.amax((1, 2, 3)) * 255 / 60 + 1e-3).long().tolist() == targets.tolist()
    run.private.step((inputs, targets))
    other = load("image-folder", folder).test_inputs  # as 224 points, which is not the run's size
    with torch.no_grad():
        found = run.model(
            torch.tensor(np.stack([load("image-folder", folder).at(8).test_inputs[at] for at in range(6)]))
        )
    truth = np.repeat(np.arange(3), 2)
    assert run.accuracy(other, truth) == (found.argmax(1).numpy() == truth).mean()


def moved(folder: Path) -> None:
    shutil.move(folder / "val" / "n02" / "1.png", folder / "val" / "1.png")


def other(folder: Path) -> None:
    (folder / "train" / "n02" / "notes.txt").touch()


def emptied(folder: Path) -> None:
    for path in (folder / "val" / "n10").iterdir():
        path.unlink()


@pytest.mark.parametrize(("change", "sentence"), [
    (lambda folder: shutil.rmtree(folder / "val"), "has no folder val; must have train/CLASS and val/CLASS"),
    (lambda folder: shutil.rmtree(folder / "val" / "n10"), "has the class n10 in train and not in val"),
    (moved, r"val/1.png: is no folder of a class"),
    (other, r"notes.txt: is no image by its name"),
    (emptied, r"n10: is empty"),
])  # fmt: skip
def test_another_folder_is_one_sentence(folder: Path, change: Callable[[Path], None], sentence: str) -> None:
    change(folder)
    with pytest.raises(DataError, match=sentence):
        load("image-folder", folder)
