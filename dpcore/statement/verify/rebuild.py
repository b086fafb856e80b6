"""Rebuilds the plan of a run from its statement.

Sampler, clip, noise, strategy, update and the query's scale are rebuilt from their descriptions. Everything else works
on released vectors, and no field of a statement depends on it. Parts that a description does not contain get a stand-in
and are reported as trusted: a matrix known by a digest, the caller's own stages or sampler, a list of batches.
"""
# ruff: noqa: D102 (the protocols say what the members of stand-ins do)

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final

from dpcore import sampling
from dpcore.accounting import Adjacency, Event
from dpcore.accounting.branches import Rows
from dpcore.errors import DataError, DpcoreError
from dpcore.plan import scales
from dpcore.plan.plan import Plan
from dpcore.stages import updates
from dpcore.stages.clipping import AdaptiveClip, Clip, Grouping, Sensitivity
from dpcore.stages.method import Method
from dpcore.stages.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.stages.queries import Plain, Preconditioned, Query
from dpcore.stages.strategies import BLT, BandedInverseToeplitz, BandedToeplitz, Identity, SquareRoot, Tree, TreeOptimal
from dpcore.stages.strategies.sensitivity import plain_column
from dpcore.stages.updates import SECOND_MOMENTS
from dpcore.statement.assumptions import SECRET_BATCHES
from dpcore.statement.statement import Statement
from dpcore.statement.verify.finding import FAILED, SAME, TRUSTED, Finding, is_digest

_MADE_OF_SETTINGS: Final = (Tree, TreeOptimal, SquareRoot, BandedToeplitz, BandedInverseToeplitz, BLT)
_STRATEGIES: Final[Any] = {"identity": Identity, **{strategy.kind: strategy for strategy in _MADE_OF_SETTINGS}}
_UPDATES: Final = {name: getattr(updates, name) for name in ("SGD", "Momentum", "Adam", "AdamW", "AdaGrad",
    "Accelerated")}  # fmt: skip


def rebuilt(statement: Statement) -> tuple[Plan, list[Finding]]:
    """Return a plan with the expected statement, and the findings taken on trust; DataError if there is none."""
    method, findings = statement.method, list[Finding]()
    try:
        sampler: Any = sampling.from_description(statement.sampler)
        plan: type[Plan] = Plan
        more: dict[str, Any] = {}
        update = _update(method["update"], findings)
        known = sampler is not None
        if not known:
            plan, more = StatedEvents, {"stated": statement}
            sampler = StatedSampler(statement, _largest_batch(statement, update, findings))
        _check_digests(statement.sampler, findings)
        noise, described = _noise(statement, findings), method["noise"].get("strategy")
        if known and described is not None and described["kind"] not in _STRATEGIES:
            wide = min(int(described.get("bands", 2)), sampler.amplified_bands or 2, statement.steps_planned)
            plan, more = DigestPlan, {"sensitivities": _stated_sensitivities(statement), "wide": wide}
            others = statement.event.get("events", ())[1:]
            more["left"] = float(others[0].get("sensitivity", 0.0)) if others else 0.0
        clip, tensors = _clip(statement, findings)
        if method["batch_size"] is None:
            raise DataError("the method does not state the divisor of its averages")
        query: Query = saying(Plain, method["query"])
        if method["query"].get("kind") == Preconditioned.__name__:  # it scales as the described one does
            settings = {name: value for name, value in method["query"].items() if name != "kind"}
            query = Preconditioned(**{**settings, "query": saying(Plain, settings["query"])})
        made = Method(update=update, query=query, clip=clip, noise=noise, batch_size=method["batch_size"])
        return plan(made, sampler, statement.steps_planned, tensors, **more), findings
    except KeyError as cause:
        raise DataError(f"{cause.args[0]!r} is missing") from cause
    except (DpcoreError, TypeError) as cause:
        raise DataError(f"no such run is possible: {cause}") from cause


def _made(kinds: Mapping[str, Any], description: Mapping[str, Any]) -> Any:
    """Return the stage of a description; None if its kind is unknown."""
    kind = kinds.get(str(description.get("kind")))
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in description.items() if key != "kind"}
    return None if kind is None else kind(**settings)


def _update(description: Mapping[str, Any], findings: list[Finding]) -> Any:
    if (made := _made(_UPDATES, description)) is not None:
        return made
    words = f"{description.get('kind')}: of an unknown kind; that it releases nothing unstated is its word"
    findings.append(Finding("update", TRUSTED, words))
    source = description.get("second_moment")
    known = source if source in SECOND_MOMENTS else "filtered"
    return saying(updates.Adam, description, lr=1.0, second_moment=known, allow_nonprivate=True)


