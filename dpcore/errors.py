"""Exceptions of dpcore. Each has one sentence that names the argument, its value and what would be right."""

from __future__ import annotations


class DpcoreError(Exception):
    """Base of every exception that dpcore raises on purpose."""


class ArgumentError(DpcoreError, ValueError):
    """An argument has a value that cannot be used."""


class OverlapError(ArgumentError):
    """Data that are to be held out are trained on, in whole or in part."""


class ArgumentTypeError(DpcoreError, TypeError):
    """An argument has a type, dtype or memory layout that cannot be used."""


class BackendError(DpcoreError, RuntimeError):
    """A backend is unknown, or something it needs is missing on this machine."""


class PrivacyError(DpcoreError, RuntimeError):
    """The requested privacy analysis does not cover the requested run."""


class DataError(DpcoreError, OSError):
    """A data file or folder is missing, truncated or corrupt."""


class BudgetError(PrivacyError):
    """The budget of a ledger does not allow the next step; nothing was drawn or released for it."""


class DivergenceError(DpcoreError, ArithmeticError):
    """Training left the range of numbers; what was spent by then stays spent."""


class MissingPackageError(DpcoreError, ModuleNotFoundError):
    """A part of dpcore needs a package that is not installed."""


class DeltaWarning(UserWarning):
    """A delta of at least 1/n: within it, one random example could be published in full."""


class SpeedWarning(UserWarning):
    """A run that takes a slower way than it could, with the reason."""


class TrainingWarning(UserWarning):
    """A run that is probably not meant so: values that are not finite, unscaled inputs, a ledger of other data."""
