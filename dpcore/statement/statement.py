"""The privacy statement of a run: what is guaranteed, under which conditions, and what is not covered."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from dpcore.accounting.branches import count
from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.spec.canonical import INFINITE, digest, plain, read_json
from dpcore.statement.text import statement_text

FORMAT = 3

# What decides the mechanism and its cost. The rest (steps taken, software, note) may differ between runs of one plan.
SETTINGS = ("adjacency", "unit", "sampler", "clip", "noise", "method", "steps_planned", "delta")
_EPSILONS = ("epsilon", "epsilon_planned", "epsilon_interval")
# The JSON types of a field, by that of the dataclass.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "dict": ((dict,), "an object"), "str": ((str,), "text"), "tuple": ((list, tuple), "a list"),
    "int": ((int,), "a number"), "float": ((int, float), "a number"),
}  # fmt: skip
# Written beside the fields, and compared with them when read.
_DERIVED = ("settings_hash", "statement_hash", "delta_is_below_1/n")


@dataclass(frozen=True)
class Statement:
    """A privacy guarantee and everything it rests on, as plain data.

    Holds public settings and counts only: no key, no index, no realized batch size, nothing that un-noised data decide.

    Parameters
    ----------
    adjacency : str
        Which data sets are neighbors: "add-remove", "zero-out" or "replace-one".
    sampler : dict
        How batches are drawn: kind, data set size, expected batch size, sampling rate.
    clip : dict
        Rule, groups with their clip norms, and the sensitivity of the sum that follows from them.
    noise : dict
        Mechanism, noise multiplier, the standard deviation added to the sum, and the correlation of the steps.
    method : dict
        Name and settings of the optimization method.
    steps_planned, steps_taken : int
        Optimizer steps. The guarantee is for the steps taken.
    delta : float
        The delta at which epsilon is stated.
    epsilon : dict
        Epsilon by accountant, after the steps taken: a float, where ``inf`` (or "inf") says that there is no guarantee.
    event : dict
        The event that was accounted.
    randomness : dict
        Generator, origin of the key, and whether it is cryptographic.
    caveats : sequence of str
        What the guarantee does not cover, one sentence each.
    software : dict, optional
        Versions by package, and the backend.
    epsilon_planned, event_planned : dict, optional
        The same of all planned steps.
    epsilon_interval : dict, optional
        "lower" and "upper", between which the smallest epsilon of `event` lies for certain.
    attacker : dict, optional
        What `event` leaves to an attacker: "advantage", and "true_positive_rate" by false positive rate.
    derivation : dict, optional
        One sentence for each accountant: how epsilon follows from the event.
    unit : str
        What one "example" of the adjacency is: "example" or "user".
    steps_abandoned, rows_abandoned : int, tuple of (first, stop)
        Released on top of the steps taken, and counted; where they lie, for each branch that was left, or empty.
    ledger : dict, optional
        "ledger" (its id), "run" (the id of this run in it) and "total" (what the ledger holds in all).
    note, date : str, optional
        One sentence on the moment of writing ("stopped by Ctrl-C"), and the day, as the writer gives it.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        For counts, epsilons or a delta out of range, and for values that are not plain data.
    """

    adjacency: str
    sampler: dict[str, Any]
    clip: dict[str, Any]
    noise: dict[str, Any]
    method: dict[str, Any]
    steps_planned: int
    steps_taken: int
    delta: float
    epsilon: dict[str, float]
    event: dict[str, Any]
    randomness: dict[str, Any]
    caveats: tuple[str, ...]
    software: dict[str, str] = field(default_factory=dict)
    epsilon_planned: dict[str, float] = field(default_factory=dict)
    event_planned: dict[str, Any] = field(default_factory=dict)
    epsilon_interval: dict[str, float] = field(default_factory=dict)
    attacker: dict[str, Any] = field(default_factory=dict)
    derivation: dict[str, str] = field(default_factory=dict)
    unit: str = "example"
    steps_abandoned: int = 0
    rows_abandoned: tuple[tuple[int, int], ...] = ()
    ledger: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            if _kind(item) == "dict" and item.name not in _EPSILONS:
                object.__setattr__(self, item.name, plain(getattr(self, item.name), item.name))
        for name in _EPSILONS:
            value = getattr(self, name).items()
            object.__setattr__(self, name, {key: _epsilon(number, f"{name}.{key}") for key, number in value})
        object.__setattr__(self, "caveats", tuple(str(caveat) for caveat in self.caveats))
        if not 0 <= self.steps_taken <= self.steps_planned:
            raise ArgumentError(
                f"steps_taken={self.steps_taken!r}: must lie between 0 and the steps planned, {self.steps_planned!r}"
            )
        if not self.steps_abandoned >= 0:
            raise ArgumentError(f"steps_abandoned={self.steps_abandoned!r}: must be 0 or more")
        rows = tuple(_rows(item, self.steps_planned) for item in self.rows_abandoned)
        object.__setattr__(self, "rows_abandoned", rows)
        if rows and count(rows) != self.steps_abandoned:
            raise ArgumentError(f"rows_abandoned={rows!r}: must be {self.steps_abandoned!r} rows, the steps abandoned")
        if not 0 <= self.delta < 1:
            raise ArgumentError(f"delta={self.delta!r}: must be at least 0 and less than 1")
        if not self.epsilon:
            raise ArgumentError("epsilon={}: must have at least one accountant's value")

    @property
    def best_epsilon(self) -> float:
        """The smallest of the accountants' epsilons: each is an upper bound, so the smallest holds."""
        return min(self.epsilon.values())

    @property
    def private(self) -> bool:
        """Whether anything is guaranteed at all."""
        return math.isfinite(self.best_epsilon)

    @property
    def dataset_size(self) -> int | None:
        """Number of examples n, taken to be public; None where the sampler does not say."""
        found = self.sampler.get("dataset_size")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def delta_is_small(self) -> bool | None:
        """Whether delta < 1/n; None without n. A delta of 1/n allows one example to be published outright."""
        return None if self.dataset_size is None else bool(self.delta < 1 / self.dataset_size)

    @property
    def settings_hash(self) -> str:
        """SHA-256 of the settings that decide the mechanism, as canonical JSON."""
        return digest({name: getattr(self, name) for name in SETTINGS})

    @property
    def statement_hash(self) -> str:
        """SHA-256 of all fields, as canonical JSON: shows damage. Whoever changes a field on purpose can renew it."""
        return digest({item.name: getattr(self, item.name) for item in fields(self)})

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as plain data; an infinite epsilon is the string "inf"."""
        return {
            "format": FORMAT,
            **{item.name: plain(getattr(self, item.name), item.name) for item in fields(self)},
            "delta_is_below_1/n": self.delta_is_small,
            "settings_hash": self.settings_hash,
            "statement_hash": self.statement_hash,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the statement as JSON that every parser reads (no NaN or Infinity literals)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def text(self, width: int = 80) -> str:
        """Return the statement for a person, in lines of at most `width` characters."""
        return statement_text(self, width)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Statement:
        """Read what `to_dict` wrote; raise DataError for other content, and where it does not match its hashes."""
        statement = cls.unchecked(content)
        problems = {
            "its settings do not match their hash": content["settings_hash"] != statement.settings_hash,
            "what it says of delta and 1/n is not so": content["delta_is_below_1/n"] is not statement.delta_is_small,
            "it does not match its hash": content["statement_hash"] != statement.statement_hash,
        }
        for problem, found in problems.items():
            if found:
                raise DataError(f"statement: {problem}; it was changed after it was written")
        return statement

    @classmethod
    def unchecked(cls, content: Mapping[str, Any]) -> Statement:
        """Read what `to_dict` wrote, without comparing it with its hashes; raises DataError otherwise."""
        if not isinstance(content, Mapping):
            raise DataError("statement: is not a JSON object")
        found = content.get("format")
        if found != FORMAT or isinstance(found, bool):
            newer = isinstance(found, int) and found > FORMAT
            hint = "; a newer dpcore wrote it, which is needed to read it" if newer else ""
            raise DataError(f"statement: has format {found!r}, expected {FORMAT}{hint}")
        names = {item.name for item in fields(cls)}
        expected = names | {"format", *_DERIVED}
        missing, unknown = expected - content.keys(), content.keys() - expected
        if missing or unknown:
            problem = f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(unknown)}"
            raise DataError(f"statement: {problem}")
        _check_types(content)
        try:
            return cls(**{name: content[name] for name in names})
        except DpcoreError as cause:
            raise DataError(f"statement: {cause}") from cause

    @classmethod
    def from_json(cls, content: str) -> Statement:
        """Read what `to_json` wrote; raises DataError as `from_dict` does."""
        try:
            value = read_json(content)
        except ValueError as cause:
            raise DataError(f"statement: is not JSON ({cause})") from cause
        return cls.from_dict(value)


def _check_types(content: Mapping[str, Any]) -> None:
    """Refuse a field of another JSON type than it is written with."""
    for item in fields(Statement):
        (kinds, expected), value = _KINDS[_kind(item)], content[item.name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise DataError(f"statement: {item.name}={value!r} must be {expected}")


def _kind(item: Field[Any]) -> str:
    return str(item.type).partition("[")[0]


def _rows(item: Any, steps: int) -> tuple[int, int]:
    whole = isinstance(item, (list, tuple)) and len(item) == 2 and all(type(row) is int for row in item)
    if not whole or not 0 <= item[0] < item[1] <= steps:
        raise ArgumentError(f"rows_abandoned: {item!r} must be (first, stop), 0 <= first < stop <= {steps}")
    return item[0], item[1]


def _epsilon(value: Any, where: str) -> float:
    if value == INFINITE:
        return math.inf
    if isinstance(value, (str, bool)) or not hasattr(value, "__float__") or not float(value) >= 0:
        raise ArgumentError(f'{where}={value!r}: must be a number of at least 0, or "inf"')
    return float(value)
