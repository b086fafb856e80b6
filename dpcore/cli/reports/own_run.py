"""A user's own run, for the commands that examine it: the objects that a script gives to `make_private`.

The file is the user's own and is run as Python runs it, up to its first call of `dpcore.torch.make_private`, whose
arguments are taken; nothing after that call is reached. Or a function of it is called, which returns the objects, or
calls `make_private` itself.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dpcore.errors import ArgumentError, DataError, DpcoreError

_NAMES = ("model", "data", "method", "loss")


class _Reached(BaseException):
    """`make_private` was called; no ``except Exception`` of the script's stops it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


@contextmanager
def own_run(place: str, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Give the keywords of a run: of a script, or of what a function returns.

    Parameters
    ----------
    place : str
        ``FILE.py``, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``.
    arguments : sequence of str
        What the script finds in ``sys.argv`` after its name.

    Raises
    ------
    ArgumentError
        If the script fails, or gives no run.
    DataError
        If there is no such file.
    """
    name, _, function = place.partition(":")
    path = Path(name)
    is_file = path.suffix == ".py"
    if is_file and not path.is_file():
        raise DataError(f"{name}: there is no such file")
    if not is_file and not function:
        raise ArgumentError(f"{place!r}: must be a file that ends in .py, FILE.py:FUNCTION or MODULE:FUNCTION")
    folder = str(path.resolve().parent) if is_file else str(Path.cwd())
    main = sys.modules["__main__"]
    try:
        with _put(sys, "argv", [name, *arguments]), _put(sys, "path", [folder, *sys.path]):
            with redirect_stdout(sys.stderr):  # standard output is for the findings
                found = _objects(place, path if is_file else None, name, function)
            yield found
    finally:
        sys.modules["__main__"] = main


def _objects(place: str, path: Path | None, name: str, function: str) -> dict[str, Any]:
    try:
        with _stopping():
            if path is None:
                module = importlib.import_module(name)
            else:
                module = _run(path, "__main__" if not function else path.stem)
            if function:
                if not callable(getattr(module, function, None)):
                    raise ArgumentError(f"{place}: has no function {function!r}")
                return _named(place, getattr(module, function)())
    except _Reached as reached:
        return reached.arguments
    except DpcoreError:
        raise
    except (Exception, SystemExit) as cause:
        told = f"{place}: ends with {type(cause).__name__} ({cause}) before it gives a run"
        raise ArgumentError(f"{told}; --debug shows where") from cause
    raise ArgumentError(f"{place}: never calls dpcore.torch.make_private; name a function that returns the objects")


def _run(path: Path, name: str) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))  # noqa: S102 - the user's own file
    return module


@contextmanager
def _stopping() -> Iterator[None]:
    """Let `make_private` stop the script, and tell what it was asked for."""
    import dpcore.torch

    place = sys.modules["dpcore.torch.make_private"]
    signature = inspect.signature(place.make_private)

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Reached(dict(signature.bind(*args, **kwargs).arguments))

    stop.__signature__ = signature  # type: ignore[attr-defined]
    with _put(dpcore.torch, "make_private", stop), _put(place, "make_private", stop):
        yield


@contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an attribute have another value for the length of the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _named(place: str, found: Any) -> dict[str, Any]:
    if isinstance(found, (tuple, list)) and 2 <= len(found) <= len(_NAMES):
        return dict(zip(_NAMES, found, strict=False))
    if isinstance(found, Mapping) and {"model", "data"} <= found.keys():
        return {str(key): value for key, value in found.items()}
    raise ArgumentError(
        f"{place}: must return (model, data, method, loss), or a dict with 'model', 'data' and other keywords of "
        f"make_private, not {type(found).__name__}"
    )
