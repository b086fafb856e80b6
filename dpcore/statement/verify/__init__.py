"""Checks a privacy statement: all that it says is derived again from its settings, and every epsilon from its events.

A statement that passes is consistent: the sampler, clip and noise that it describes have the events that it states, and
those have the epsilons that it states. No computation can show that the run took place as described, with keys that
stayed secret; points taken on trust are listed as such.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dpcore.accounting import Adjacency, Event, Gaussian, MatrixGaussian, NonPrivate, PrivateSelection
from dpcore.accounting.phases import parts_of, phases
from dpcore.errors import DataError, DpcoreError
from dpcore.plan.plan import Plan
from dpcore.sampling import FixedBatches
from dpcore.spec.canonical import read_json
from dpcore.spec.keys import CALLER, EXACT, OPERATING_SYSTEM, Provenance
from dpcore.spec.stream import RNGS
from dpcore.spec.version import __version__
from dpcore.statement.assumptions import OWN_SAMPLER
from dpcore.statement.build import NO_KEY, ROUTES, of_selection, state
from dpcore.statement.statement import Statement
from dpcore.statement.text import WRITTEN_BEFORE, counted, format_delta, format_epsilon, format_lower
from dpcore.statement.verify.finding import FAILED, OK, REMARK, SAME, TRUSTED, Finding, difference, is_digest, same
from dpcore.statement.verify.rebuild import DigestPlan, StatedEvents, is_plain, rebuilt

__all__ = ["FREE_TEXT", "Finding", "holds", "verify"]

FREE_TEXT = (
    "note, date, software, ledger, and caveats beyond those that the settings need, which are counted",
    "the name of the method, and all of it that works on released vectors: query, filter, update, schedule, ...",
    "randomness.key and randomness.rng among known names; the digest of the noise's layout",
    "a fixed order's shuffle and drop_last, and its counts, if no event depends on them",
    "which rows the abandoned branches have, if no event depends on it",
    "how often an example takes part under lists of batches and samplers of the caller's own: reported as trusted",
    "how far a matrix known by a digest moves it, within bounds, and what unknown stages do: reported as trusted",
)
"""Fields that only the statement's hash covers. Whoever changes a statement on purpose can renew the hash."""

# Accountants are deterministic; two machines differ by the rounding of sums, transforms and root-finding.
ROUNDING = 1e-6
# Fields of a method that affect only released vectors.
_FREE = ("name", "filter", "schedule", "averaging", "galore", "radius")
# Including errors of numerical routines at numbers that no run has: no convergence, too large an array.
_WRONG = (DpcoreError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError,
          RuntimeError, MemoryError)  # fmt: skip


def verify(statement: Statement | Mapping[str, Any] | str) -> list[Finding]:
    """Check a statement; return one finding or more for each check, in a fixed order.

    Parameters
    ----------
    statement : Statement, mapping or str
        A statement, its `Statement.to_dict`, or JSON. Its content leads to findings, never to an exception.
    """
    try:
        content = read_json(statement) if isinstance(statement, str) else statement
        raw = content.to_dict() if isinstance(content, Statement) else content
        read = Statement.unchecked(raw)
        findings = [Finding("form", OK, f"format {raw['format']}")]
        for name, subject in (("settings_hash", "the settings were"), ("statement_hash", "something was")):
            label, derived = name.replace("_", " "), getattr(read, name)
            words = f"{subject} changed after the statement was written"
            same_hash = raw[name] == derived
            findings.append(Finding(label, OK, derived[:16] + "...") if same_hash else Finding(label, FAILED, words))
        trusted, problem = list(_trusted(read)), too_much(read)
    except RecursionError:
        return [Finding("form", FAILED, "is nested too deeply")]
    except _WRONG as cause:
        return [Finding("form", FAILED, _words(cause))]
    if problem is not None:
        return [*findings, Finding("size", FAILED, f"cannot be checked: {problem}"), *trusted]
    if raw["delta_is_below_1/n"] is not read.delta_is_small:
        findings.append(Finding("delta", FAILED, "delta_is_below_1/n contradicts delta and n"))
    # Overflows at numbers that no run has show in the results.
    with np.errstate(all="ignore"):
        try:
            plan, stand_ins = rebuilt(_of_one_run(read))
            findings += stand_ins
            findings += _compared(read, plan)
        except _WRONG as cause:
            findings.append(Finding("plan", FAILED, _words(cause)))
    findings += _ledger_total(read)
    return [*findings, *trusted]


