"""Pictures: written whole, from released numbers, without a display and without pyplot's global state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fresh import after

pytest.importorskip("matplotlib")
from dpcore.cli.plots import Curves, _end, _way


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return np.asarray(imread(path))


def test_nothing_is_imported_before_a_picture_and_pyplot_never(tmp_path):
    code = (
        "import sys; from dpcore.cli import plots; assert 'matplotlib' not in sys.modules;"
        f"plots.by_epsilon({str(tmp_path / 'a.png')!r}, {{'p': {{'a': plots.Curves([1], [[0.5]])}}}});"
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
