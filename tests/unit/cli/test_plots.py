"""Pictures: written whole, from released numbers, without a display and without pyplot's global state."""

import math
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dpcore.errors import ArgumentError
from tests.fresh import after

pytest.importorskip("matplotlib")
from dpcore.cli import plots
from dpcore.cli.plots import Curves, _end, _way
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


def test_a_single_evaluation_has_a_place_and_a_point(monkeypatch, tmp_path):
    drawn: list = []
    save = plots.drawing

    @contextmanager
    def kept(*given, **named):
        with save(*given, **named) as made:
            yield made
            drawn.append(made)

    monkeypatch.setattr(plots, "drawing", kept)
    for last in (1.0, 2.13, 0.04):
        plots.learning_curve(tmp_path / "a.png", [last], [0.7], [2.9])
        first, second = drawn[-1].axes
        low, high = first.get_xlim()
        assert low == 0
        assert high == pytest.approx(1.03 * last)
        ticks = [tick for tick in first.get_xticks() if low <= tick <= high]
        assert ticks == [round(tick) for tick in ticks] or high < 1.03
        assert second.get_lines()[0].get_marker() == "s"  # a single point has no line to be seen by


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


def test_intervals_stay_within_the_range_of_an_accuracy():
    from matplotlib.figure import Figure

    way, end = Figure().subplots(2)
    curves = Curves([1], [[0.61], [0.82]])
    _way(way, 0, "a", curves, 0.1)
    _end(end, 0, curves)
    bars = end.collections[0].get_segments()[0][:, 0]
    assert bars.min() == pytest.approx(0)
    assert bars.max() == pytest.approx(100)
    assert list(way.get_xticks()) == [1]
