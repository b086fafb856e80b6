"""Private selection: the best of a secret, random number of runs of one plan, for the price of one ledger entry.

The law of the winner must be that of `dpcore.accounting.selection`. So the number of runs K, their settings and a coin
for ties are drawn at once, independently of the data, and are on disk, sealed, before the ledger pays; it pays before
the first run. A process that is killed goes on with what was sealed. The ledger has the winner's digest: of two copies
of a folder one has a winner.

A run that raises, exits, is killed or has no finite score is the worst result, below all others. It is never made
again: a result that comes with probability s on one data set and s' on the other, made until it comes, has its law
divided by s or by s', which no bound on the run's own law covers. As the worst result, failure is a part of the run's
result, and the theorem holds for the law with it, as long as failure depends on what the run releases and on things
outside of the data. If the best of K is a failure, or K is 0, nothing is released: one answer for both.

Of the other runs nothing is kept: not the results, scores or errors, nor what they print. Time is not hidden: whoever
sees how long a selection takes can guess K, and with it more than the epsilon covers.
"""

import math
import os
import secrets
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from dpcore.accounting import Event, PrivateSelection
from dpcore.accounting.run_law import runs_at
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, OverlapError, PrivacyError
from dpcore.ledger import Ledger
from dpcore.spec import validate
from dpcore.spec.canonical import canonical_json, digest, plain, read_json_file
from dpcore.spec.lock import locked
from dpcore.spec.whole_file import whole_file
from dpcore.statement.build import of_selection
from dpcore.statement.statement import Statement

__all__ = ["Choice", "LogUniform", "Outcome", "Winner", "rehearse", "select"]

TIMING: Final = (
    "The number of runs is secret. Whoever sees how long the selection took, or what load it made, may guess it; this "
    "epsilon does not cover that."
)
_MOST_RUNS: Final = 500.0


@dataclass(frozen=True)
class LogUniform:
    """A rate between two positive bounds, its logarithm uniform."""

    low: float
    high: float

    def __post_init__(self) -> None:
        low, high = validate.positive(low=self.low), validate.positive(high=self.high)
        if not low < high:
            raise ArgumentError(f"high={high!r}: must be more than low={low!r}; one point needs no selection")

    def draw(self) -> float:
        """Return a value, by the operating system's randomness."""
        share = (secrets.randbits(53) + 0.5) / 2.0**53
        value = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """One of several JSON values, each as likely as the others."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.values, (list, tuple)):
            raise ArgumentTypeError(f"values={self.values!r}: must be a list or a tuple of values to choose from")
        if not self.values:
            raise ArgumentError("values=(): must have at least one value to choose from")
        object.__setattr__(self, "values", tuple(plain(list(self.values))))

    def draw(self) -> Any:
        """Return a value, by the operating system's randomness."""
        return secrets.choice(self.values)


Space = Mapping[str, LogUniform | Choice]


class Outcome(NamedTuple):
    """What a run hands to the selection.

    `score`: larger is better; computed from `result` and public data, or a release that `event` has. `result`: what is
    released if this run wins. `event`: that of the run's plan, `private.plan.event`.
    """

    score: float
    result: bytes
    event: Event


class Winner(NamedTuple):
    """What a selection releases: the winner's settings, score and result, or None for all three if no run succeeded.

    `event` is that of the whole selection, and `remark` says what it does not cover. `paid` is the id of the ledger's
    entry.
    """

    settings: dict[str, Any] | None
    score: float | None
    result: bytes | None
    event: PrivateSelection
    remark: str
    paid: str

    def statement(self, run: Statement, ledger: Ledger) -> Statement:
        """Return the privacy statement of the selection, from that of the winning run.

        Parameters
        ----------
        run : Statement
            Let a run's result have it, as JSON.
        ledger : Ledger
            The one that paid.

        Raises
        ------
        PrivacyError
            If it is the statement of a run with another event.
        """
        if Event.from_dict(run.event_planned) != self.event.run:
            raise PrivacyError("run: must be the statement of the winning run; its event is another one")
        law = self.event.expected_runs, self.event.shape
        stated = of_selection(run, law, ledger.describe(self.paid, run.delta))
        return replace(stated, date=datetime.now(UTC).date().isoformat())  # the run's day would say which it was


