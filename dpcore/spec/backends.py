"""The choice of the backend: set for the process, read when an object is built, kept by the object."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from dpcore.errors import BackendError
from dpcore.spec.extras import EXTRAS
from dpcore.spec.ops import Backend
from dpcore.spec.validate import choice

ENTRY_POINT_GROUP = "dpcore.backends"
# Also found without installed metadata, as when tests run from a source tree.
_BUILT_IN = {"numpy": "dpcore_numpy", "torch": "dpcore_torch", "triton": "dpcore_triton"}

_active: str | None = None


@cache
def _registered() -> dict[str, str]:
    from importlib.metadata import entry_points  # a tenth of dpcore's import time

    installed = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
    return {**installed, **_BUILT_IN}


def available_backends() -> tuple[str, ...]:
    """Return the names for `set_backend`: the built-in ones and those installed by other packages."""
    return tuple(sorted(_registered()))


def load_backend(name: str | None = None) -> Backend[Any]:
    """Import and return the backend `name`, or the active one; there is no fallback to another one.

    Raises ArgumentError for an unknown name, BackendError if a requirement of the backend is missing.
    """
    chosen = choice(available_backends(), backend=get_backend() if name is None else name)
    module = _registered()[chosen]
    try:
        return cast(Backend[Any], importlib.import_module(module))
    except ImportError as cause:
        remedy = f"; install it with: pip install 'dpcore[{chosen}]'" if chosen in EXTRAS else ""
        raise BackendError(f"backend={chosen!r}: importing {module} failed ({cause}){remedy}") from cause


def set_backend(name: str) -> None:
    """Make `name` the backend of every object built from now on, in every thread.

    Process-wide on purpose: PyTorch runs backward passes on worker threads, and these would not see a thread's setting.
    """
    global _active
    load_backend(name)
    _active = name


def get_backend() -> str:
    """Return the active backend's name: the last one set, else the variable ``DPCORE_BACKEND``, else "numpy".

    If none is set, `dpcore.torch.make_private` takes "torch" for a model on the CPU and "triton" for one on a GPU.
    """
    return chosen_backend() or "numpy"


def chosen_backend() -> str | None:
    """Return the backend that was set, by `set_backend` or the variable ``DPCORE_BACKEND``; None if none was."""
    if _active is not None or "DPCORE_BACKEND" not in os.environ:
        return _active
    return choice(available_backends(), DPCORE_BACKEND=os.environ["DPCORE_BACKEND"])


@contextmanager
def use_backend(name: str) -> Iterator[Backend[Any]]:
    """Set the backend `name` for a block and restore the former one after it (process-wide while it lasts)."""
    global _active
    former = _active
    set_backend(name)
    try:
        yield load_backend(name)
    finally:
        _active = former