def _clip(statement: Statement, findings: list[Finding]) -> tuple[Any, tuple[str, ...]]:
    """Return the clip, and names of tensors that fall into the stated groups."""
    said, clip = statement.method["clip"], statement.clip
    names = tuple(clip["group_norms"])
    if not names:
        raise DataError("the clip has no group, and whatever is trained is in one")
    if said.get("kind") != Clip.__name__:
        words = f"{said.get('kind')}: of an unknown kind; that an example moves the sum by at most "
        findings.append(Finding("clip", TRUSTED, f"{words}{clip['sensitivity']:.6g} is the caller's word"))
        norm = said.get("max_grad_norm", 1.0)
        moved = {norm: clip["sensitivity"]}
        if "scaled_sensitivity" in clip:
            moved = {clip["max_scaled_norm"]: clip["scaled_sensitivity"], **moved}
        return StatedClip(norm, said, clip["group_norms"], moved), names
    adaptive = said.get("adaptive")
    if adaptive is not None:
        adaptive = _made({AdaptiveClip.__name__: AdaptiveClip}, adaptive)
        if adaptive is None:
            raise DataError(f"the adaptive clip is of an unknown kind, {said['adaptive'].get('kind')!r}")
    return _made({Clip.__name__: GroupedClip}, {**said, "adaptive": adaptive}), names


def _noise(statement: Statement, findings: list[Finding]) -> Any:
    said = statement.method["noise"]
    sigma, described = said["noise_multiplier"], said.get("strategy")
    kind: Any = IndependentGaussian if described is None else CorrelatedGaussian
    rest: tuple[Any, ...] = ()
    if described is not None:
        strategy = _made(_STRATEGIES, described)
        if strategy is None:
            findings.append(Finding("strategy", TRUSTED, f"{described['kind']}: only a digest of its matrix is stated"))
            # Its settings are in the order of the name that the event gives it, whatever their order in the statement.
            name = ", " + str(_first(statement.event_planned).get("strategy", "")).partition("(")[2]
            ordered = sorted(described.items(), key=lambda item: name.find(f", {item[0]}="))
            strategy = saying(Identity, dict(ordered))
        rest = (strategy,)
    if said["kind"] == kind.__name__:
        return kind(sigma, *rest)
    findings.append(Finding("noise", TRUSTED, f"{said['kind']}: of an unknown kind, taken for Gaussian as stated"))
    return saying(kind, said, sigma, *rest)


def is_plain(described: dict[str, Any], rows: int) -> bool:
    """Whether a described strategy is a Toeplitz matrix without negative entries."""
    strategy = _made(_STRATEGIES, described)
    return strategy is not None and plain_column(strategy, rows) is not None


def _stated_sensitivities(statement: Statement) -> dict[int, float]:
    """Return how far an example moves C times the sums, as the events state it, within bounds."""
    known, described = statement.noise.get("sensitivity_of_run", 1.0), statement.noise["strategy"]
    taken, whole = (float(_first(e).get("sensitivity", known)) for e in (statement.event, statement.event_planned))
    if taken > whole * (1 + SAME):
        raise DataError(f"the sensitivity of the steps taken, {taken:.6g}, exceeds that of the whole run, {whole:.6g}")
    scaled = described.get("kind") in ("dense", "banded") and described["steps"] == statement.steps_planned
    if scaled and whole < 1 - SAME:
        raise DataError(
            f"the sensitivity of the run is stated as {whole:.6g}, and every column of the matrix is used: the largest "
            "has norm 1"
        )
    return {0: 0.0, statement.steps_taken: taken, statement.steps_planned: whole}


