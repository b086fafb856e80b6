"""From the descriptions in a statement back to the objects that they describe: sampler, strategy, update, plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from dpcore import sampling, strategies, updates
from dpcore.clipping import AdaptiveClip, Clip
from dpcore.errors import DataError, DpcoreError
from dpcore.method import Method
from dpcore.noise import CorrelatedGaussian, IndependentGaussian
from dpcore.plan import Plan
from dpcore.report.statement import Statement
from dpcore.sampling import Sampler
from dpcore.strategies import Strategy
from dpcore.updates import Update

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
    made: AdaptiveClip | None = _made((AdaptiveClip,), description.get("adaptive") or {}, "adaptive clip")
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
