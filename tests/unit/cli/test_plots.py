"""Pictures: written whole, from released numbers, without a display and without pyplot's global state."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpcore.errors import ArgumentError

pytest.importorskip("matplotlib")
from dpcore.cli.plots import plots
from dpcore.cli.plots.comparison_plots import Curves, _end, _way, by_epsilon
from tests.unit.cli.refused import refused


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(imread(path))


def test_the_learning_curve_shows_its_numbers(tmp_path):
    epochs = [1, 2, 3]
    one = plots.learning_curve(tmp_path / "one.png", epochs, [0.1, 0.5, 0.9], [1, 2, 3], title="a", target_epsilon=3)
    same = plots.learning_curve(tmp_path / "same.png", epochs, [0.1, 0.5, 0.9], [1, 2, 3], title="a", target_epsilon=3)
    other = plots.learning_curve(
        tmp_path / "other.png", epochs, [0.1, 0.6, 0.9], [1, 2, 3], title="a", target_epsilon=3
    )
    spent = plots.learning_curve(
        tmp_path / "spent.png", epochs, [0.1, 0.5, 0.9], [1, 2, 2.5], title="a", target_epsilon=3
    )
    assert np.array_equal(pixels(one), pixels(same))
    assert not np.array_equal(pixels(one), pixels(other))
    assert not np.array_equal(pixels(one), pixels(spent))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "other.png", "same.png", "spent.png"]


def test_one_epoch_and_infinite_epsilon_are_drawn(tmp_path):
    assert (
        plots.learning_curve(tmp_path / "a.png", [1], [0.5], [math.inf], target_epsilon=math.inf).stat().st_size > 1000
    )
    one = {"a": {"one": Curves((1.0,), [[0.5]], (math.inf,))}}
    assert by_epsilon(tmp_path / "b.png", one).stat().st_size > 1000


def test_epsilon_is_shown_where_it_is_the_same_for_all(tmp_path):
    def draw(name: str, *epsilon: tuple[float, ...]) -> np.ndarray:
        curves = {str(index): Curves((1.0, 2.0), [[0.3, 0.9]], item) for index, item in enumerate(epsilon)}
        return pixels(by_epsilon(tmp_path / name, {"a": curves}))

    shown = draw("shown.png", (1.0, 2.0), (1.0, 2.0))
    assert not np.array_equal(shown, draw("other.png", (1.0, 3.0), (1.0, 3.0)))
    without = draw("without.png", (), ())
    assert np.array_equal(without, draw("differ.png", (1.0, 2.0), (1.0, 3.0)))


def test_the_comparison_shows_every_seed(tmp_path):
    def draw(name: str, first: list[list[float]]) -> np.ndarray:
        curves = {"DP-SGD": Curves((1.0, 2.0), first), "DiSK": Curves((1.0, 2.0), [[0.3, 0.9]] * 3)}
        return pixels(by_epsilon(tmp_path / name, {"a": curves}, title="t"))

    one = draw("one.png", [[0.2, 0.8], [0.3, 0.9], [0.3, 0.85]])
    assert np.array_equal(one, draw("same.png", [[0.2, 0.8], [0.3, 0.9], [0.3, 0.85]]))
    assert not np.array_equal(one, draw("other.png", [[0.2, 0.81], [0.3, 0.89], [0.3, 0.85]]))


def test_shapes_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="epochs, accuracy, epsilon: have shapes"):
        plots.learning_curve(tmp_path / "a.png", [1, 2], [0.1], [1, 2])
    refused(ArgumentError, "at least one", plots.learning_curve, tmp_path / "a.png", [], [], [])
    with pytest.raises(ArgumentError, match=r"panels: 'x' has shape \(1, 3\)"):
        by_epsilon(tmp_path / "a.png", {"a": {"x": Curves((1.0, 2.0), [[1, 2, 3]])}})
    refused(ArgumentError, "panels: hold no contestant", by_epsilon, tmp_path / "a.png", {})
    assert not list(tmp_path.iterdir())


def test_nothing_is_imported_before_a_picture_and_pyplot_never(tmp_path):
    code = (
        "import sys; from dpcore.cli.plots import plots; assert 'matplotlib' not in sys.modules;"
        f"plots.learning_curve({str(tmp_path / 'a.png')!r}, [1], [0.5], [1.0]);"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path), "PATH": ""})


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