def holds(findings: Iterable[Finding]) -> bool:
    """Whether no check failed."""
    return all(finding.status != FAILED for finding in findings)


def _trusted(statement: Statement) -> Iterable[Finding]:
    words = f"that these {statement.steps_taken:,} steps were taken, as described"
    if statement.steps_abandoned or statement.randomness.get("forks"):
        words += f", and {statement.steps_abandoned:,} others on the branches that it left"
    yield Finding("the run itself", TRUSTED, words)
    yield Finding("the keys", TRUSTED, "that they are secret, and used for this run only")
    if statement.ledger:
        yield Finding(
            "ledger", TRUSTED, f"{statement.ledger.get('ledger', '')}: compare with dpcore verify --ledger FILE"
        )
    if statement.note or statement.date:
        yield Finding("note and date", TRUSTED, "free text")


def _words(cause: BaseException) -> str:
    if isinstance(cause, KeyError):
        return f"{cause.args[0]!r} is missing"
    return " ".join(str(cause).split())[:300] or type(cause).__name__


def _ledger_total(statement: Statement) -> Iterator[Finding]:
    """Check the ledger's total: it covers this run and others, so none of its figures may be below this run's epsilon.

    A statement that counts steps which were not taken is exempt: the total has only what was released.
    """
    if "total" not in statement.ledger:  # `minimize` states none
        return
    name, own = "ledger's total", statement.best_epsilon
    try:
        total = statement.ledger["total"]
        figures = [float(total[key]) for key in ("epsilon", "epsilon_if_fixed_beforehand")]
        same_delta = float(total["delta"]) == statement.delta
    except (LookupError, TypeError, ValueError) as cause:
        yield Finding(name, FAILED, f"cannot be read ({type(cause).__name__})")
        return
    if not same_delta:
        yield Finding(name, FAILED, f"is stated at delta = {total['delta']}, and the run at {statement.delta}")
    elif all(figure >= own * (1 - ROUNDING) for figure in figures):
        yield Finding(name, OK, f"epsilon = {format_epsilon(min(figures))}, not below that of this run")
    elif statement.note.startswith(WRITTEN_BEFORE) or statement.steps_counted > statement.steps_taken:
        yield Finding(name, TRUSTED, "is without some of the steps that are counted here")
    else:
        words = (
            f"epsilon = {min(figures):.4g} for all runs is below epsilon = {own:.4g} of this one, which is one of them"
        )
        yield Finding(name, FAILED, words)


def _selection(statement: Statement) -> PrivateSelection | None:
    """Return the event of a statement if it is a selection's."""
    event = Event.from_dict(statement.event)
    return event if isinstance(event, PrivateSelection) else None


def _of_one_run(statement: Statement) -> Statement:
    """Return the statement with the events of a run: that of a selection has those of the selection."""
    if (selection := _selection(statement)) is None:
        return statement
    if statement.steps_abandoned:
        raise DataError("no run of a selection abandons steps")
    run = selection.run.to_dict()
    return replace(statement, event=run, event_planned=run)


