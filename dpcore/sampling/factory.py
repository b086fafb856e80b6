"""Samplers by name: one table for configurations, the command line, the PyTorch edge and stored statements."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.sampling.base import Sampler
from dpcore.sampling.cyclic_poisson import CyclicPoissonSampler
from dpcore.sampling.orders import FixedBatches, FixedOrderSampler, ShuffledSampler
from dpcore.sampling.poisson import FixedSizeSampler, PoissonSampler, RandomAllocationSampler, TruncatedPoissonSampler
from dpcore.sampling.users import UserSampler
from dpcore.spec import validate

_SAMPLERS: Final[tuple[Any, ...]] = (
    PoissonSampler,
    TruncatedPoissonSampler,
    FixedSizeSampler,
    FixedOrderSampler,
    ShuffledSampler,
    CyclicPoissonSampler,
    RandomAllocationSampler,
)
_KINDS: Final[dict[str, Any]] = {kind.kind.replace(" ", "-"): kind for kind in _SAMPLERS}
NAMES: Final = tuple(_KINDS)


def sampler(name: str, *, dataset_size: int, batch_size: float | None = None, **settings: Any) -> Sampler:
    """Return the sampler of a name.

    Parameters
    ----------
    name : str
        One of `NAMES`; blanks and underscores count as hyphens.
    dataset_size : int
        Number of examples.
    batch_size : float, optional
        The expected batch size; a whole number if batches have a fixed size.
    **settings
        Further settings of that sampler: `sample_rate`, `max_batch_size`, `groups`, `shuffle`, `drop_last`. None is a
        setting left out.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For unknown names, settings of another sampler, a missing `groups`, and values out of range.
    """
    kind = _kind(name)
    known = {item.name: item.type for item in fields(_KINDS[kind])}
    given = {key: value for key, value in settings.items() if value is not None}
    for key, value in given.items():
        if key not in known:
            owners = [other for other in NAMES if key in {item.name for item in fields(_KINDS[other])}]
            raise ArgumentError(f"{key}={value!r}: is only for sampling {' or '.join(map(repr, owners))}, not {kind!r}")
    if kind == "cyclic-poisson" and "groups" not in given:
        raise ArgumentError("groups=None: must be given with sampling 'cyclic-poisson', for example 8")
    if batch_size is not None:
        whole = known["batch_size"] is int and validate.number(batch_size=batch_size).is_integer()
        given["batch_size"] = int(batch_size) if whole else batch_size
    elif "sample_rate" not in given:
        raise ArgumentError("batch_size=None: must be given, the expected number of examples a step")
    made: Sampler = _KINDS[kind](dataset_size=dataset_size, **given)
    return made


def _kind(name: str) -> str:
    return validate.choice(NAMES, sampling=str(name).replace("_", "-").replace(" ", "-"))


def has_fixed_size(name: str) -> bool:
    """Return whether the batches of the sampler of this name have a whole number of examples, the same at each step."""
    return any(item.name == "batch_size" and item.type is int for item in fields(_KINDS[_kind(name)]))


def from_description(described: Mapping[str, Any]) -> Sampler | None:
    """Return the sampler of a description, with users if it draws users; None if the description is incomplete.

    Raises
    ------
    DataError
        If no such sampler can exist.
    """
    name = described.get("sampler")
    if not isinstance(name, str) or "-" in name or name.replace(" ", "-") not in NAMES:
        return None
    known = {item.name for item in fields(_KINDS[name.replace(" ", "-")])} - {"batch_size"}
    try:
        settings = {key: described[key] for key in known}
        made = sampler(name, batch_size=described["expected_batch_size"], **settings)
        return UserSampler.of_digest(made, described) if "users_sha256" in described else made
    except KeyError as cause:
        raise DataError(f"the sampler ({name}) lacks {cause}") from cause
    except DpcoreError as cause:
        raise DataError(f"the sampler ({name}) cannot exist: {cause}") from cause


def foreign(sampler: Sampler) -> type | None:
    """Return the class of a sampler that is not the library's, or draws users by one; None for the library's own."""
    parts = (sampler, sampler.sampler) if type(sampler) is UserSampler else (sampler,)
    ours = (*_KINDS.values(), FixedBatches, UserSampler)
    return next((type(part) for part in parts if type(part) not in ours), None)
