"""A method: five stages, each a small frozen set of public settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from dpcore.clipping import Clip
from dpcore.errors import ArgumentTypeError
from dpcore.filters import Filter, Identity
from dpcore.noise import IndependentGaussian, Noise
from dpcore.queries import Plain, Query
from dpcore.updates import Update
from dpcore.validate import positive


@dataclass(frozen=True, kw_only=True)
class Method:
    """query -> clip -> sum -> noise -> filter -> update. Any combination is a method.

    Parameters
    ----------
    update : Update
        `dpcore.updates.SGD`, `Momentum`, `Adam`, `AdamW`.
    query : Query
        `dpcore.queries.Plain` or `TwoPoint`.
    clip : Clip
        Rule, norm and groups.
    noise : Noise
        `dpcore.noise.IndependentGaussian`.
    filter : Filter
        `dpcore.filters.Identity`, `LowPass` or `Averaging`.
    batch_size : float or None
        The *expected* batch size B, the one fixed denominator of every average, never the realized size of a batch.
        None takes the sampler's.
    name : str
        For tables and statements.
    """

    update: Update
    query: Query = field(default_factory=Plain)
    clip: Clip = field(default_factory=Clip)
    noise: Noise = field(default_factory=IndependentGaussian)
    filter: Filter = field(default_factory=Identity)
    batch_size: float | None = None
    name: str = "custom"

    def __post_init__(self) -> None:
        members = {
            "update": ("rule", "settings"),
            "query": ("points", "uses_displacement"),
            "clip": ("grouping", "sensitivity"),
            "noise": ("noise_multiplier", "with_noise_multiplier"),
            "filter": ("order", "coefficients"),
        }
        for stage, needed in members.items():
            value = getattr(self, stage)
            if isinstance(value, type) or not all(hasattr(value, member) for member in needed):
                raise ArgumentTypeError(f"{stage}={value!r}: must be a stage from dpcore.{_PACKAGES[stage]}")
        if self.batch_size is not None:
            positive(batch_size=self.batch_size)

    def with_noise_multiplier(self, noise_multiplier: float) -> Method:
        """Return the same method at another noise multiplier."""
        return replace(self, noise=self.noise.with_noise_multiplier(noise_multiplier))

    def describe(self) -> dict[str, Any]:
        """Return every setting as plain JSON values."""
        described: dict[str, Any] = {"name": self.name, "batch_size": self.batch_size}
        for stage in _PACKAGES:
            described[stage] = describe(getattr(self, stage))
        return described


_PACKAGES = {
    "query": "queries",
    "clip": "clipping",
    "noise": "noise",
    "filter": "filters",
    "update": "updates",
}


def describe(stage: Any) -> dict[str, Any]:
    """Return a stage's kind and settings as plain JSON values."""
    described: dict[str, Any] = {"kind": type(stage).__name__}
    if is_dataclass(stage):
        for setting in fields(stage):
            value = getattr(stage, setting.name)
            described[setting.name] = (
                dict(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
            )
    return described
