"""Pictures: written whole, from released numbers, without a display and without pyplot's global state."""

import math
from pathlib import Path

import numpy as np
import pytest

from dpcore.errors import ArgumentError
from tests.fresh import after

pytest.importorskip("matplotlib")
from dpcore.cli import plots
from tests.refused import refused


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(imread(path))


def test_the_learning_curve_shows_its_numbers(tmp_path):
    def draw(name: str, accuracy: tuple = (0.1, 0.5, 0.9), spent: tuple = (1, 2, 3)) -> np.ndarray:
        return pixels(plots.learning_curve(tmp_path / name, [1, 2, 3], accuracy, spent, title="a", target_epsilon=3))

    one = draw("one.png")
    assert np.array_equal(one, draw("same.png"))
    assert not np.array_equal(one, draw("other.png", accuracy=(0.1, 0.6, 0.9)))
    assert not np.array_equal(one, draw("spent.png", spent=(1, 2, 2.5)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "other.png", "same.png", "spent.png"]


def test_nothing_to_draw_is_one_sentence(tmp_path):
    for upper, powers in (([0, 0], True), ([math.inf, math.inf], False)):
        names = ("epsilon", "delta")
        refused(ArgumentError, "nothing to draw", plots.bound_curve, tmp_path / "a.png", [1, 2], [0, 0], upper, names,
            powers=powers)  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_nothing_is_imported_before_a_picture_and_pyplot_never(tmp_path):
    code = (
        "import sys; from dpcore.cli import plots; assert 'matplotlib' not in sys.modules;"
        f"plots.learning_curve({str(tmp_path / 'a.png')!r}, [1], [0.5], [1.0]);"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    after(code)
