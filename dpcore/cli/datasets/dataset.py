"""The one container that every reader returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dpcore.errors import DataError

Inputs = npt.NDArray[np.float32]
Targets = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labeled examples, split into a private training set and a held-out test set.

    The sizes of both sets, the shape of an example and the number of classes are treated as public. The test set is
    declared not to be in the training set, so that accuracy on it costs no privacy.

    Parameters
    ----------
    name : str
        Name for reports.
    train_inputs, test_inputs : ndarray of float32, shape (n, ...) and (m, ...)
        Images are (n, channels, height, width); anything else is (n, features...).
    train_targets, test_targets : ndarray of int64, shape (n,) and (m,)
        Class numbers, 0 <= target < `classes`.
    classes : int
        Number of classes.

    Raises
    ------
    DataError
        Where shapes, lengths or class numbers do not fit together.
    """

    name: str
    train_inputs: Inputs
    train_targets: Targets
    test_inputs: Inputs
    test_targets: Targets
    classes: int

    def __post_init__(self) -> None:
        for part in ("train", "test"):
            shape = getattr(self, f"{part}_inputs").shape
            if 0 in shape:
                raise DataError(
                    f"{self.name}: the {part} set is empty (inputs of shape {shape}); it needs at least one example"
                )
        for part in ("train", "test"):
            inputs: npt.NDArray[Any] = getattr(self, f"{part}_inputs")
            targets: npt.NDArray[Any] = getattr(self, f"{part}_targets")
            where = f"{self.name}: the {part} set"
            if inputs.dtype != np.float32 or targets.dtype != np.int64:
                raise DataError(f"{where} must have float32 inputs, int64 targets; not {inputs.dtype}, {targets.dtype}")
            if inputs.ndim < 2 or targets.ndim != 1:
                raise DataError(
                    f"{where} must have inputs of shape (examples, ...) and targets of shape (examples,), "
                    f"not {inputs.shape} and {targets.shape}"
                )
            if len(inputs) != len(targets):
                raise DataError(f"{where} has {len(inputs):,} inputs but {len(targets):,} targets; they must pair up")
            if not np.isfinite(inputs).all():
                row = int(np.argmin(np.isfinite(inputs).reshape(len(inputs), -1).all(axis=1)))
                raise DataError(
                    f"{where} has values that are not finite (NaN, or too large for float32), the first in row {row}; "
                    "leave such examples out, or put numbers in their place"
                )
            if targets.min() < 0:
                raise DataError(f"{where} has a target below 0; number the classes 0, 1, 2, ... (0 and 1 for -1 and 1)")
            if targets.max() >= self.classes:
                raise DataError(f"{where} has a target outside 0..{self.classes - 1}, with {self.classes} classes")
            # Every run may share one loaded data set: nobody gets to write into it.
            inputs.flags.writeable = False
            targets.flags.writeable = False
        if self.train_inputs.shape[1:] != self.test_inputs.shape[1:]:
            raise DataError(
                f"{self.name}: an example has shape {self.train_inputs.shape[1:]} in the train set but "
                f"{self.test_inputs.shape[1:]} in the test set; they must be equal"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example."""
        return tuple(self.train_inputs.shape[1:])

    def __len__(self) -> int:
        """Return the number of training examples, the public n of the privacy statement."""
        return len(self.train_inputs)


def scaled(values: npt.NDArray[Any], where: str) -> Inputs:
    """Convert to float32 by a constant that depends on the dtype alone, never on the values.

    Unsigned integers are divided by the largest value of their dtype (255 for uint8) and booleans become 0 and 1.
    Floating-point values are taken as they are: a scale estimated from the training set would be a release that nobody
    accounted for. Non-finite values stay too, and `Dataset` refuses them.
    """
    if values.dtype == np.bool_:
        return values.astype(np.float32)
    if values.dtype.kind == "u":
        result: Inputs = np.divide(values, np.float32(np.iinfo(values.dtype).max), dtype=np.float32)
        return result
    if values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return values.astype(np.float32)
    raise DataError(
        f"{where}: inputs have dtype {values.dtype}; store them as unsigned integers (scaled by their largest "
        "possible value) or as floating-point numbers (taken as they are)"
    )


def class_numbers(values: npt.NDArray[Any], where: str) -> Targets:
    """Convert class numbers, integers of any kind, to int64; a column of shape (n, 1) is flattened."""
    if values.dtype.kind not in "iu":
        raise DataError(f"{where}: targets have dtype {values.dtype}; they must be integers, the class numbers from 0")
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise DataError(f"{where}: a target is larger than 64-bit signed integers can hold; number the classes from 0")
    return values.astype(np.int64)


def as_images(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return (n, height, width) as (n, 1, height, width), and (n, height, width, 1 or 3) with the channels first."""
    if values.ndim == 3:
        return values[:, None]
    if values.ndim == 4 and values.shape[3] in (1, 3) and values.shape[1] not in (1, 3):
        return np.ascontiguousarray(np.moveaxis(values, 3, 1))
    return values
