"""The secret keys of a run: where its noise and its sampling come from."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from dpcore.spec.stream import check_key, derive_key, new_key

OPERATING_SYSTEM = "operating system"
CALLER = "caller's key"


@dataclass(frozen=True)
class RunKeys:
    """A run's keys. As secret as the data: whoever knows them can subtract the noise.

    Attributes
    ----------
    noise : bytes
        32 bytes, never printed.
    sampling : bytes
        32 bytes, never printed: amplification by sampling is void if the batches can be guessed.
    origin : str
        For the privacy statement: the operating system, or the caller.
    forks : int
        How often the run was resumed from a checkpoint under fresh noise.
    """

    noise: bytes = field(repr=False)
    sampling: bytes = field(repr=False)
    origin: str = OPERATING_SYSTEM
    forks: int = 0

    @classmethod
    def new(cls, key: bytes | None = None, *, run_id: bytes | None = None, exact_key: bool = False) -> RunKeys:
        """Make the keys of one run.

        Parameters
        ----------
        key : bytes, optional
            32 bytes of the caller's. Without one the operating system gives them.
        run_id : bytes, optional
            Mixed into a caller's key, so that no two runs share noise; fresh from the operating system by default.
        exact_key : bool
            Take the caller's key as it is: two runs with one key then have the *same* noise, and the difference of
            their results shows the data. For replay and for tests.
        """
        if key is None:
            return cls._of(new_key(), OPERATING_SYSTEM)
        check_key(key)
        if exact_key:
            return cls._of(key, f"{CALLER}, exact")
        identity = os.urandom(16) if run_id is None else run_id
        return cls._of(derive_key(key, b"dpcore run" + identity), CALLER)

    @classmethod
    def _of(cls, key: bytes, origin: str) -> RunKeys:
        return cls(key, derive_key(key, "dpcore sampling"), origin)

    def fork(self, *, keep_sampling: bool) -> RunKeys:
        """Return keys for a branch: fresh noise from here on, and fresh batches unless `keep_sampling`.

        The number that tells branches apart comes from the operating system until a ledger records it.
        """
        branch = derive_key(self.noise, b"dpcore fork" + os.urandom(16))
        sampling = self.sampling if keep_sampling else derive_key(branch, "dpcore sampling")
        return RunKeys(branch, sampling, self.origin, self.forks + 1)
