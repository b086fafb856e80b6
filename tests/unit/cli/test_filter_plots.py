"""Pictures of filters and gradients: they show their numbers, and refuse numbers that do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpcore.errors import ArgumentError

pytest.importorskip("matplotlib")
from matplotlib.image import imread

from dpcore.cli.plots import figure, filter_plots

F = np.geomspace(0.01, 0.5, 20)
ONES = np.ones(4)


def same(one: Path, other: Path) -> bool:
    return np.array_equal(imread(one), imread(other))


def test_a_filters_picture_shows_every_argument(tmp_path):
    def draw(name: str, *arrays: np.ndarray, **more: float) -> Path:
        return filter_plots.filter_picture(tmp_path / name, *arrays, **more)  # type: ignore[arg-type]

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
        return filter_plots.gradient_picture(tmp_path / name, *arrays, **more)  # type: ignore[arg-type]

    one = draw("a.png", F, 1 / F, 0.1 / F, floor=1.0)
    assert same(one, draw("b.png", F, 1 / F, 0.1 / F, floor=1.0, negative_share=np.full(3, np.nan)))
    assert not same(one, draw("c.png", F, 1 / F, 0.2 / F, floor=1.0))
    assert not same(one, draw("d.png", F, 1.5 / F, 0.1 / F, floor=1.0))
    assert not same(one, draw("e.png", F, 1 / F, 0.1 / F))
    two = draw("f.png", F, 1 / F, 0.1 / F, negative_share=[0.1, 0.2])
    assert not same(two, draw("g.png", F, 1 / F, 0.1 / F, negative_share=[0.1, 0.3]))
    assert draw("h.png", F, 0 * F, 0 * F).stat().st_size > 1000


def test_shapes_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="the same m"):
        filter_plots.filter_picture(tmp_path / "a.png", ONES, ONES, ONES[1:], F, F)
    with pytest.raises(ArgumentError, match="frequencies above 0"):
        filter_plots.filter_picture(tmp_path / "a.png", ONES, ONES, ONES, F - 0.01, F)
    with pytest.raises(ArgumentError, match="frequencies, before, after: have shapes"):
        filter_plots.gradient_picture(tmp_path / "a.png", F, F, F[1:])
    assert not list(tmp_path.iterdir())


def test_ticks_between_the_powers_of_ten_do_not_crowd():
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    figure.frequency_axes(axes, np.array([0.03, 0.5]))
    written = [axes.xaxis.get_minor_formatter()(value) for value in (0.03, 0.05, 0.06, 0.2, 0.3, 0.5)]
    assert written == ["", "0.05", "", "0.2", "", "0.5"]
