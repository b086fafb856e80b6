"""Checks of what was spent: the events from the settings, and every epsilon from the events."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dpcore import accounting
from dpcore.accounting import Event
from dpcore.plan.plan import Plan
from dpcore.spec.version import __version__
from dpcore.statement.build import CALLER_NOISE, NO_KEY, not_cryptographic
from dpcore.statement.guarantee import ROUTES, attacker, epsilon_interval, epsilons
from dpcore.statement.statement import Statement
from dpcore.statement.text import format_epsilon, format_lower
from dpcore.statement.verify.finding import FAILED, OK, REMARK, TRUSTED, Finding, difference, same
from dpcore.statement.verify.parts import by_parts
from dpcore.statement.verify.rederive import DigestPlan

# Accountants are deterministic; two machines differ by the rounding of sums, transforms and root-finding.
ROUNDING = 1e-6


def check_events(statement: Statement, plan: Plan | None) -> Iterator[Finding]:
    """Both events follow from sampler, noise and steps."""
    abandoned, left = statement.steps_abandoned, statement.rows_abandoned or statement.steps_abandoned
    for name, steps in (("event", statement.steps_taken), ("event_planned", statement.steps_planned)):
        stated = getattr(statement, name)
        words = f"{stated.get('event')}, {steps:,} steps" + (f" and {abandoned:,} abandoned" if abandoned else "")
        label = name.replace("_", " ")
        forced = _forced(statement)
        if forced is None and plan is None:
            yield by_parts(label, Event.from_dict(stated), statement, steps)
            continue
        derived = forced if forced is not None or plan is None else plan.event_after(steps, left)
        assert derived is not None
        problem = difference(stated, derived.to_dict())
        if problem is None and isinstance(plan, DigestPlan):
            moved = f"{plan.moved[steps]:.6g}" if steps in plan.moved else "?"
            yield Finding(label, TRUSTED, f"{words}; all follows but the sensitivity {moved} of its matrix")
            continue
        yield Finding(label, OK if problem is None else FAILED, problem or words)
    adjacency = str(Event.from_dict(statement.event_planned).adjacency or "none")
    problem = difference(statement.adjacency, adjacency, where="adjacency")
    yield Finding("adjacency", OK if problem is None else FAILED, problem or adjacency)


def _forced(statement: Statement) -> Event | None:
    """The event of a run that is not private whatever its plan."""
    said = statement.randomness
    if said["rng"] != "chacha20":
        return not_cryptographic(said["rng"])
    return CALLER_NOISE if said["key"] == NO_KEY else None


def check_epsilons(statement: Statement) -> Iterator[Finding]:
    """Every epsilon follows from its event, and none is below what follows."""
    safe = statement.software.get("dpcore") != __version__
    for name, described in (("epsilon", statement.event), ("epsilon_planned", statement.event_planned)):
        event, stated = Event.from_dict(described), getattr(statement, name)
        derived = epsilons(event, statement.delta)
        for accountant, value in stated.items():
            label = f"{name.replace('_', ' ')} ({accountant})"
            if accountant not in derived:
                covering = ", ".join(derived)
                yield Finding(label, FAILED, f"cannot be recomputed: the event is covered by {covering}")
            else:
                yield _upper_bound(label, value, derived[accountant], safe)
    event = Event.from_dict(statement.event)
    interval = epsilon_interval(event, statement.delta)
    problem = difference(statement.epsilon_interval, interval, ROUNDING)
    words = "none is known"
    if interval:
        ends = format_lower(interval["lower"], 6), format_epsilon(interval["upper"], 6)
        words = f"epsilon lies in [{ends[0]}, {ends[1]}]"
    yield Finding("certified interval", OK if problem is None else FAILED, problem or words)


def check_attacker(statement: Statement) -> Iterator[Finding]:
    """What is left to an attacker, recomputed from the event."""
    derived = attacker(Event.from_dict(statement.event))
    problem = difference(statement.attacker, derived, ROUNDING)
    words = f"advantage at most {format_epsilon(derived['advantage'])}" if derived else "not known for this event"
    yield Finding("attacker", OK if problem is None else FAILED, problem or words)


def check_derivation(statement: Statement) -> Iterator[Finding]:
    """The sentence of each accountant is the one that this version has."""
    derived = {name: ROUTES[name] for name in statement.epsilon if name in ROUTES}
    problem = difference(statement.derivation, derived)
    yield Finding("derivation", OK if problem is None else FAILED, problem or "one sentence for each accountant")


def check_coverage(statement: Statement) -> Iterator[Finding]:
    """Remark on accountants that would state less."""
    for name, event in (("epsilon", statement.event), ("epsilon_planned", statement.event_planned)):
        known = set(accounting.accountants_for(Event.from_dict(event)))
        unused = sorted(known - set(getattr(statement, name)))
        if unused:
            what = "planned event" if name == "epsilon_planned" else "event"
            yield Finding("accountants", REMARK, f"{', '.join(unused)} would also cover the {what}")


def _upper_bound(label: str, stated: float, derived: float, safe: bool) -> Finding:
    if same(stated, derived, ROUNDING):
        return Finding(label, OK, format_epsilon(derived))
    said = f"is stated as {format_epsilon(stated)} and follows as {format_epsilon(derived)}"
    if stated < derived or math.isnan(stated):
        return Finding(label, FAILED, f"{said}: too little")
    return Finding(label, REMARK if safe else FAILED, f"{said}: more than follows")