def _compared(statement: Statement, plan: Plan) -> Iterator[Finding]:
    """State the rebuilt plan again, and compare field by field."""
    yield from _randomness(statement)
    said, coordinates = statement.randomness, statement.noise.get("grid", {}).get("coordinates")
    derived = state(
        plan,
        statement.delta,
        steps_taken=statement.steps_taken,
        abandoned=statement.rows_abandoned or statement.steps_abandoned,
        stopped_by_results=statement.steps_counted > statement.steps_taken,  # or both events are one
        keys=Provenance(OPERATING_SYSTEM if said["key"] == NO_KEY else said["key"], said["forks"]),
        backend="",
        rng=said["rng"],
        caller_noise=said["key"] == NO_KEY,
        ledger=statement.ledger,
        dimension=coordinates if type(coordinates) is int and 0 < coordinates < 2**53 else None,
    )
    if (selection := _selection(statement)) is not None:
        derived = of_selection(derived, (selection.expected_runs, selection.shape), statement.ledger)
    yield _field("unit", statement.unit, derived.unit, f"one {statement.unit}")
    yield from _sampler(statement, derived, plan)
    free = {name: statement.method[name] for name in _FREE if name in statement.method}
    yield _field("method", statement.method, derived.method | free, "all its stages are stated")
    clip, noise = statement.clip, dict(statement.noise)
    if "grid" in derived.noise:
        yield Finding("coordinates", TRUSTED, f"{coordinates:,}: how many numbers a release has")
    most = format_epsilon(float(clip["sensitivity"]), 6)
    words = f"{clip.get('rule', clip.get('kind'))}, {counted(len(clip['group_norms']), 'group')}"
    words = f"{words}, one {statement.unit} moves the sum by at most {most}"
    yield _field("clip", clip, derived.clip, words)
    if "layout_sha256" in noise:
        text = str(noise.pop("layout_sha256"))
        words = "a digest of names and shapes of the tensors" if is_digest(text) else f"{text!r} is no SHA-256"
        yield Finding("layout of the noise", TRUSTED if is_digest(text) else FAILED, words)
    words = (
        f"standard deviation {plan.noise_standard_deviation():.6g} = multiplier {plan.gradient_noise_multiplier:.6g}"
    )
    yield _field("noise", noise, derived.noise, f"{words} x sensitivity {plan.sensitivity_at().contribution:.6g}")
    yield from _assumptions(statement, derived)
    if (n := statement.dataset_size) is None:
        yield Finding("delta", TRUSTED, "the number of examples is not stated")
    elif statement.delta_is_small:
        yield Finding("delta", OK, f"{statement.delta:g} is below 1/n = {1 / n:.3g}")
    else:
        words = f"{statement.delta:g} is not below 1/n = {1 / n:.3g}: it allows an example to be published outright"
        yield Finding("delta", REMARK, words)
    if statement.floats_matter:
        words = f"on floats {format_delta(statement.delta_on_floats)}: the law distance is not small at this epsilon"
        yield Finding("delta", REMARK, words)
    yield from _events(statement, derived, plan)
    yield from _spent(statement, derived)


def _field(check: str, stated: Any, derived: Any, words: str, tolerance: float = SAME) -> Finding:
    problem = difference(stated, derived, tolerance, "" if isinstance(stated, dict) else check)
    return Finding(check, OK, words) if problem is None else Finding(check, FAILED, problem)


def _randomness(statement: Statement) -> Iterator[Finding]:
    """Generator and origin of the keys, as far as they contradict each other."""
    said = statement.randomness
    derived = {name: said[name] for name in ("rng", "key", "forks")}
    derived["cryptographic"] = said["rng"] == "chacha20" and said["key"] != NO_KEY
    words = f"{said['rng']}, key: {said['key']}, {counted(said['forks'], 'fork')}"
    yield _field("randomness", said, derived, words)
    problems = {
        ("key", "origin of keys"): said["key"] not in (OPERATING_SYSTEM, CALLER, EXACT, NO_KEY),
        ("rng", "generator"): said["rng"] not in RNGS,
        ("forks", "count"): type(said["forks"]) is not int or said["forks"] < 0,
    }
    for (name, kind), wrong in problems.items():
        if wrong:
            yield Finding("randomness", FAILED, f"{name}: {said[name]!r} is no {kind}")
    # Only a ledger knows of branches that other processes made.
    if statement.steps_abandoned and not said["forks"] and not statement.ledger:
        words = f"forks: 0, and {counted(statement.steps_abandoned, 'step')} of branches that it left are counted"
        yield Finding("randomness", FAILED, words)


