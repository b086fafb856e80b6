"""Stand-ins for what the description in a statement does not hold: each says and does what the statement says."""
# ruff: noqa: D102 (the protocols say what their members do)

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final

from dpcore import sampling
from dpcore.accounting import Adjacency, Event
from dpcore.accounting.branches import Rows
from dpcore.errors import DataError
from dpcore.plan.plan import Plan
from dpcore.stages.clipping import Clip, Grouping, Sensitivity
from dpcore.stages.strategies import Identity
from dpcore.statement.assumptions import SECRET_BATCHES
from dpcore.statement.statement import Statement
from dpcore.statement.verify.finding import SAME

# What `dpcore.sampling.UserSampler` says beside the settings of its sampler of users.
_OF_USERS: Final = ("unit", "examples", "max_examples_per_user", "users_sha256")


def saying(kind: type, description: Mapping[str, Any], *settings: Any, **named: Any) -> Any:
    """Return a stage of that kind which says of itself what a statement says."""
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
    groups: ClassVar[str] = "flat"  # how they came about is not asked

    def grouping(self, tensors: tuple[str, ...]) -> Grouping:
        return Grouping(tuple(self.norms), ((),) * len(self.norms), tuple(self.norms.values()))

    def sensitivity(self, grouping: Any) -> Sensitivity:
        return Sensitivity(self.moved[self.max_grad_norm])

    def describe(self) -> dict[str, Any]:
        return dict(self.description)


@dataclass(frozen=True)
class Digest(Identity):
    """Stands for a matrix that is not known, under the name that a statement's event gives it."""

    description: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def wide(self) -> int:
        return int(self.description.get("bands", 2))

    def describe(self) -> dict[str, Any]:
        # In the order in which the name has them, whatever the order in which the statement was written down.
        settings = ", " + self.name.partition("(")[2]
        return dict(sorted(self.description.items(), key=lambda item: settings.find(f", {item[0]}=")))


@dataclass(frozen=True)
class DigestPlan(Plan):
    """A plan under a matrix of which only a digest is known: how far it moves an example's sums is as stated.

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


class StatedSampler(sampling.BaseSampler):
    """A list of batches, or a sampler of the caller's own: what a statement says of it."""

    adjacency, steps_per_epoch = Adjacency.ZERO_OUT, 1

    def __init__(self, statement: Statement, max_batch_size: int | None) -> None:
        self.said, self.max_batch_size = statement.sampler, max_batch_size
        self.dataset_size = statement.sampler.get("dataset_size", 1)
        self.batch_size = statement.method["batch_size"]
        self.keeps_order = not self.said.get("secret", SECRET_BATCHES in statement.caveats)
        self.unit_of_privacy = str(self.said.get("unit", "example"))

    def indices(self, key: bytes, step: int) -> Any:
        raise NotImplementedError

    event = indices

    def describe(self) -> dict[str, Any]:
        if self.said.get("sampler") != sampling.FixedBatches.kind:
            return dict(self.said)
        known = ("dataset_size", "expected_batch_size", "steps_per_epoch", "batches_sha256", *_OF_USERS)
        return sampling.FixedBatches([[0]]).describe() | {name: self.said[name] for name in known if name in self.said}


class StatedUsers(sampling.UserSampler):
    """A sampler of users, of whose examples there is a digest."""

    def __init__(self, sampler: sampling.Sampler, said: Mapping[str, Any]) -> None:
        for name, value in (("sampler", sampler), ("said", said), ("sha256", said["users_sha256"])):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "max_examples_per_user", said["max_examples_per_user"])

    @property
    def example_count(self) -> int:
        return self.said["examples"]  # type: ignore[attr-defined, no-any-return]