def _first(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run's own part of an event; the others are branches that it left."""
    first: Mapping[str, Any] = event["events"][0] if event.get("events") else event
    return first


def _check_digests(said: Mapping[str, Any], findings: list[Finding]) -> None:
    """Check the digests of users and batches, and the facts stated with them."""
    digests = [said[name] for name in ("users_sha256", "batches_sha256") if name in said]
    findings += [Finding("sampler", FAILED, f"{text!r} is no SHA-256") for text in digests if not is_digest(text)]
    if "users_sha256" not in said:
        if said.get("sampler") == sampling.FixedBatches.kind and "unit" in said:
            findings.append(Finding("users", FAILED, f"unit {said['unit']!r}: no digest says whose examples are whose"))
        return
    examples, most, users = said["examples"], said["max_examples_per_user"], said["dataset_size"]
    finding = Finding("users", FAILED, f"{examples!r} examples, at most {most!r} of each of {users}: impossible")
    if isinstance(examples, int) and examples >= users and isinstance(most, int) and most >= 1:
        finding = Finding("users", TRUSTED, f"{examples} examples of {users}: only a digest of whose is whose")
    findings.append(finding)


def _largest_batch(statement: Statement, update: Any, findings: list[Finding]) -> int | None:
    """Return B_max of a sampler that cannot be built: as it says, or as the noise on the square has it."""
    most: int | None = statement.sampler.get("max_batch_size")
    settings = statement.noise["noise_multiplier"], statement.clip["sensitivity"], statement.method["batch_size"]
    if update.second_moment == "independent" and most is None and settings[0] > 0:
        one, two = (scales.square_noise(update, *settings, B) for B in (1, 2))
        most = 1 + max(round((statement.noise["standard_deviation_on_square"] - one) / (two - one)), 0)
    if update.second_moment in ("independent", "joint") and most is not None:
        findings.append(Finding("noise", TRUSTED, f"that no batch has more than {most:,} examples"))
    return most


# Stand-ins for parts that a description does not contain: each describes itself, and acts, as the statement states.


def saying(kind: type, description: Mapping[str, Any], *settings: Any, **named: Any) -> Any:
    """Return a stage of that kind with a statement's description of it."""
    return type(kind.__name__, (kind,), {"describe": lambda self: dict(description)})(*settings, **named)  # noqa: ARG005


class GroupedClip(Clip):
    """The clip that is described, which takes the names of the groups for those of the tensors."""

    def grouping(self, tensors: tuple[str, ...]) -> Grouping:
        if isinstance(self.groups, Mapping):
            return Grouping(tuple(self.groups), ((),) * len(self.groups), tuple(map(float, self.groups.values())))
        return Grouping.of("flat" if self.groups == "flat" else "per_tensor", self.max_grad_norm, tensors)


GroupedClip.__name__ = Clip.__name__  # the kind under which it describes itself


@dataclass(frozen=True)
class StatedClip:
    """A clip of the caller's own: groups and sensitivities are its word."""

    max_grad_norm: float
    description: Mapping[str, Any]
    norms: Mapping[str, float]
    moved: Mapping[float, float]
    groups: ClassVar[str] = "flat"  # their origin does not matter here
    rule: ClassVar[str] = "as stated"

    def grouping(self, tensors: tuple[str, ...]) -> Grouping:
        return Grouping(tuple(self.norms), ((),) * len(self.norms), tuple(self.norms.values()))

    def sensitivity(self, grouping: Any) -> Sensitivity:
        return Sensitivity(self.moved[self.max_grad_norm])

    def describe(self) -> dict[str, Any]:
        return dict(self.description)


@dataclass(frozen=True)
class DigestPlan(Plan):
    """A plan under a matrix known by a digest only: how far it moves an example's sums is as stated.

    `sensitivities` are by number of steps; `left` is for the rows of the branches that were left; `wide` is its bands.
    """

    sensitivities: Mapping[int, float] = field(default_factory=dict)
    left: float = 0.0
    wide: int = 2

    def _reach(self, first: int, stop: int) -> float:
        return self.sensitivities[stop]

    def _reach_of(self, left: tuple[Rows, ...]) -> float:
        most = self.sensitivities[self.steps] * math.sqrt(len(left))
        if self.left > most * (1 + SAME):
            raise DataError(f"its branches move an example's sums by {self.left:.6g}, more than {most:.6g}")
        return self.left

    @cached_property
    def _banded(self) -> tuple[int, float]:
        return self.wide, self.sensitivities[self.steps]


@dataclass(frozen=True)
class StatedEvents(Plan):
    """A plan with a sampler that is known by name only: its events are as stated."""

    stated: Statement | None = None

    def _check_sampling(self) -> None:
        """Nothing is known of it."""

    def event_after(self, steps: int, abandoned: Sequence[Rows] | int = ()) -> Event:
        assert self.stated is not None
        taken = steps == self.stated.steps_taken
        return Event.from_dict(self.stated.event if taken else self.stated.event_planned)

    @property
    def run_sensitivity(self) -> float | None:
        assert self.stated is not None
        return self.stated.noise.get("sensitivity_of_run")


class StatedSampler(sampling.Sampler):
    """A list of batches, or the caller's own sampler, as a statement describes it."""

    dataset_size: int
    max_batch_size: int | None
    adjacency, steps_per_epoch = Adjacency.ZERO_OUT, 1

    def __init__(self, statement: Statement, max_batch_size: int | None) -> None:
        self.said, self.max_batch_size = statement.sampler, max_batch_size
        self.dataset_size = statement.sampler.get("dataset_size", 1)
        self.batch_size = statement.method["batch_size"]
        self.keeps_order = not self.said.get("secret", SECRET_BATCHES in statement.caveats)
        self.unit_of_privacy = str(self.said.get("unit", "example"))

    def describe(self) -> dict[str, Any]:
        if self.said.get("sampler") != sampling.FixedBatches.kind:
            return dict(self.said)
        known = ("dataset_size", "expected_batch_size", "steps_per_epoch", "batches_sha256",
                 "unit", "examples", "max_examples_per_user", "users_sha256")  # fmt: skip
        return sampling.FixedBatches([[0]]).describe() | {name: self.said[name] for name in known if name in self.said}
