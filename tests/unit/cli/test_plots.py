"""Pictures: written whole, from released numbers, without a display and without pyplot's global state."""

from pathlib import Path

import numpy as np
import pytest

from tests.fresh import after

pytest.importorskip("matplotlib")


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
