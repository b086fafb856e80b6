"""``gradients.npz`` of a run folder: coordinates of released gradients before and after the filter.

Everything in the file is public: it was released under the run's guarantee, is computed from such releases, or is a
setting. The file has no sum before noise, no batch and no key.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpcore.cli.datasets import read_arrays
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, DpcoreError
from dpcore.spec.validate import integer, non_negative
from dpcore.spec.whole_file import whole_file

NAME = "gradients.npz"
_SCALARS = ("dimension", "noise_std", "white_noise")
KEYS = ("released", "filtered", "negative_share", *_SCALARS)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Recorded gradients of one run. ArgumentError for shapes that do not fit, and for impossible values.

    Parameters
    ----------
    released : array, shape (T, m)
        m coordinates, chosen without looking at data, of the privatized average g_t of each step.
    filtered : array, shape (T, m)
        The same coordinates after the filter.
    negative_share : array, shape (T,)
        Share of all coordinates whose debiased second moment is negative; NaN if the update has none.
    dimension : int
        d, the number of parameters; at least m.
    noise_std : float
        s, the standard deviation of the seed noise on the average, per coordinate.
    white_noise : bool, optional
        Whether the noise is independent from step to step and has the standard deviation s in every coordinate. This is
        false if the noise is correlated, or if gradients are scaled per coordinate before it. Only if it is true do s
        and the record show the signal.
    """

    released: NDArray[np.float32]
    filtered: NDArray[np.float32]
    negative_share: NDArray[np.float32]
    dimension: int
    noise_std: float
    white_noise: bool = True

    def __post_init__(self) -> None:
        for name in ("released", "filtered", "negative_share"):
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "fiu":
                raise ArgumentError(f"{name}: has type {array.dtype}; must be real numbers")
            with np.errstate(over="ignore"):
                object.__setattr__(self, name, np.ascontiguousarray(array, dtype=np.float32))
        object.__setattr__(self, "dimension", integer(1, dimension=self.dimension))
        object.__setattr__(self, "noise_std", non_negative(noise_std=self.noise_std))
        if not isinstance(self.white_noise, bool):
            raise ArgumentTypeError(f"white_noise={self.white_noise!r}: must be True or False")
        shape, share = self.released.shape, self.negative_share
        if len(shape) != 2 or not self.released.size:
            raise ArgumentError(f"released: has shape {shape}; must be (steps, coordinates), at least one of each")
        if self.filtered.shape != shape:
            raise ArgumentError(f"filtered: has shape {self.filtered.shape}; must be {shape}, as released")
        if share.shape != shape[:1]:
            raise ArgumentError(f"negative_share: has shape {share.shape}; must be {shape[:1]}")
        if shape[1] > self.dimension:
            raise ArgumentError(f"dimension={self.dimension}: must be at least the {shape[1]} coordinates recorded")
        for name in ("released", "filtered"):
            if not np.isfinite(getattr(self, name)).all():
                raise ArgumentError(f"{name}: has values that are not finite")
        if ((share < 0) | (share > 1)).any():  # never true of NaN
            raise ArgumentError("negative_share: must lie in [0, 1], or be NaN if there is no second moment")


def save_gradients(path: str | os.PathLike[str], *arrays: Any, **settings: Any) -> Path:
    """Write recorded gradients to one file. A reader sees the whole old file or the whole new one.

    Parameters
    ----------
    path : path
        The file, or the folder for a `gradients.npz`.
    *arrays, **settings
        The fields of `Gradients`, in its order or by name.

    Returns
    -------
    Path
        The file written.

    Raises
    ------
    ArgumentError
        For fields that `Gradients` refuses.
    """
    record, target = Gradients(*arrays, **settings), _file(path)
    with whole_file(target) as file:
        content: dict[str, Any] = {key: getattr(record, key) for key in KEYS}
        np.savez_compressed(file, **content)
    return target


def load_gradients(path: str | os.PathLike[str]) -> Gradients:
    """Read the file of `save_gradients`, given it or its folder; DataError if it is missing or damaged."""
    file = _file(path)
    if not file.exists():
        raise DataError(f"{file}: no such file; `dpcore train --record-gradients N --out FOLDER` writes it")
    content: dict[str, Any] = dict(read_arrays(file, KEYS))
    try:
        return Gradients(**{key: value.item() if key in _SCALARS else value for key, value in content.items()})
    except (DpcoreError, TypeError, ValueError) as cause:
        raise DataError(f"{file}: {next(iter(str(cause).splitlines()), type(cause).__name__)}") from cause


def _file(path: str | os.PathLike[str]) -> Path:
    place = Path(path)
    return place / NAME if place.is_dir() else place
