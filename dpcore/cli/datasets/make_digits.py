"""Make digits.npz from scikit-learn's copy. Run once by hand: ``python -m dpcore.cli.datasets.make_digits``."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def main() -> None:
    """Write digits.npz beside this file: every fifth example of each class, counted from the third, is held out."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    source = load_digits()
    images, targets = source.images.astype(np.uint8), source.target.astype(np.uint8)
    assert np.array_equal(images, source.images)
    held_out = np.zeros(len(targets), bool)
    for label in range(10):
        held_out[np.flatnonzero(targets == label)[2::5]] = True
    np.savez_compressed(
        Path(__file__).with_name("digits.npz"),
        x_train=images[~held_out],
        y_train=targets[~held_out],
        x_test=images[held_out],
        y_test=targets[held_out],
    )


if __name__ == "__main__":
    main()
