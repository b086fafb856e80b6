"""What the studies share: random numbers, the machine's description, and where results and pictures go."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import scipy

import dpcore

# Okabe and Ito's palette, as in dpcore.cli.plots.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE: dict[str, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "legend.frameon": False,
    "figure.dpi": 150,
}


def generator(*seed: int) -> np.random.Generator:  # noqa: TID251
    """Reproducible data and noise. Nothing here is private: a mechanism's noise comes from dpcore's own stream."""
    return np.random.default_rng(seed)  # noqa: TID251


def machine() -> dict[str, Any]:
    with open("/proc/cpuinfo") if os.path.exists("/proc/cpuinfo") else open(os.devnull) as lines:
        models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "dpcore": dpcore.__version__,
        "backend": dpcore.get_backend(),
    }


def out_folder(description: str) -> Path:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for the JSON file and the picture")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save(path: Path, result: dict[str, Any], began: float) -> None:
    """Write the results with the machine and the seconds since `began` (a time.perf_counter)."""
    whole = {"machine": machine(), "seconds": round(time.perf_counter() - began, 1), **result}
    text = json.dumps(whole, indent=1)
    path.write_text(
        re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), text) + "\n"
    )  # rows of numbers on one line
    print(f"{path}, {whole['seconds']} s")


@contextmanager
def picture(path: Path, columns: int) -> Iterator[Any]:
    """Axes side by side; the file is written at the end."""
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, columns, figsize=(4.6 * columns, 3.6), layout="constrained")
        yield axes
        figure.savefig(path)
        plt.close(figure)


def rounded(values: Any, digits: int = 6) -> Any:
    """Nested lists with `digits` significant digits, for JSON."""
    if np.ndim(values):
        return [rounded(value, digits) for value in values]
    return float(f"{float(values):.{digits}g}")