def rehearse(run: Callable[[dict[str, Any]], Outcome], space: Space, event: Event) -> Outcome:
    """Make one run with settings drawn from the space, and show its errors, which `select` never does.

    Nothing is sealed, paid or private here: let `run` train on made-up data, and evaluate on the data of the selection.

    Raises
    ------
    ArgumentError
        If the run has no finite score.
    PrivacyError
        If its event is not `event`.
    """
    _described(space)
    outcome = validate.function(run=run)({key: values.draw() for key, values in space.items()})
    if not isinstance(outcome, Outcome):
        raise ArgumentTypeError(f"run: returned {type(outcome).__name__}; must return a dpcore.tuning.Outcome")
    _check_event(outcome, event)
    score = float(outcome.score)
    if not math.isfinite(score):
        raise ArgumentError(f"score={score!r}: must be finite; in a selection this run would be the worst")
    return outcome._replace(score=score, result=bytes(outcome.result))


def select(
    run: Callable[[dict[str, Any]], Outcome],
    space: Space,
    event: Event,
    *,
    folder: str | os.PathLike[str],
    ledger: Ledger,
    scored_on: str,
    expected_runs: float,
    shape: float | None = 1.0,
    name: str = "selection",
) -> Winner:
    """Make a secret number of runs and return the best.

    Parameters
    ----------
    run : callable
        From settings to an `Outcome`: one private run, without a ledger of its own. `rehearse` it on made-up data
        first: here no error of it is shown, and budget that was paid for failures is spent.
    space : mapping of str to LogUniform or Choice
        Each setting of a run is drawn by itself. No setting may change the event.
    event : Event
        Event of one run's whole plan. A run of another one ends the selection.
    folder : path
        Folder of the sealed draws and the best run so far: **secret** until the end, and only for its owner to read. If
        the same selection was interrupted there, it continues; if it ended, its winner is returned again.
    ledger : Ledger
        Pays for the selection before its first run, by one entry.
    scored_on : {"public", "private"}
        Whether scores come from held-out public data, or are private releases that `event` has.
    expected_runs, shape
        The law of the number of runs, as in `dpcore.accounting.PrivateSelection`; at most 500 runs are expected.
    name : str
        In the ledger.

    Returns
    -------
    Winner

    Raises
    ------
    BudgetError
        If the ledger does not afford the selection: no run was made.
    PrivacyError
        If a run's event is another one; if a copy of the folder has ended with another winner.
    OverlapError
        If `dpcore.torch.HeldOut` refused to score a run on data that it is trained on.
    ArgumentError
        If the space has one point or none, or scores come from training data; if the folder has another selection.

    Examples
    --------
    >>> def run(settings):
    ...     method = dp_sgd(lr=settings["lr"], noise_multiplier=2, batch_size=100)
    ...     private = make_private(model(), data, method, epochs=3)
    ...     for batch in private.loader:
    ...         private.step(batch)
    ...     return Outcome(accuracy_on_public_data(private.model), weights_as_bytes(private.model), private.plan.event)
    >>> select(run, {"lr": LogUniform(0.01, 10)}, plan.event, folder="selection", ledger=ledger,
    ...        scored_on="public", expected_runs=20).settings  # doctest: +SKIP
    """
    selection = PrivateSelection(event, expected_runs, shape)
    if expected_runs > _MOST_RUNS:
        raise ArgumentError(f"expected_runs={expected_runs!r}: must be at most {_MOST_RUNS:g} to be drawn")
    validate.function(run=run)
    if scored_on not in ("public", "private"):
        raise ArgumentError(
            f"scored_on={scored_on!r}: must be 'public', by held-out data that need no protection, or 'private', by a "
            "release that event has; a score of training data is neither"
        )
    terms = digest({"event": selection.to_dict(), "space": _described(space), "scored_on": scored_on})
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(place / "lock", f"folder={str(place)!r}: another process is using it; wait for its end"):
        state = _sealed(place / "selection.json", terms, space, selection)
        paid = _paid(ledger, selection, name, state["id"], scored_on)
        if "left" in state:
            _run_all(run, place / "selection.json", state, event)
        ledger.release_winner(state["id"], digest({"winner": state["best"]}))
    best, rest = state["best"], (selection, TIMING, paid)
    if best is None:
        return Winner(None, None, None, *rest)
    return Winner(best["settings"], best["score"], b64decode(best["result"]), *rest)


