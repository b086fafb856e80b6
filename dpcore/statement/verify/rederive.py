"""From the descriptions in a statement back to the objects that they describe: sampler, strategy, update, plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from dpcore import sampling
from dpcore.accounting.branches import Rows
from dpcore.errors import DataError, DpcoreError
from dpcore.plan.plan import Plan
from dpcore.sampling import Sampler
from dpcore.stages import strategies, updates
from dpcore.stages.clipping import AdaptiveClip, Clip
from dpcore.stages.method import Method
from dpcore.stages.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.stages.queries import Plain, Preconditioned, Query
from dpcore.stages.strategies import Identity, Strategy
from dpcore.stages.updates import SECOND_MOMENTS, Update
from dpcore.statement.statement import Statement
from dpcore.statement.verify.finding import SAME

# Kind in `describe()` -> class and its keywords. The batch size is described as the expected one.
_SAMPLERS: Final[dict[str, tuple[Callable[..., Any], tuple[str, ...]]]] = {
    "poisson": (sampling.PoissonSampler, ("sample_rate",)),
    "truncated poisson": (sampling.TruncatedPoissonSampler, ("sample_rate", "max_batch_size")),
    "cyclic poisson": (sampling.CyclicPoissonSampler, ("groups", "shuffle")),
    "fixed size": (sampling.FixedSizeSampler, ()),
    "fixed order": (sampling.FixedOrderSampler, ("shuffle", "drop_last")),
    "shuffled": (sampling.ShuffledSampler, ("drop_last",)),
}
USERS: Final = ("unit", "examples", "max_examples_per_user", "users_sha256")
"""What `dpcore.sampling.UserSampler` says beside the settings of its sampler of users."""

_STRATEGIES: Final[dict[str, Callable[..., Any]]] = {
    "identity": strategies.Identity,
    "tree": strategies.Tree,
    "tree-optimal": strategies.TreeOptimal,
    "square-root": strategies.SquareRoot,
    "banded-toeplitz": strategies.BandedToeplitz,
    "banded-inverse-toeplitz": strategies.BandedInverseToeplitz,
    "blt": strategies.BLT,
}
_UPDATES: Final[tuple[type, ...]] = (
    updates.SGD,
    updates.Momentum,
    updates.Adam,
    updates.AdamW,
    updates.AdaGrad,
    updates.Accelerated,
)


def sampler_of(description: Mapping[str, Any]) -> Sampler | None:
    """Return the sampler that a statement describes (of users, where it draws users); None for other kinds.

    Raises
    ------
    DataError
        Where the description contradicts itself, or is not what its sampler says of itself.
    """
    kind = description.get("sampler")
    if kind not in _SAMPLERS:
        return None
    make, keywords = _SAMPLERS[kind]
    try:
        made: Sampler = make(
            dataset_size=description["dataset_size"],
            batch_size=description["expected_batch_size"],
            **{name: description[name] for name in keywords},
        )
    except KeyError as cause:
        raise DataError(f"the sampler ({kind}) lacks {cause}") from cause
    except DpcoreError as cause:
        raise DataError(f"the sampler ({kind}) cannot exist: {cause}") from cause
    return made


def strategy_of(description: Mapping[str, Any]) -> Strategy | None:
    """Return the strategy of a description; None where only a digest of its matrix is known, or its kind is not.

    Raises
    ------
    DataError
        Where the description contradicts itself.
    """
    kind = description.get("kind")
    if kind not in _STRATEGIES:
        return None
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in description.items() if key != "kind"}
    try:
        made: Strategy = _STRATEGIES[kind](**settings)
    except (DpcoreError, TypeError) as cause:
        raise DataError(f"the strategy ({kind}) cannot exist: {cause}") from cause
    if made.describe() != dict(description):
        raise DataError(f"the strategy ({kind}) is not scaled to a largest column norm of 1")
    return made


def update_of(description: Mapping[str, Any]) -> Update | None:
    """Return the update of a description; None where its kind is unknown."""
    made: Update | None = _made(_UPDATES, description, "update")
    return made


def clip_of(description: Mapping[str, Any]) -> Clip | None:
    """Return the clip of a method's description; None where its kind is unknown."""
    made: Clip | None = _made((Clip,), {**description, "adaptive": adaptive_of(description)}, "clip")
    return made


def adaptive_of(description: Mapping[str, Any]) -> AdaptiveClip | None:
    """Return how a described clip adapts its norm; None where the norm is fixed."""
    described = description.get("adaptive")
    if described is None:
        return None
    made: AdaptiveClip | None = _made((AdaptiveClip,), described, "adaptive clip")
    if made is None:
        raise DataError(f"the adaptive clip is of an unknown kind, {described.get('kind')!r}")
    return made


