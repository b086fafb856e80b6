"""The files next to a statement.json, compared with it: the text, the card with its digests, and the model."""

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from dpcore.errors import DpcoreError
from dpcore.spec.version import __version__
from dpcore.statement.card import card_again, listed
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE
from dpcore.statement.verify.finding import FAILED, OK, REMARK, Finding

STATEMENT, TEXT, CARD, MODEL = "statement.json", "statement.txt", "README.md", "model.safetensors"
_CHUNK = 1 << 20
_CLAIM = re.compile(r"\b(epsilon|delta)\s+=\s+(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def check_files(folder: Path, statement: Statement) -> Iterator[Finding]:
    """Yield a finding on each file of a run's folder, or an export, that follows from its statement."""
    card = _read(folder / CARD)
    digests = {} if card is None else listed(card)
    if card is None and (folder / MODEL).exists():
        # A run that is under way, or was killed, has no card yet.
        if statement.note.startswith(WRITTEN_BEFORE):
            yield Finding(CARD, REMARK, f"the run is under way, or was killed: {MODEL} is of an earlier end of it")
        else:
            yield Finding(CARD, FAILED, f"{CARD} is missing, which lists the SHA-256 of {MODEL}")
    if card is not None:
        yield _as_written(
            CARD,
            card,
            lambda: card_again(statement, card),
            statement,
            "the card of this statement, except its title and its description of the model",
        )
        if not digests:
            yield Finding(CARD, FAILED, f"{CARD} lists no SHA-256 of the files next to it")
        for name, stated in digests.items():
            yield _digest(folder, name, stated)
    text = _read(folder / TEXT)
    if text is not None:
        yield _as_written(TEXT, text, statement.text, statement, "this statement, for a person")
    elif TEXT not in digests and any((folder / name).exists() for name in (MODEL, "config.json")):
        # If a card lists it, it is missed there; a statement.json alone is no run's folder.
        yield Finding(TEXT, FAILED, f"{TEXT} is missing, or is no text")


def looked_at(folder: Path) -> set[str]:
    """Return the names of the files that `check_files` compares."""
    card = _read(folder / CARD)
    return {STATEMENT, TEXT, CARD} | (set() if card is None else set(listed(card)))


def _as_written(name: str, content: str, again: Callable[[], str], statement: Statement, words: str) -> Finding:
    try:
        written, text = again(), statement.text()
    except (DpcoreError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as cause:
        return Finding(name, FAILED, f"{name} cannot be compared with {STATEMENT} ({type(cause).__name__})")
    least = {"epsilon": statement.best_epsilon, "delta": statement.delta}
    # Whatever words a title or another version has, they are not for a smaller epsilon.
    less = any(float(value) < least[of] for of, value in {*_CLAIM.findall(content)} - {*_CLAIM.findall(text)})
    if content == written and not less:
        return Finding(name, OK, words)
    version = statement.software.get("dpcore")
    if version != __version__ and not less:  # which may have had other words for the same
        return Finding(name, REMARK, f"{name} is not as dpcore {__version__} writes it; compare with dpcore {version}")
    return Finding(name, FAILED, f"{name} contradicts {STATEMENT}: one of the two was changed or is another run's")


def _digest(folder: Path, name: str, stated: str) -> Finding:
    if Path(name).name != name:
        return Finding("SHA-256", FAILED, f"{CARD} lists {name!r}, which is not in its folder")
    try:
        digest = hashlib.sha256()
        with (folder / name).open("rb") as file:
            while block := file.read(_CHUNK):
                digest.update(block)
    except OSError as cause:
        return Finding(f"SHA-256 of {name}", FAILED, f"{name} cannot be read ({cause.strerror}), and {CARD} lists it")
    if digest.hexdigest() == stated:
        return Finding(f"SHA-256 of {name}", OK, f"{stated[:16]}..., as {CARD} lists it")
    return Finding(f"SHA-256 of {name}", FAILED, f"{name} is not the file whose SHA-256 {CARD} lists")


def _read(path: Path) -> str | None:
    """Return a text; None if there is none."""
    try:
        return path.read_bytes().decode("utf-8")
    except (OSError, ValueError):
        return None
