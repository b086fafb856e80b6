"""The style of all pictures: saving, axes, lines and their words.

matplotlib is imported when a picture is drawn, and writes to a file without a display. Every function that draws a
picture puts it in `path` in one move (the path's ending decides the format), writes `title` as its first line, and
returns the path. It raises ArgumentError where numbers do not fit, and DpcoreError where matplotlib is not installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import ArgumentError, DpcoreError
from dpcore.spec.extras import needs
from dpcore.spec.whole_file import whole_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = npt.NDArray[np.float64]
PathLike = str | os.PathLike[str]

# Okabe and Ito's palette: distinct to color-blind readers and in gray.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GRAY = "#6b6b6b"
DOTTED: Any = {"color": GRAY, "linewidth": 0.8, "linestyle": ":"}
_STYLE: Any = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": GRAY,
    "axes.labelcolor": "#222222", "axes.titlesize": 11, "axes.titlelocation": "left", "axes.grid": True,
    "axes.axisbelow": True, "grid.color": "#e6e6e6", "grid.linewidth": 0.8, "xtick.color": GRAY, "ytick.color": GRAY,
    "legend.frameon": False, "figure.dpi": 150}  # fmt: skip


@contextmanager
def drawing(path: PathLike, size: tuple[float, float], title: str = "") -> Iterator[Figure]:
    """Draw on a new figure and put it in place in one move, so that no half picture is ever seen."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise DpcoreError(needs("a picture", "matplotlib")) from cause
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        if title:
            figure.suptitle(title, x=0.012, ha="left", fontsize=11)
        target = Path(path)
        with whole_file(target) as file:
            figure.savefig(file, format=target.suffix.lower().lstrip("."))


def rows(names: str, *values: npt.ArrayLike) -> tuple[Array, ...]:
    """Return the values as arrays of one shape (m,), m at least 1; `names` are for the message."""
    arrays = tuple(np.asarray(value, np.float64) for value in values)
    if len({array.shape for array in arrays}) > 1 or arrays[0].ndim != 1 or not arrays[0].size:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise ArgumentError(f"{names}: have shapes {shapes}; must be (m,), the same m, at least one")
    return arrays


def label(axes: Axes, x: str, y: str, title: str = "", /, **style: Any) -> None:
    """Write a title and the names of both axes."""
    axes.set_title(title, **{"fontsize": 10, **style})
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def note(
    axes: Axes, text: str, *, x: float | None = None, y: float | None = None, left: bool = False, right: bool = False
) -> None:
    """Write a small text left (right) of a vertical line at `x`, or over the right (left) end of a level one at `y`."""
    if y is None:
        at, offset, frame = (x, 0.04), (4 if right else -4, 0), ("data", "axes fraction")
        left = right
    else:
        at, offset, frame = (0.01 if left else 0.99, y), (0, 3), ("axes fraction", "data")
    style: Any = {"ha": "left" if left else "right", "color": GRAY, "fontsize": 8}
    axes.annotate(text, at, xycoords=frame, xytext=offset, textcoords="offset points", **style)


def whole_epochs(axes: Axes) -> None:
    """Put ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def frequency_axes(axes: Axes, x: Array) -> None:
    """Use powers of ten in both directions, frequencies from end to end, and ticks written plainly.

    That is 0.01 for 10 to the power of -2, and of the ticks between only 2 and 5, where there is room for them.
    """
    from matplotlib.ticker import FuncFormatter

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x.min(), x.max())
    room = x.max() / x.min() < 100
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(
        FuncFormatter(lambda value, _: f"{value:g}" if room and f"{value:.0e}"[0] in "25" else "")
    )