@dataclass(frozen=True)
class DigestPlan(Plan):
    """A plan under a matrix of which only a digest is known: how far it moves an example's sums is as stated.

    Attributes
    ----------
    moved : mapping of int to float
        By number of steps: the sensitivity of the leading block.
    left : float
        How far an example moves the rows of the branches that were left.
    wide : int
        Bands.
    """

    moved: Mapping[int, float] = field(default_factory=dict)
    left: float = 0.0
    wide: int = 2

    def _reach(self, first: int, stop: int) -> float:
        return self.moved[stop]

    def _reach_of(self, left: tuple[Rows, ...]) -> float:
        most = self.moved[self.steps] * math.sqrt(len(left))
        if self.left > most * (1 + SAME):
            raise DataError(f"its branches move an example's sums by {self.left:.6g}, more than {most:.6g}")
        return self.left

    @cached_property
    def _banded(self) -> tuple[int, float]:
        return self.wide, self.moved[self.steps]


@dataclass(frozen=True)
class _Digest(Identity):
    """Stands for a matrix that is not known, under the name that a statement's event gives it."""

    description: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def describe(self) -> dict[str, Any]:
        # In the order in which the name has them, whatever the order in which the statement was written down.
        settings = ", " + self.name.partition("(")[2]
        return dict(sorted(self.description.items(), key=lambda item: settings.find(f", {item[0]}=")))


def _made(kinds: tuple[type, ...], description: Mapping[str, Any], what: str) -> Any:
    kind = next((kind for kind in kinds if kind.__name__ == description.get("kind")), None)
    if kind is None:
        return None
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in description.items() if key != "kind"}
    try:
        return kind(**settings)
    except (DpcoreError, TypeError) as cause:
        raise DataError(f"the {what} ({kind.__name__}) cannot exist: {cause}") from cause


def plan_of(statement: Statement) -> Plan | None:
    """Return a plan with the stated sampler, noise and steps, which has the stated run's events; None without sampler.

    Filter and what else works on released vectors are left out; of an update of the caller's own all but what its
    second moment is made of, of a query all but how it scales, and a clip of the caller's own. No event needs them.

    Raises
    ------
    DataError
        Where such a run is impossible, or not covered by the analysis.
    """
    noise, method = statement.noise, statement.method
    sampler, strategy = sampler_of(statement.sampler), noise.get("strategy")
    update = update_of(method["update"]) or stand_in(method["update"])
    clip = clip_of(method["clip"]) or Clip()
    if sampler is None:
        return None
    sigma = noise["noise_multiplier"]
    known = None if strategy is None else strategy_of(strategy)
    stage: Any = IndependentGaussian(sigma)
    if strategy is not None:
        named = str(_first(statement.event_planned).get("strategy", ""))
        stage = CorrelatedGaussian(sigma, _Digest(strategy, named) if known is None else known)
    if method["batch_size"] is None:
        raise DataError("the method does not state what its averages are divided by")
    try:
        # The names of the tensors are not stated, and groups by name would need them; no event depends on the groups.
        made = Method(
            update=update,
            query=_scaled(method["query"]),
            clip=replace(clip, groups="flat"),
            noise=stage,
            batch_size=method["batch_size"],
        )
        if strategy is None or known is not None:
            return Plan(made, sampler, statement.steps_planned)
        moved = _moved(statement)
        if moved is None:
            return None
        wide = min(int(strategy.get("bands", 2)), getattr(sampler, "groups", 2), statement.steps_planned)
        return DigestPlan(made, sampler, statement.steps_planned, moved=moved, left=_left(statement), wide=wide)
    except (DpcoreError, TypeError) as cause:
        raise DataError(f"no such run is possible: {cause}") from cause


def stand_in(description: Mapping[str, Any]) -> Update:
    """Return an update with the second moment that one of an unknown kind describes; no event depends on more."""
    source = description.get("second_moment")
    known = source if source in SECOND_MOMENTS else "filtered"
    return updates.Adam(lr=1.0, second_moment=known, allow_nonprivate=True)


def _scaled(description: Mapping[str, Any]) -> Query:
    """Return a query that scales as the described one does, of plain gradients."""
    if description.get("kind") != "Preconditioned":
        return Plain()
    return Preconditioned(**{name: value for name, value in description.items() if name not in ("kind", "query")})


def _first(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the run's own part of an event; the others are branches that it left."""
    found: Mapping[str, Any] = event["events"][0] if "events" in event else event
    return found


def _left(statement: Statement) -> float:
    """Return how far an example moves the rows of abandoned branches, as the event states it."""
    others = statement.event.get("events", ())[1:]
    return float(others[0].get("sensitivity", 0.0)) if others else 0.0


def _moved(statement: Statement) -> dict[int, float] | None:
    """Return how far an example moves C times the sums, as the two events state it; None where nothing is private."""
    found = {}
    for event, steps in ((statement.event, statement.steps_taken), (statement.event_planned, statement.steps_planned)):
        first = _first(event)
        if first["event"] == "NonPrivate":
            return None
        found[steps] = float(first["sensitivity"])
    taken, whole = found[statement.steps_taken], found[statement.steps_planned]
    if taken > whole * (1 + SAME):
        raise DataError(f"the sensitivity of the steps taken, {taken:.6g}, exceeds that of the whole run, {whole:.6g}")
    described = statement.noise["strategy"]
    scaled = described.get("kind") in ("dense", "banded") and described["steps"] == statement.steps_planned
    if scaled and whole < 1 - SAME:
        raise DataError(
            f"the sensitivity of the run is stated as {whole:.6g}, and every column of the matrix is used: the largest "
            "has norm 1"
        )
    return found
