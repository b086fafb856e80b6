"""The readable part of a ledger, whole or damaged; nothing is ever written to it."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dpcore.errors import DataError
from dpcore.ledger.entries import START, seal
from dpcore.spec.canonical import read_json

# Every entry is canonical JSON with sorted keys. Of a file that SQLite no longer reads, the raw bytes are searched; an
# entry that lay on several pages is lost to that.
_OPENING = re.compile(rb'\{"[a-z_]+":')


def salvage(path: Path) -> dict[str, Any]:
    """Return whatever entries of the file at `path` can still be read, chain broken or not.

    Returns
    -------
    dict
        "entries": a list of their contents by number, and "seals": for those that SQLite still gave, the stored seal
        by number, as text; "chain_intact_up_to": how many entries from the first on follow from each other, seals
        included.

    Raises
    ------
    DataError
        If the file cannot be read at all.
    """
    found, seals, whole = _by_sqlite(Path(path))
    intact, last = 0, START
    while intact in found and seals.get(intact) == seal(last, found[intact]):
        last = seals[intact]
        intact += 1
    if not (whole and 0 < intact == len(found)):  # else keep off: closing the file gives up this process's locks on it
        try:
            content = Path(path).read_bytes()
        except OSError as cause:
            raise DataError(f"ledger {path}: cannot be read ({cause.strerror})") from cause
        found = _by_bytes(content) | found
    return {
        "entries": [read_json(found[number]) for number in sorted(found)],
        "seals": {str(number): seals[number] for number in sorted(seals)},
        "chain_intact_up_to": intact,
    }


def _by_sqlite(path: Path) -> tuple[dict[int, str], dict[int, str], bool]:
    """Return bodies and seals by number, and whether SQLite read the table to its end."""
    import sqlite3

    found: dict[int, str] = {}
    seals: dict[int, str] = {}
    whole = False
    try:
        connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=1.0, isolation_level=None)
    except sqlite3.Error:
        return found, seals, whole
    with closing(connection):
        for order in ("", " DESC"):  # forwards until it breaks, then backwards until it breaks
            try:
                rows = connection.execute(f"SELECT number, body, seal FROM entries ORDER BY number{order}")
                for number, body, sealed in rows:
                    if number in found:
                        break
                    if _is_entry(body, number):
                        found[number], seals[number] = body, str(sealed)
                whole = whole or not order
            except (sqlite3.Error, UnicodeDecodeError):
                continue
    return found, seals, whole


def _by_bytes(content: bytes) -> dict[int, str]:
    found, decoder, text, end = {}, json.JSONDecoder(), content.decode("latin-1"), 0
    for match in _OPENING.finditer(content):
        if match.start() < end:
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("entry"), int) and "kind" in value and "time" in value:
            found[value["entry"]] = text[match.start() : end]
    return found


def _is_entry(body: Any, number: Any) -> bool:
    try:
        content = read_json(body)
    except (TypeError, ValueError):
        return False
    return isinstance(content, dict) and content.get("entry") == number
