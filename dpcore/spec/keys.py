"""The secret keys of a run's noise and sampling, and the rows of noise that are spent."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dpcore.errors import ArgumentError, PrivacyError
from dpcore.spec.stream import check_key, derive_key, new_key

OPERATING_SYSTEM = "operating system"
CALLER = "caller's key"
EXACT = "caller's key, exact"

# Digest of a noise key -> number of its rows that this process has begun. Objects come and go, and a checkpoint can be
# loaded into several of them; released rows stay released.
_begun: dict[str, int] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Provenance:
    """A statement's facts on a run's keys: their origin, and how often it was resumed; nothing secret."""

    origin: str = OPERATING_SYSTEM
    forks: int = 0


@dataclass(frozen=True)
class RunKeys(Provenance):
    """A run's keys. As secret as the data: whoever knows them can subtract the noise."""

    noise: bytes = field(repr=False, kw_only=True)  #: 32 bytes, never printed, never pickled
    #: 32 bytes, likewise: amplification by sampling is void if the batches can be guessed.
    sampling: bytes = field(repr=False, kw_only=True)
    #: The noise keys of the branches that this one grew out of, each with the first row that is no longer its own:
    #: correlated noise may draw earlier rows again.
    earlier: tuple[tuple[int, bytes], ...] = field(default=(), repr=False, kw_only=True)

    @classmethod
    def new(cls, key: bytes | None = None, *, exact_key: bool = False) -> RunKeys:
        """Make the keys of one run.

        Parameters
        ----------
        key : bytes, optional
            32 bytes of the caller's, into which fresh ones are mixed, so that no two runs share noise; by default all
            are fresh from the operating system.
        exact_key : bool
            Take the caller's key as it is: two runs with one key then have the *same* noise, and the difference of
            their results shows the data. For tests and study.
        """
        if key is None:
            if exact_key:
                raise ArgumentError("exact_key=True: must be given together with a key, which is None")
            return cls._of(new_key(), OPERATING_SYSTEM)
        check_key(key)
        if exact_key:
            return cls._of(key, EXACT)
        return cls._of(derive_key(key, b"dpcore run" + os.urandom(16)), CALLER)

    @classmethod
    def _of(cls, key: bytes, origin: str) -> RunKeys:
        return cls(origin, noise=key, sampling=derive_key(key, "dpcore sampling"))

    @property
    def provenance(self) -> Provenance:
        """The part that may be published."""
        return Provenance(self.origin, self.forks)

    def noise_of(self, row: int) -> bytes:
        """Return the key of a row of noise: that of the branch in which the row was begun."""
        return next((key for end, key in self.earlier if row < end), self.noise)

    def fork(self, *, keep_sampling: bool, forks: int = 0, row: int = 0, number: int | None = None) -> RunKeys:
        """Return keys for a branch: fresh noise from `row` on, and fresh batches unless `keep_sampling`.

        `number` distinguishes branches; a ledger recorded it before. Without one, the operating system draws it.
        `forks` is the number that the caller knows of.
        """
        tag = os.urandom(16) if number is None else number.to_bytes(8, "little")
        branch = derive_key(self.noise, b"dpcore fork" + tag)
        sampling = self.sampling if keep_sampling else derive_key(branch, "dpcore sampling")
        # Rows before `row` keep the keys they were drawn with; a branch left before its first row has none.
        earlier, first = [], 0
        for end, key in (*self.earlier, (row, self.noise)):
            if first < min(end, row):
                earlier.append((min(end, row), key))
                first = end
        return RunKeys(self.origin, max(self.forks, forks) + 1, noise=branch, sampling=sampling, earlier=tuple(earlier))

    def to_dict(self) -> dict[str, Any]:
        """Return the keys as plain values: **secret**."""
        return {
            "noise_key": self.noise,
            "sampling_key": self.sampling,
            "origin": self.origin,
            "forks": self.forks,
            "earlier_keys": [[row, key] for row, key in self.earlier],
        }

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RunKeys:
        """Return the keys that `to_dict` described."""
        return cls(
            saved["origin"],
            int(saved["forks"]),
            noise=saved["noise_key"],
            sampling=saved["sampling_key"],
            earlier=tuple((int(row), key) for row, key in saved["earlier_keys"]),
        )

    @property
    def digest(self) -> str:
        """SHA-256 that distinguishes noise keys without revealing them."""
        return hashlib.sha256(b"dpcore spent" + self.noise).hexdigest()

    def begin(self, row: int) -> None:
        """Mark a row of noise as spent, before it is drawn for a release.

        Raises PrivacyError if this process began it before; not for an exact key, whose caller answers for its use.
        """
        if self.origin == EXACT:
            return
        with _lock:
            if row < _begun.get(self.digest, 0):
                raise PrivacyError(
                    f"step {row + 1} was already released with this key, and its noise must not be added to another "
                    "sum: load a checkpoint, which draws fresh noise"
                )
            _begun[self.digest] = max(row + 1, _begun.get(self.digest, 0))

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied along with an object that has the keys."""
        raise PrivacyError("the keys of a run are not pickled or copied: save state_dict(), which has a secret part")
