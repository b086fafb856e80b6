"""Interfaces of other libraries, driven by a private run. A host's library is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpcore.torch.hosts.hugging_face import PrivateTrainer
    from dpcore.torch.hosts.scikit_learn import PrivateClassifier, PrivateRegressor

__all__ = ["PrivateClassifier", "PrivateRegressor", "PrivateTrainer"]


def __getattr__(name: str) -> Any:
    """Import a host's class, and with it the host."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    host = "hugging_face" if name == "PrivateTrainer" else "scikit_learn"
    return getattr(import_module(f"{__name__}.{host}"), name)
