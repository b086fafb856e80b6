"""What each kind of strategy is made of, and which settings it has."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from dpcore.errors import ArgumentError
from dpcore.spec import validate
from dpcore.stages.strategies.banded import Banded
from dpcore.stages.strategies.blt import BLT
from dpcore.stages.strategies.dense import from_matrix
from dpcore.stages.strategies.search.banded import banded
from dpcore.stages.strategies.search.blt import blt
from dpcore.stages.strategies.search.inverse import banded_inverse, fractional_root
from dpcore.stages.strategies.search.toeplitz import toeplitz
from dpcore.stages.strategies.toeplitz import BandedInverseToeplitz, BandedToeplitz, Coefficients
from dpcore.stages.strategies.workload import Workload

KINDS: Final = ("dense", "banded", "banded-toeplitz", "toeplitz", "blt", "banded-inverse", "bifr", "lambda-cgd")
WITH_BANDS: Final = ("banded", "banded-toeplitz", "banded-inverse", "bifr")
_INVERSES: Final = ("banded-inverse", "bifr", "lambda-cgd")


def settings_of(kind: str, bands: int | None, buffers: int | None, period: int, steps: int) -> dict[str, int]:
    """Return the settings of a kind, checked; `period` is the number of steps between two of an example's."""
    validate.choice(KINDS, kind=kind)
    if bands is not None and kind not in WITH_BANDS:
        raise ArgumentError(f"bands={bands}: is for kind={', '.join(map(repr, WITH_BANDS))}, not for {kind!r}")
    if buffers is not None and kind != "blt":
        raise ArgumentError(f"buffers={buffers}: is for kind='blt', not for {kind!r}")
    if kind == "blt":
        return {"buffers": validate.integer(1, buffers=4 if buffers is None else buffers)}
    if kind not in WITH_BANDS:
        return {}
    most, why = period, "the steps between two of an example's; with more, its columns overlap"
    if kind in _INVERSES:
        most, why = steps, "the number of steps"
    count = validate.integer(1, bands=min(32, most) if bands is None else bands)
    if count > most:
        raise ArgumentError(f"bands={count}: must be at most {most}, {why}")
    return {"bands": count}


def solved(kind: str, workload: Workload, epochs: int, period: int, settings: dict[str, int]) -> dict[str, Any]:
    """Return the numbers of the best strategy of a kind that has few of them."""
    if kind == "blt":
        scales, decays = blt(workload, settings["buffers"], epochs, period)
        return {"scales": scales, "decays": decays}
    bands = settings.get("bands", workload.steps if kind == "toeplitz" else min(2, workload.steps))
    if kind in _INVERSES:
        search = banded_inverse if kind == "banded-inverse" else fractional_root
        return {"series": search(workload, bands, epochs, period)}
    if kind != "banded":
        return {"series": toeplitz(workload, bands, epochs, period)}
    series = toeplitz(workload, bands, epochs, period) if workload.series() is not None else np.eye(1, bands)[0]
    start = np.repeat(series[:, None], workload.steps, axis=1)
    start[np.add.outer(np.arange(bands), np.arange(workload.steps)) >= workload.steps] = 0.0
    return {"bands": banded(workload, start)}


def strategy_of(kind: str, found: dict[str, Any], steps: int) -> Any:
    """Return the strategy that is made of these numbers."""
    if kind == "dense":
        return from_matrix(found["matrix"])
    if kind == "banded":
        return Banded(found["bands"])
    if kind == "blt":
        return BLT(found["scales"].tolist(), found["decays"].tolist(), steps)
    series = tuple(found["series"].tolist())
    if kind in _INVERSES:
        return BandedInverseToeplitz(series, steps)
    return BandedToeplitz(series) if kind == "banded-toeplitz" else Coefficients(series)
