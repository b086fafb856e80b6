"""What a folder of data has, for the sentence that says what it lacks."""

from pathlib import Path


def listed(folder: Path) -> str:
    """Return the first names in a folder, or "nothing"."""
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(there[:6]) + (" ..." if len(there) > 6 else "") if there else "nothing"