def _sampler(statement: Statement, derived: Statement, plan: Plan) -> Iterator[Finding]:
    kind = statement.sampler.get("sampler", "no name")
    yield _field("sampler", statement.sampler, derived.sampler, f"{kind}, n = {statement.dataset_size}")
    if not isinstance(plan, StatedEvents):
        return
    yield Finding("sampler", TRUSTED, f"{kind}: the description does not contain all that it does")
    begin, end = OWN_SAMPLER
    if kind != FixedBatches.kind and not any(
        said.startswith(begin) and said.endswith(end) for said in statement.caveats
    ):
        yield Finding("sampler", FAILED, f"{kind} is none of the library's, and no sentence says whose it is")


def _assumptions(statement: Statement, derived: Statement) -> Iterator[Finding]:
    """Every sentence that must be there is there."""
    # Whose a sampler is, is compared with the sampler: the one that is rebuilt is never the caller's.
    needed = [sentence for sentence in derived.caveats if not sentence.endswith(OWN_SAMPLER[1])]
    stated = set(statement.caveats)
    missing = [sentence for sentence in needed if sentence not in stated]
    if missing:
        yield Finding("assumptions", FAILED, f"lacks: {missing[0]}")
    else:
        yield Finding("assumptions", OK, f"all {len(needed)} sentences that these settings need")
    further = len(stated - set(needed))
    if further:
        yield Finding("assumptions", TRUSTED, f"{counted(further, 'further sentence')}, which no setting requires")


def _events(statement: Statement, derived: Statement, plan: Plan) -> Iterator[Finding]:
    """Both events follow from sampler, noise and steps; those that cannot are compared by their parts."""
    abandoned = statement.steps_abandoned
    for name, steps in (("event", statement.steps_counted), ("event_planned", statement.steps_planned)):
        label, stated, follows = name.replace("_", " "), getattr(statement, name), getattr(derived, name)
        words = f"{stated.get('event')}, {steps:,} steps" + (f" and {abandoned:,} abandoned" if abandoned else "")
        finding = _field(label, stated, follows, words)
        of_run = stated.get("run", stated)  # of a selection
        forced = follows.get("run", follows)["event"] == NonPrivate.__name__
        if finding.status == FAILED or forced or not isinstance(plan, (StatedEvents, DigestPlan)):
            yield finding
        elif isinstance(plan, StatedEvents):
            yield _by_parts(label, Event.from_dict(of_run), statement, steps)
        else:
            yield Finding(label, TRUSTED, f"{words}; all follows but the sensitivity of its matrix")
    yield _field("adjacency", statement.adjacency, derived.adjacency, statement.adjacency)


def _spent(statement: Statement, derived: Statement) -> Iterator[Finding]:
    """Yield findings on every epsilon: it must follow from the event and not be smaller."""
    for name in ("epsilon", "epsilon_planned"):
        label, follows = name.replace("_", " "), getattr(derived, name)
        for accountant, value in getattr(statement, name).items():
            if accountant in follows:
                yield upper_bound(f"{label} ({accountant})", value, follows[accountant], statement)
            else:
                words = f"cannot be recomputed: the event is covered by {', '.join(follows)}"
                yield Finding(f"{label} ({accountant})", FAILED, words)
        unused = sorted(follows.keys() - getattr(statement, name).keys())
        if unused:
            covered = "planned event" if name == "epsilon_planned" else "event"
            yield Finding("accountants", REMARK, f"{', '.join(unused)} would also cover the {covered}")
    interval, words = derived.epsilon_interval, "none is known"
    if interval:
        words = f"epsilon is in [{format_lower(interval['lower'], 6)}, {format_epsilon(interval['upper'], 6)}]"
    yield _field("certified interval", statement.epsilon_interval, interval, words, ROUNDING)
    words = "not known for this event"
    if derived.attacker:
        words = f"advantage at most {format_epsilon(derived.attacker['advantage'])}"
    yield _field("attacker", statement.attacker, derived.attacker, words, ROUNDING)
    routes = {name: ROUTES[name] for name in statement.epsilon if name in ROUTES}
    yield _field("derivation", statement.derivation, routes, "one sentence for each accountant")


