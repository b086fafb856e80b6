"""A run that pays from a ledger: every row is reserved before its batch is drawn.

A row is marked as granted just before its release. `close` gives back reserved rows that are not granted. If a
signal's handler calls `close` during a reservation, it is done right after that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dpcore.accounting.branches import Branch, Branches
from dpcore.errors import BudgetError, PrivacyError
from dpcore.mechanism.peers import Peers, by_the_first

if TYPE_CHECKING:
    from dpcore.ledger import Ledger, LedgerRun
    from dpcore.mechanism.mechanism import Mechanism

NO_LEDGER = (
    "The run goes on from a checkpoint that this ledger does not know: it counts as a run of its own, the steps before "
    "the checkpoint included."
)


class LedgerAccount:
    """Pays for a mechanism's releases; the ledger lists the run by `name` and by `dataset`, the data's fingerprint."""

    def __init__(self, ledger: Ledger, mechanism: Mechanism, *, name: str, dataset: str = "") -> None:
        self.ledger, self.mechanism, self.name, self.dataset = ledger, mechanism, name, dataset
        self.run: LedgerRun | None = None  # until it has begun in the ledger
        self.caveats: tuple[str, ...] = ()  # for the statement
        self._granted = 0
        self._lock, self._inside, self._close_due = threading.RLock(), False, False

    def before_draw(self, step: int) -> None:
        """Reserve the row, or raise `PrivacyError`: nothing is drawn then."""
        with self._at_work():
            self.begin().reserve(step)

    def has_paid(self, step: int) -> bool:
        """Whether the row is reserved already, as one of those that are reserved together."""
        with self._at_work():
            return self.run is not None and step < self.run.mark

    def before_release(self, step: int) -> None:
        """Reserve the row, if it was given back since the draw, and never give it back again."""
        with self._at_work():
            run = self.begin()
            run.reserve(step)
            self._granted = step + 1  # a close that comes in between waits for the end of this block

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        with self._lock:
            outer, self._inside = self._inside, True
            try:
                yield
            finally:
                self._inside = outer
                if self._close_due:
                    self.close()

    def begin(self) -> LedgerRun:
        """Return the ledger's run, begun if it was not."""
        with self._at_work():
            if self.run is None:
                self.run = self._begun()
            return self.run

    def _begun(self) -> LedgerRun:
        mechanism, plan = self.mechanism, self.mechanism.plan
        run = self.ledger.begin(
            name=self.name,
            adjacency=plan.event.adjacency,
            steps=plan.steps,
            event_after=plan.event_after,
            description={"method": plan.method.describe(), "sampler": plan.sampler.describe()},
            key_digest=mechanism.keys.digest,
            dataset=self.dataset,
            left=mechanism.step,
            abandoned=mechanism.abandoned,
        )
        mechanism.branches = Branches(run.branch_id)  # the ledger has the others, from now on
        return run

    @property
    def saved(self) -> dict[str, Any] | None:
        """The entry of a checkpoint by which the ledger recognizes it; nothing secret.

        A run that has not begun begins now, so that a checkpoint from before the first step is known, too.
        """
        try:
            run = self.begin()
        except BudgetError:  # nothing is left to spend, which is no reason not to save
            return None
        names = {"ledger": self.ledger.ledger_id, "run": run.run_id, "branch": run.branch_id}
        return {**names, "caveats": list(self.caveats)}

    @property
    def tree(self) -> Mapping[str, Branch]:
        """The ledger's branches of the run; empty before it began."""
        with self._at_work():
            return {} if self.run is None else self.run.tree

    def describe(self, delta: float) -> dict[str, Any]:
        """Return the ledger's and the run's names, and the ledger's total."""
        if self.run is None:
            return {}
        with self._at_work():
            return self.ledger.describe(self.run.run_id, delta)

    def resume(self, saved: Mapping[str, Any] | None, row: int) -> tuple[str, int] | None:
        """Continue from a checkpoint at step `row`, which contains `saved`, on a branch of its own.

        Return the branch, and the number to derive its keys from, which is on disk already; None if the ledger does not
        know the checkpoint: a new run then begins with the next step. If the ledger cannot be used, or has the run
        under another plan, that is an error, and nothing was changed.
        """
        with self._at_work():
            self._give_back()
            self._granted = 0
            if saved is None or not self._knows(saved):
                self.run, self.caveats = None, (NO_LEDGER,)
                return None
            event_after = self.mechanism.plan.event_after
            self.run, number = self.ledger.resume(saved["run"], saved["branch"], row, event_after=event_after)
            self.caveats = tuple(saved.get("caveats", ()))
            return self.run.branch_id, number

    def _knows(self, saved: Mapping[str, Any]) -> bool:
        """Whether the ledger has the checkpoint's branch: an older copy that was put back may lack it."""
        if saved.get("ledger") != self.ledger.ledger_id:
            return False
        return any(run.run_id == saved["run"] and saved["branch"] in run.marks for run in self.ledger.runs())

    def use_key(self, key_digest: str) -> None:
        """Write down the digest of the branch's key, once it is derived."""
        with self._at_work():
            if self.run is not None:
                self.run.use_key(key_digest)

    def close(self) -> None:
        """Give back rows that were reserved and not granted to a release."""
        with self._lock:
            if self._inside:  # by a signal's handler: after the work that it interrupted
                self._close_due = True
                return
            self._inside, self._close_due = True, False
            try:
                self._give_back()
            finally:
                self._inside = self._close_due = False

    def _give_back(self) -> None:
        if self.run is not None:
            self.run.close(max(self.mechanism.step, self._granted))


# A run of several processes that pays from a ledger: the first process has the ledger, and answers for all.


def _by_first(name: str) -> Callable[..., Any]:
    """Return a method that calls the first process's account. All must call it, and all get the result."""

    def call(self: SharedAccount, *arguments: Any) -> Any:
        return by_the_first(self.peers, lambda: getattr(self.account, name)(*arguments))

    return call


def _here(name: str) -> Any:
    """Return a property of the first process's account, which is not sent; PrivacyError in the others."""

    def value(self: SharedAccount) -> Any:
        if self.account is None:
            raise PrivacyError(
                f"rank {self.peers.rank} has no ledger and does not know epsilon: take epsilon and statement from rank "
                "0, which has the ledger"
            )
        return getattr(self.account, name)

    return property(value)


class SharedAccount:
    """The first process's account, and in the others its answers; `account` is None there. See `LedgerAccount`.

    No process draws or releases before the first has recorded the row. All must call it, in one order, except for the
    ledger's total, which only the first knows.
    """

    def __init__(self, peers: Peers, account: LedgerAccount | None) -> None:
        self.peers, self.account = peers, account

    before_draw = _by_first("before_draw")
    has_paid = _by_first("has_paid")
    before_release = _by_first("before_release")
    resume = _by_first("resume")
    use_key = _by_first("use_key")
    tree, caveats, describe = _here("tree"), _here("caveats"), _here("describe")

    def begin(self) -> None:
        """Begin the run in the ledger; its entry there is the first process's."""

        def begun() -> None:
            assert self.account is not None
            self.account.begin()

        by_the_first(self.peers, begun)

    @property
    def saved(self) -> Any:
        """The account's entry for a checkpoint. All must call it."""
        return by_the_first(self.peers, lambda: None if self.account is None else self.account.saved)

    def close(self) -> None:
        """Give back rows that were not granted; a signal's handler calls it in one process only."""
        if self.account is not None:
            self.account.close()