def _described(space: Space) -> dict[str, Any]:
    points = 1.0
    described: dict[str, Any] = {}
    for key, values in space.items():
        if not isinstance(values, (LogUniform, Choice)):
            raise ArgumentTypeError(f"space[{key!r}]={values!r}: must be a LogUniform or a Choice")
        different = {canonical_json(value) for value in values.values} if isinstance(values, Choice) else ()
        points *= len(different) if isinstance(values, Choice) else math.inf
        described[str(key)] = list(values.values) if isinstance(values, Choice) else [values.low, values.high, "log"]
    if points <= 1.0:
        raise ArgumentError(f"space={dict(space)!r}: must have at least two points; one run of a single one costs less")
    return described


def _sealed(path: Path, terms: str, space: Space, event: PrivateSelection) -> dict[str, Any]:
    """Return the state of the selection in a folder, drawn and on disk before this returns if there was none."""
    if not path.exists():
        runs = runs_at(event.shape, event.expected_runs, (secrets.randbits(53) + 0.5) / 2.0**53)
        left = [[{key: values.draw() for key, values in space.items()}, secrets.randbits(53)] for _ in range(runs)]
        state = {"id": secrets.token_hex(8), "terms": terms, "left": left, "best": None}
        _write(path, state)
        return state
    try:
        state = read_json_file(path)
        known = state["terms"]
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(f"folder={str(path.parent)!r}: its selection cannot be read; take an undamaged copy") from cause
    if known != terms:
        raise ArgumentError(
            f"folder={str(path.parent)!r}: has a selection of another event, space or law; one selection never "
            "continues another: name a folder of its own"
        )
    return dict(state)


def _paid(ledger: Ledger, event: PrivateSelection, name: str, identity: str, scored_on: str) -> str:
    """Return the id of the ledger's entry that pays for the whole selection, charged once, whatever it is named.

    A process killed right after the charge finds the entry again; another ledger than the one that paid pays, too.
    """
    description = {"selection": identity, "scored_on": scored_on}
    entries = (run.run_id for run in ledger.runs() if run.description == description and run.releases)
    return next(entries, "") or ledger.charge(event, name=f"{name} ({identity})", description=description)


def _run_all(run: Callable[[dict[str, Any]], Outcome], path: Path, state: dict[str, Any], event: Event) -> None:
    best = state["best"]
    while state["left"]:
        settings, coin = state["left"].pop(0)
        _write(path, state)  # from here on this run is made: if it dies, it was the worst
        outcome = _attempt(run, dict(settings))
        if outcome is not None:
            _check_event(outcome, event)
        if outcome is not None and (best is None or (outcome.score, coin) > (best["score"], best["coin"])):
            result = b64encode(outcome.result).decode()
            best = {"settings": settings, "score": outcome.score, "coin": coin, "result": result}
            state["best"] = best
    del state["left"]
    _write(path, state)


def _check_event(outcome: Outcome, event: Event) -> None:
    if outcome.event != event:
        raise PrivacyError("event: a run had another one than the selection; settings must not change the plan")


def _attempt(run: Callable[[dict[str, Any]], Outcome], settings: dict[str, Any]) -> Outcome | None:
    """Return what a run hands over; None if it fails, whatever it is that fails."""
    try:
        with _silent():
            outcome = run(settings)
        score = float(outcome.score)
        return outcome._replace(score=score, result=bytes(outcome.result)) if math.isfinite(score) else None
    except OverlapError:  # a fact of the program, not of the values in its data: shown, as a wrong event is
        raise
    except (Exception, SystemExit):  # noqa: BLE001 (which error it was tells of a run that lost)
        return None


@contextmanager
def _silent() -> Iterator[None]:
    """Send what the process prints in the block to nowhere: which lines, and how many, tell of runs that lost."""
    streams = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.flush()
    kept, nowhere = [os.dup(1), os.dup(2)], os.open(os.devnull, os.O_WRONLY)
    former = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as sink:
        try:
            sys.stdout = sys.stderr = sink
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            yield
        finally:
            sys.stdout, sys.stderr = former
            for target, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, target)
            for descriptor in (*kept, nowhere):
                os.close(descriptor)


def _write(path: Path, state: Mapping[str, Any]) -> None:
    with whole_file(path, secret=True) as file:
        file.write(canonical_json(state).encode())