def upper_bound(label: str, stated: float, derived: float, statement: Statement) -> Finding:
    """Return the finding on an epsilon: it is the one that follows, and never less."""
    if same(stated, derived, ROUNDING):
        return Finding(label, OK, format_epsilon(derived))
    said = f"is stated as {format_epsilon(stated)} and follows as {format_epsilon(derived)}"
    if stated < derived or math.isnan(stated):
        return Finding(label, FAILED, f"{said}: too little")
    other_version = statement.software.get("dpcore") != __version__
    return Finding(label, REMARK if other_version else FAILED, f"{said}: more than follows")


# The sampler is known by name only: the caller's own, or fixed batches, known by a digest.
def _by_parts(label: str, event: Event, statement: Statement, steps: int) -> Finding:
    """Compare every part of an event with the settings; an example's number of participations remains trusted."""
    parts = [(part, times) for part, times in parts_of(event) if times]
    if steps and not parts:
        return Finding(label, FAILED, f"releases nothing, and {steps:,} steps were taken or planned")
    problems = [_common(part, statement) for part, _ in parts] + [_steps(parts, statement, steps)]
    problem = next((problem for problem in problems if problem is not None), None)
    if problem is not None:
        return Finding(label, FAILED, problem)
    return Finding(label, TRUSTED, f"with noise and steps as stated, that the event is: {_briefly(parts)}")


def _common(part: Event, statement: Statement) -> str | None:
    sigma, sampler = statement.noise["noise_multiplier"], statement.sampler
    # Under replacement an example moves a sum twice as far, and multipliers are relative to that.
    expected = sigma / 2 if part.adjacency is Adjacency.REPLACE_ONE else sigma
    if not same(getattr(part, "noise_multiplier", expected), expected):
        return f"has another noise multiplier than the noise, {sigma!r}"
    for name in ("dataset_size", "sample_rate", "max_batch_size"):  # whatever else the sampler does
        if name in sampler and not same(getattr(part, name, sampler[name]), sampler[name]):
            return f"has another {name} than the sampler, {sampler[name]!r}"
    if sampler.get("sampler") != FixedBatches.kind or isinstance(part, NonPrivate):
        return None
    if not isinstance(part, (Gaussian, MatrixGaussian)):
        return f"is sampled, {type(part).__name__}, and a list of batches is not"
    return None if part.adjacency == statement.adjacency else f"is of another adjacency, {part.adjacency}, in part"


def _steps(parts: list[tuple[Event, int]], statement: Statement, steps: int) -> str | None:
    """Return a problem with the parts' numbers of steps, or with how often or how far an example moves them."""
    if not parts:
        return None
    first, times = parts[0]
    most = steps + statement.steps_abandoned  # if every step draws again, abandoned ones are steps like the others
    if isinstance(first, MatrixGaussian):  # the other is that of the branches
        parts, most = parts[:1], steps
    counted = sum(part.steps * count for part, count in parts if hasattr(part, "steps"))
    uncounted = any(not hasattr(part, "steps") for part, _ in parts)
    if counted not in (steps, most) and not (uncounted and counted <= most):
        return f"has {counted!r} steps, and {steps!r} were taken or planned"
    if isinstance(first, MatrixGaussian):
        whole = statement.noise["sensitivity_of_run"]
        least = whole * (1 - SAME) if steps == statement.steps_planned else 0.0
        if not least <= first.sensitivity <= whole * (1 + SAME):
            return f"has the sensitivity {first.sensitivity!r}, and that of the whole run is {whole!r}"
    if isinstance(first, Gaussian) and statement.sampler.get("sampler") == FixedBatches.kind:
        # An example of a batch that is not empty takes part once in every cycle, and once in a step at most.
        possible = steps // statement.sampler["steps_per_epoch"] <= first.count * times <= steps
        often = "once" if first.count * times == 1 else f"{first.count * times} times"
        return None if possible else f"counts an example {often} in {steps:,} steps"
    return None


