"""A run that pays from a ledger: every row is reserved before its batch is drawn, and drawn twice only for one sum.

What may be replayed, and what must fork, is decided in two places. When a state is loaded, the ledger compares the
digest of all that shapes the sums (`dpcore.ledger`). While rows are replayed, the numbers that move the parameters
(learning rates and the like, which may change at every step) are compared with the ledger's log, row by row: where one
differs, that row itself is still the same sum, but the next one will not be, so the run forks before the next batch is
drawn. Beside these numbers the log has a digest of what else may change from row to row and shapes the row's own sum:
the mode of a layer; parameters or a batch that the caller changed. Where that differs, or cannot be repeated, the run
forks before the batch is drawn; a change after that is refused.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpcore.errors import BudgetError, PrivacyError
from dpcore.mechanism.mechanism import Mechanism
from dpcore.spec.canonical import digest, plain
from dpcore.spec.keys import RunKeys
from dpcore.spec.ops import UpdateSettings

if TYPE_CHECKING:
    from dpcore.ledger import Ledger, LedgerRun

NO_LEDGER = (
    "The run goes on from a checkpoint that this ledger does not know: it was forked, and counts as a run of its own, "
    "the steps before the checkpoint included."
)


OTHER_START = "The parameters, moments or noise states are not those of the checkpoint that was saved."
OTHER_NUMBERS = "The step before it was made with other learning rates, or other numbers of the parameter groups."
OTHER_ROW = (
    "Something that shapes the step is not what it was, or cannot be known: modes, hooks or attributes of the model, "
    "the loss, switches of torch, values that were changed between steps, draws by Python's or NumPy's generators."
)


@dataclass(frozen=True)
class Decision:
    """How a run goes on from a saved state.

    Attributes
    ----------
    kind : str
        "continue", "replay" or "fork".
    run : LedgerRun or None
        The ledger's run; None where the ledger does not know the checkpoint, which then begins one.
    number : int or None
        Of the fork.
    reason : str
        One sentence.
    before : int
        Steps that the run had abandoned before a ledger knew it, as far as its checkpoints say.
    caveats : tuple of str
        Of the run, from before the checkpoint.
    """

    kind: str
    run: LedgerRun | None
    number: int | None
    reason: str
    before: int = 0
    caveats: tuple[str, ...] = ()


class LedgerAccount:
    """Implements `dpcore.mechanism.mechanism.Account` by a ledger.

    Parameters
    ----------
    ledger : Ledger
    mechanism : Mechanism
    name : str
        What the ledger calls the run.
    run_digest : callable
        Returns the digest of all that shapes the run's sums besides its state and the update's numbers; empty where it
        is not known, which makes every replay a fork.
    dataset : str
        Fingerprint of the data, or empty.
    parameters_digest : callable, optional
        Returns the digest of the parameters as they are; compared with that of the checkpoint before a replay.
    row_digest : callable
        Returns the digest of what shapes the sum of the row at hand and may change from row to row; empty where the row
        cannot be made a second time for certain.
    """

    def __init__(
        self,
        ledger: Ledger,
        mechanism: Mechanism,
        *,
        name: str,
        run_digest: Callable[[], str],
        dataset: str = "",
        parameters_digest: Callable[[], str] | None = None,
        row_digest: Callable[[], str] = str,
    ) -> None:
        self.ledger, self.mechanism, self.name, self.dataset = ledger, mechanism, name, dataset
        self.run: LedgerRun | None = None
        self.caveats: tuple[str, ...] = ()
        self.resumed = ""
        self._run_digest, self._parameters_digest, self._row_digest = run_digest, parameters_digest, row_digest
        self._expected_parameters: str | None = None
        self._drawn: int | None = None
        self._other_start: int | None = None
        self._before = self._uncharged = 0
        self._fork_from: int | None = None
        self._why = ""
        self._last: tuple[list[UpdateSettings], str] | None = None
        self._saved_state: str | None = None
        self._granted = 0

    def before_draw(self, step: int) -> None:
        """Reserve the row, or fork first where the replay would no longer be one."""
        run = self.begin()
        if self._expected_parameters is not None:
            assert self._parameters_digest is not None
            if self._parameters_digest() != self._expected_parameters:
                self._other_start = step  # other than the checkpoint's, from which the row could be made again
        self._expected_parameters = None
        if step < self.mechanism.replay_end:
            logged = run.settings_at(step)
            if self._other_start == step or (logged is not None and not self._repeats(step, logged)):
                self._fork_from = step
                self._why = OTHER_START if self._other_start == step else OTHER_ROW
        run = self._branch_if_due(step)
        run.reserve(step)
        self._drawn = step

    def before_release(self, step: int, settings: Sequence[UpdateSettings]) -> None:
        """Log the settings, or note that from the next row on this is no replay."""
        if self._drawn != step:
            self.before_draw(step)
        assert self.run is not None
        self.run.reserve(step)  # once more: the branch may have been resumed by another since
        known = f"{self._digest(settings)}:{self._of_row(step)}"
        logged = self.run.settings_at(step)
        if logged is None or step >= self.mechanism.replay_end:  # None: reserved, and never about to be released
            self.run.settings(step, known)
        elif not self._repeats(step, logged):
            raise PrivacyError(
                f"step {step + 1} may have been released before, and after its batch was drawn, the model, its mode or "
                "the batch became another one: the same noise must not be added to another sum; load the checkpoint "
                "with fork=True"
            )
        elif logged != known:
            self._fork_from = step + 1
            self._why = OTHER_NUMBERS
        self._granted = step + 1

    def _of_row(self, step: int) -> str:
        return "" if self._other_start == step else self._row_digest()

    def _repeats(self, step: int, logged: str) -> bool:
        """Whether the row's sum is the one that was logged, as far as it can change from row to row."""
        own = self._of_row(step)
        return bool(own) and logged.partition(":")[2] == own

    def _branch_if_due(self, step: int) -> LedgerRun:
        assert self.run is not None
        return self._fork(step) if self._fork_from is not None and step >= self._fork_from else self.run

    def _digest(self, settings: Sequence[UpdateSettings]) -> str:
        given = list(settings)
        if self._last is None or self._last[0] != given:
            self._last = given, digest(plain([numbers._asdict() for numbers in given]))
        return self._last[1]

    def begin(self) -> LedgerRun:
        """Return the ledger's run, begun if it was not."""
        if self.run is None:
            plan, taken = self.mechanism.plan, self.mechanism.step
            if self._uncharged:
                event = plan.event_after(0, self._uncharged)
                name = f"{self.name}: steps abandoned before this ledger knew the run"
                self.ledger.charge(event, name=name, left=True)
                self._uncharged = 0
            run = self.ledger.begin(
                name=self.name,
                adjacency=plan.event.adjacency,
                steps=plan.steps,
                event_after=plan.event_after,
                description={"method": plan.method.describe(), "sampler": plan.sampler.describe()},
                digest=self._run_digest(),
                key_digest=self.mechanism.keys.digest,
                dataset=self.dataset,
                left=taken > 0,
            )
            if taken:  # before the ledger knew the run, and so before any other is granted a row
                run.reserve(taken - 1)
            self.run = run
        return self.run

    def _fork(self, row: int) -> LedgerRun:
        assert self.run is not None
        self.run, number = self.run.fork(row, digest=self._run_digest())
        keys = self.mechanism.keys.fork(keep_sampling=self.mechanism.plan.sampler.keeps_order, row=row, number=number)
        self.mechanism.branch(keys, self.run.releases + self._before)
        self._fork_from = None
        self.resumed = f"fork at step {row + 1}: {self._why}"
        self.run.use_key(keys.digest)  # last: if it cannot be written, the keys are other ones all the same
        return self.run

    @property
    def saved(self) -> dict[str, Any] | None:
        """What a checkpoint must hold so that the ledger knows it again: nothing secret.

        A run that has not begun begins now, so that a checkpoint from before the first step is known, too.
        """
        try:
            run = self.begin()
        except BudgetError:  # nothing is left to spend, which is no reason not to save
            return None
        # A state on other parameters than those that the next row was made from before belongs to a branch already.
        run = self._branch_if_due(self.mechanism.step)
        return {
            "ledger": self.ledger.ledger_id,
            "run": run.run_id,
            "branch": run.branch_id,
            "abandoned_before": self._before,
            "caveats": list(self.caveats),
            **({} if self._parameters_digest is None else {"state": self._state()}),  # what is gone on from
        }

    def _state(self) -> str:
        """Return an HMAC, by the noise key, of all that the next steps rest on beside the parameters.

        A saved state whose moments were reset, say, replays its first row and makes another sum of the second.
        """
        state = self.mechanism.state_dict()
        public = {name: value for name, value in state["public"].items() if name not in ("run", "releases", "arrays")}
        keys = {name: value for name, value in state["secret"].items() if name != "arrays"}
        total = hmac.new(keys["noise_key"], f"{digest(plain(public))} {sorted(keys.items())}".encode(), "sha256")
        for part in ("public", "secret"):
            for name, array in sorted(state[part]["arrays"].items()):
                total.update(f"{name} {array.shape} {array.dtype}\0".encode())
                total.update(np.ascontiguousarray(array).tobytes())
        return total.hexdigest()

    @property
    def branches(self) -> int | None:
        """Each fork leaves one branch; of what was abandoned before the ledger knew the run nothing is known."""
        return None if self.run is None else self.run.forks + self._before

    def describe(self, delta: float) -> dict[str, Any]:
        """Return the ledger's and the run's names, and what the ledger as a whole comes to."""
        if self.run is None:
            return {}
        total = self.ledger.total(delta)
        return {
            "ledger": self.ledger.ledger_id,
            "run": self.run.run_id,
            "seal": self.ledger.seal,
            "total": {
                "epsilon": plain(total.filter),
                "epsilon_if_fixed_beforehand": plain(total.fixed),
                "delta": delta,
            },
            **self.ledger.stated_place,
        }

    def decide(self, saved: Mapping[str, Any] | None, row: int, *, fork: bool | None) -> Decision:
        """Ask the ledger how to go on from a checkpoint at `row`; nothing of the run is changed yet.

        Parameters
        ----------
        saved : mapping or None
            From `saved`.
        row : int
            The checkpoint's step.
        fork : bool or None
            True forks in any case; False refuses to; None leaves it to the ledger.

        Raises
        ------
        PrivacyError
            With fork=False where the ledger does not allow to go on under the same keys.
        """
        if saved is None or saved.get("ledger") != self.ledger.ledger_id:
            if fork is False:
                raise PrivacyError("fork=False: the checkpoint does not belong to a run of this ledger; leave fork out")
            return Decision("fork", None, None, NO_LEDGER)
        if self.run is not None:
            self.close()
        plan = self.mechanism.plan
        own = self._run_digest()
        known = any(run.run_id == saved["run"] and saved["branch"] in run.marks for run in self.ledger.runs())
        if not known and fork is not False:  # an older copy of the ledger was put back, from before the run
            return Decision("fork", None, None, NO_LEDGER)
        found = self.ledger.resume(
            saved["run"], saved["branch"], row, digest=own, event_after=plan.event_after, fork=fork
        )
        self._saved_state = saved.get("state")
        before = int(saved.get("abandoned_before", 0))
        return Decision(found.kind, found.run, found.number, found.reason, before, tuple(saved.get("caveats", ())))

    def resume(self, decision: Decision, keys: RunKeys, row: int, parameters: str | None, releases: int = 0) -> None:
        """Go on as decided, once the mechanism has taken over the saved state with its `keys`.

        Parameters
        ----------
        decision : Decision
        keys : RunKeys
            Secret.
        row : int
            The checkpoint's step.
        parameters : str or None
            Digest of its parameters.
        releases : int
            Those that it knows of.
        """
        mechanism = self.mechanism
        self._before, self._uncharged, self.caveats = decision.before, 0, decision.caveats
        self.run, self._fork_from, self._expected_parameters = decision.run, None, None
        self._drawn = self._other_start = None
        self._granted = 0
        self.resumed = f"{decision.kind}: {decision.reason}"
        if decision.kind == "fork":
            number = decision.number
            keys = keys.fork(keep_sampling=mechanism.plan.sampler.keeps_order, row=row, number=number)
            if self.run is None:
                self.caveats = (NO_LEDGER,)
                self._before = self._uncharged = max(0, releases - row)
            mechanism.branch(keys, self._before + (row if self.run is None else self.run.releases))
            if self.run is not None:
                self.run.use_key(keys.digest)  # after the keys are other ones: it may fail
            return
        assert self.run is not None
        mechanism.replay_end = self.run.mark if decision.kind == "replay" else row
        mechanism.releases = mechanism.replay_end + self.run.releases - self.run.mark + self._before
        self._expected_parameters = parameters
        if self._state() != self._saved_state:
            self._other_start = row

    def close(self) -> None:
        """Give back what was reserved and not released."""
        if self.run is not None:
            # A row that was granted may be on its way out, in another thread or below a signal's handler.
            self.run.close(max(self.mechanism.step, self.mechanism.replay_end, self._granted))
