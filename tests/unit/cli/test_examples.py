"""Augmented images of the command: a copy is a part of the mirrored image, by three draws and nothing else."""

import numpy as np
import pytest
import torch

pytest.importorskip("typer")
from dpcore.cli.datasets import Dataset
from dpcore.cli.train.examples import PAD, Augmented
from dpcore.cli.train.settings import Settings
from dpcore.cli.train.training import Training
from dpcore.errors import ArgumentError

IMAGES = np.arange(4 * 2 * 9 * 10, dtype=np.float32).reshape(4, 2, 9, 10) / 720
TARGETS = np.arange(4)


def test_copies_are_all_parts_of_the_mirrored_image_equally_often() -> None:
    mirrored = np.pad(IMAGES[1], ((0, 0), (PAD, PAD), (PAD, PAD)), mode="symmetric")
    parts = [mirrored[:, i : i + 9, j : j + 10] for i in range(2 * PAD + 1) for j in range(2 * PAD + 1)]
    number = {part.tobytes(): at for at, part in enumerate([*parts, *(part[:, :, ::-1] for part in parts)])}
    data = Augmented(IMAGES, TARGETS)
    torch.manual_seed(0)
    counts = np.zeros(2 * (2 * PAD + 1) ** 2)
    for _ in range(20 * len(counts)):
        copy, target = data[1]
        assert target == 1
        counts[number[copy.numpy().tobytes()]] += 1
    assert counts.min() > 0
    # Chi-square of 161 degrees of freedom: mean 161, standard deviation 18.
    assert ((counts - 20) ** 2 / 20).sum() < 161 + 5 * 18


def test_a_reading_draws_as_much_whatever_the_image() -> None:
    data = Augmented(IMAGES, TARGETS)
    torch.manual_seed(1)
    copies = [data[0][0] for _ in range(3)]
    after = torch.rand(1)
    torch.manual_seed(1)
    again = [data[index][0] for index in (3, 0, 2)]
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(again[1], copies[1])  # the second draw, after whichever image


def test_a_run_reads_each_drawn_image_so_often() -> None:
    dataset = Dataset("small", IMAGES, TARGETS, IMAGES, TARGETS, classes=4)
    settings = Settings(method="dp_sgd", epsilon=3.0, delta=1e-3, batch_size=4, epochs=2, sampling="fixed-size",
        augmentations=3)  # fmt: skip
    run = Training(settings.resolved(4), dataset)
    inputs, targets = next(iter(run.private.loader))
    assert sorted(targets.tolist()) == sorted([0, 1, 2, 3] * 3)
    assert len({row.numpy().tobytes() for row in inputs}) > 4
    assert run.statement(2).best_epsilon <= 3


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"augmentations: .* has the shape \(3,\)"):
        Augmented(np.zeros((4, 3), np.float32), TARGETS)
