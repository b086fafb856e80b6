"""Pictures: written whole, from released numbers, without a display and without pyplot's global state."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dpcore.errors import ArgumentError

pytest.importorskip("matplotlib")
from dpcore.cli import plots
from dpcore.cli.plots import Curves, _end, _way, by_epsilon
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


def test_one_epoch_and_infinite_epsilon_are_drawn(tmp_path):
    one = plots.learning_curve(tmp_path / "a.png", [1], [0.5], [math.inf], target_epsilon=math.inf)
    two = by_epsilon(tmp_path / "b.png", {"a": {"one": Curves((1.0,), [[0.5]])}})
    assert min(path.stat().st_size for path in (one, two)) > 1000


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


def test_the_comparison_shows_every_seed(tmp_path):
    def draw(name: str, first: list[list[float]]) -> np.ndarray:
        curves = {"DP-SGD": Curves((1.0, 2.0), first), "DiSK": Curves((1.0, 2.0), [[0.3, 0.9]] * 3)}
        return pixels(by_epsilon(tmp_path / name, {"a": curves}, title="t"))

    one = draw("one.png", [[0.2, 0.8], [0.3, 0.9], [0.3, 0.85]])
    assert np.array_equal(one, draw("same.png", [[0.2, 0.8], [0.3, 0.9], [0.3, 0.85]]))
    assert not np.array_equal(one, draw("other.png", [[0.2, 0.81], [0.3, 0.89], [0.3, 0.85]]))


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


F = np.geomspace(0.01, 0.5, 20)
ONES = np.ones(4)


def same(one: Path, other: Path) -> bool:
    return np.array_equal(pixels(one), pixels(other))


def test_a_filters_picture_shows_every_argument(tmp_path):
    def draw(name: str, *arrays: np.ndarray, **more: float) -> Path:
        return plots.filter_picture(tmp_path / name, *arrays, **more)  # type: ignore[arg-type]

    arrays = [0.5 ** np.arange(4), 1 - 0.5 ** np.arange(1, 5), ONES / 2, F, 1 / (1 + 99 * F)]
    one = draw("a.png", *arrays)
    assert same(one, draw("b.png", *arrays))
    for changed in (0, 1, 2, 4):
        others = [1.2 * array if place == changed else array for place, array in enumerate(arrays)]
        others[3] = F
        assert not same(one, draw("c.png", *others))
    assert not same(one, draw("d.png", *arrays, cutoff=0.1))
    assert not same(one, draw("e.png", *arrays, limiting_noise_factor=0.3))
    # What an unstable filter has: nothing finite.
    assert draw("f.png", *[np.full(4, np.inf)] * 3, F, np.full(20, np.nan)).stat().st_size > 1000
    assert not list(tmp_path.glob(".*"))


def test_a_runs_picture_shows_every_argument(tmp_path):
    def draw(name: str, *arrays: np.ndarray, **more: object) -> Path:
        return plots.gradient_picture(tmp_path / name, *arrays, **more)  # type: ignore[arg-type]

    one = draw("a.png", F, 1 / F, 0.1 / F, floor=1.0)
    assert same(one, draw("b.png", F, 1 / F, 0.1 / F, floor=1.0, negative_share=np.full(3, np.nan)))
    assert not same(one, draw("c.png", F, 1 / F, 0.2 / F, floor=1.0))
    assert not same(one, draw("d.png", F, 1.5 / F, 0.1 / F, floor=1.0))
    assert not same(one, draw("e.png", F, 1 / F, 0.1 / F))
    two = draw("f.png", F, 1 / F, 0.1 / F, negative_share=[0.1, 0.2])
    assert not same(two, draw("g.png", F, 1 / F, 0.1 / F, negative_share=[0.1, 0.3]))
    assert draw("h.png", F, 0 * F, 0 * F).stat().st_size > 1000
