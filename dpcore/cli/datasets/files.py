"""Files of a data set: what goes wrong in reading one, and what a folder has, each in a sentence."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dpcore.errors import DataError


@contextmanager
def reading(path: Path, damage: Mapping[type[Exception], str]) -> Iterator[None]:
    """Turn exceptions of reading a file into DataError.

    `damage` has what is said of each kind that a damaged file raises, the first that fits, with "{}" for the cause.
    """
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as cause:
        raise DataError(f"{path}: no such file") from cause
    except Exception as cause:
        said = next((words for kind, words in damage.items() if isinstance(cause, kind)), None)
        if said is None and isinstance(cause, OSError):
            said = f"cannot be read ({cause.strerror or cause})"
        if said is None:
            raise
        raise DataError(f"{path}: {said.replace('{}', str(cause))}") from cause


def listed(folder: Path) -> str:
    """Return the first names in a folder, or "nothing"."""
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(there[:6]) + (" ..." if len(there) > 6 else "") if there else "nothing"
