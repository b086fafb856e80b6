"""The privacy statement of a run: what is guaranteed, under which conditions, and what is not covered."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dpcore.errors import ArgumentError, DataError
from dpcore.report.canonical import INFINITE, digest, plain

FORMAT = 1

# What decides the mechanism and its cost. The rest (steps taken, software, note) may differ between runs of one plan.
_SETTINGS = ("adjacency", "sampler", "clip", "noise", "method", "steps_planned", "delta")
_DICTS = ("sampler", "clip", "noise", "method", "event", "randomness", "software")


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
        Rule, groups, clip norm, and the sensitivity of the sum that follows from them.
    noise : dict
        Mechanism, noise multiplier, and the standard deviation added to the sum.
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
        Versions by package.
    epsilon_planned : dict, optional
        Epsilon by accountant after all planned steps.
    note : str, optional
        One sentence on the moment of writing ("stopped by Ctrl-C").

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
    note: str = ""

    def __post_init__(self) -> None:
        for name in _DICTS:
            object.__setattr__(self, name, plain(getattr(self, name), name))
        for name in ("epsilon", "epsilon_planned"):
            value = {
                accountant: _epsilon(number, f"{name}.{accountant}")
                for accountant, number in getattr(self, name).items()
            }
            object.__setattr__(self, name, value)
        object.__setattr__(self, "caveats", tuple(str(caveat) for caveat in self.caveats))
        if not 0 <= self.steps_taken <= self.steps_planned:
            raise ArgumentError(
                f"steps_taken={self.steps_taken!r}: must lie between 0 and the steps planned, {self.steps_planned!r}"
            )
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
    def settings_hash(self) -> str:
        """SHA-256 of the settings that decide the mechanism, as canonical JSON."""
        return digest({name: getattr(self, name) for name in _SETTINGS})

    def to_dict(self) -> dict[str, Any]:
        """Return the statement as plain data; an infinite epsilon is the string "inf"."""
        return {
            "format": FORMAT,
            **{item.name: plain(getattr(self, item.name), item.name) for item in fields(self)},
            "settings_hash": self.settings_hash,
        }

    def to_json(self, indent: int | None = 2) -> str:
        """Return the statement as JSON that every parser reads (no NaN or Infinity literals)."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def text(self, width: int = 80) -> str:
        """Return the statement for a person, in lines of at most `width` characters."""
        from dpcore.report.text import statement_text

        return statement_text(self, width)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Statement:
        """Read what `to_dict` wrote.

        Raises
        ------
        DataError
            Where a field is missing or unknown, the format is another one, or the settings do not match their hash.
        """
        if content.get("format") != FORMAT:
            raise DataError(f"statement: has format {content.get('format')!r}, expected {FORMAT}")
        names = {item.name for item in fields(cls)}
        missing, unknown = names - content.keys(), content.keys() - names - {"format", "settings_hash"}
        if missing or unknown:
            problem = f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(unknown)}"
            raise DataError(f"statement: {problem}")
        statement = cls(**{name: content[name] for name in names})
        if content.get("settings_hash") != statement.settings_hash:
            raise DataError("statement: its settings do not match their hash; it was changed after it was written")
        return statement

    @classmethod
    def from_json(cls, content: str) -> Statement:
        """Read what `to_json` wrote; raises DataError as `from_dict` does."""
        try:
            value = json.loads(content)
        except ValueError as cause:
            raise DataError(f"statement: is not JSON ({cause})") from cause
        if not isinstance(value, dict):
            raise DataError("statement: is not a JSON object")
        return cls.from_dict(value)


def _epsilon(value: Any, where: str) -> float:
    if value == INFINITE:
        return math.inf
    if isinstance(value, (str, bool)) or not hasattr(value, "__float__") or not float(value) >= 0:
        raise ArgumentError(f'{where}={value!r}: must be a number of at least 0, or "inf"')
    return float(value)