def _briefly(parts: list[tuple[Event, int]]) -> str:
    if not parts:
        return "nothing"
    said = parts[0][0].to_dict()
    words = ", ".join(f"{name} {said[name]}" for name in ("sample_rate", "count", "sensitivity") if name in said)
    return f"{said['event']}({words})" + (f" and {len(parts) - 1:,} more" if parts[1:] else "")


# Limits on the work of checking a statement: a forged one could make it endless. Counted are the rows of a strategy,
# the branches that a run left, and the parts of an event. Below the limits a check took under two minutes and 3 GB on
# one core.


OPERATIONS: Final = 1e11
ENTRIES: Final = 1.5e8
"""Numbers in float64 arrays in memory at once."""
PARTS: Final = 50_000
"""Of an event, and branches that count one by one."""
SAMPLED: Final = 8
"""Different kinds of sampled steps in one event; the library's own samplers make one."""

_CHUNK = 256  # columns of a strategy at once


def too_much(statement: Statement) -> str | None:
    """Return a sentence on a number beyond its limit; None if the statement can be checked."""
    strategy = statement.noise.get("strategy")
    if strategy is not None:
        apart = len(statement.rows_abandoned) or statement.steps_abandoned
        if apart > PARTS:
            return f"{apart:,} abandoned branches, at most {PARTS:,} are checked"
        work, entries = _of_strategy(statement, strategy)
        if (work > OPERATIONS or entries > ENTRIES) and not _is_short(statement, strategy):
            return (
                f"the strategy of {_rows(statement, strategy):,} rows would take {work:.0e} operations on "
                f"{entries:.0e} numbers, at most {OPERATIONS:.0e} on {ENTRIES:.0e} are spent"
            )
    for described in (statement.event, statement.event_planned):
        count = sum(1 for _ in _nodes(described))
        if count > PARTS:
            return f"an event of {count:,} parts, at most {PARTS:,} are checked"
        event = Event.from_dict(described)
        parts = phases(event.run if isinstance(event, PrivateSelection) else event)
        if parts is not None and len(parts.steps) > SAMPLED:
            return f"an event of {len(parts.steps):,} different sampled steps, at most {SAMPLED} are checked"
    return None


def _rows(statement: Statement, strategy: dict[str, Any]) -> int:
    return max(statement.steps_planned, int(strategy.get("steps") or 0))


def _of_strategy(statement: Statement, strategy: dict[str, Any]) -> tuple[float, float]:
    """Return about how many operations, and how many numbers at once, its sensitivity takes."""
    sampler = statement.sampler.get("sampler")
    rows, kind = float(min(_rows(statement, strategy), 10**15)), strategy.get("kind")
    width = max([len(value) for value in strategy.values() if isinstance(value, list)], default=1)
    work, entries = rows * (40 * rows + width**2), rows * _CHUNK  # every column once, made and added up
    if kind == "banded-toeplitz" and width < _CHUNK and sampler in ("fixed order", "shuffled"):
        work, entries = rows * (1e4 + width**2), rows * width  # from the bands themselves
    if kind == "tree-optimal":
        work, entries = work + rows**3 / 3, entries + 4 * rows**2
    epoch = max(int(statement.sampler.get("steps_per_epoch") or 1), 1)
    if sampler in ("shuffled", "random allocation") and kind != "identity":
        work, entries = work + rows**3 / 3, entries + 3 * rows * min(rows, epoch)
    elif kind in ("blt", "banded-inverse-toeplitz") or width >= _CHUNK:
        met = math.ceil(rows / epoch)  # entries of C may be negative: all products of the columns of a pattern
        work, entries = work + rows * met**2, entries + rows * met
    return work, entries


def _is_short(statement: Statement, strategy: dict[str, Any]) -> bool:
    """Whether the sensitivity follows from the first column of the matrix, in about rows^2 operations."""
    rows = _rows(statement, strategy)
    all_rows = not any(first for first, _ in statement.rows_abandoned)
    return all_rows and 40 * rows**2 <= OPERATIONS and is_plain(strategy, rows)


def _nodes(event: Any) -> Iterator[Any]:
    stack = [event]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            yield item
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
