"""From the descriptions in a statement back to the objects that they describe: sampler, strategy, update, plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from dpcore import sampling, strategies, updates
from dpcore.clipping import Clip
from dpcore.errors import DataError, DpcoreError
from dpcore.method import Method
from dpcore.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.plan import Plan
from dpcore.report.statement import Statement
from dpcore.sampling import Sampler
from dpcore.strategies import Strategy
from dpcore.updates import Update

# Kind in `describe()` -> class, and keyword -> name in the description.
_SAMPLERS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "poisson": (
        "PoissonSampler",
        {"dataset_size": "dataset_size", "batch_size": "expected_batch_size", "sample_rate": "sample_rate"},
    ),
    "fixed size": ("FixedSizeSampler", {"dataset_size": "dataset_size", "batch_size": "expected_batch_size"}),
    "fixed order": (
        "FixedOrderSampler",
        {
            "dataset_size": "dataset_size",
            "batch_size": "expected_batch_size",
            "shuffle": "shuffle",
            "drop_last": "drop_last",
        },
    ),
}
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
    """Return the sampler that a statement describes; None where the description does not hold all of it.

    Raises
    ------
    DataError
        Where the description contradicts itself, or is not what its sampler says of itself.
    """
    kind = description.get("sampler")
    if kind not in _SAMPLERS:
        return None
    name, keywords = _SAMPLERS[kind]
    try:
        made: Sampler = getattr(sampling, name)(**{key: description[field] for key, field in keywords.items()})
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
    made: Clip | None = _made((Clip,), description, "clip")
    return made


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
    """Return a plan with the stated sampler, noise, update and steps, which has the stated run's events.

    Query, filter and what else works on released vectors are left out: no event depends on them.

    Raises
    ------
    DataError
        Where such a run is impossible, or not covered by the analysis.
    """
    noise, method = statement.noise, statement.method
    sampler, update = sampler_of(statement.sampler), update_of(method.get("update", {}))
    clip = clip_of(method.get("clip", {}))
    if sampler is None or update is None or clip is None:
        return None
    sigma = noise.get("noise_multiplier")
    stage: Any = IndependentGaussian(sigma)
    if noise.get("strategy") is not None:
        strategy = strategy_of(noise["strategy"])
        if strategy is None:
            return None
        stage = CorrelatedGaussian(sigma, strategy)
    try:
        # The names of the tensors are not stated, and groups by name would need them; no event depends on the groups.
        made = Method(update=update, clip=replace(clip, groups="flat"), noise=stage, batch_size=method["batch_size"])
        return Plan(made, sampler, statement.steps_planned)
    except DpcoreError as cause:
        raise DataError(f"no such run is possible: {cause}") from cause
