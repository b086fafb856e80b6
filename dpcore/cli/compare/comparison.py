"""The runs of a comparison: contestants, epsilons, learning rates and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dpcore.cli.train.settings import SETTINGS, Settings, settings_from
from dpcore.errors import ArgumentError
from dpcore.statement.text import format_number

SEARCH, FINAL = "search", "final"
# Seeds of the search for learning rates start here, so that no final run begins where a search run began.
FIRST_SEARCH_SEED = 1000
# The same for all contestants, or decided by the comparison itself.
SAME_FOR_ALL = frozenset(
    ("data", "data_dir", "model", "epsilon", "delta", "noise_multiplier", "seed", "backend", "tensorboard")
)


class Run(NamedTuple):
    """One run of a comparison."""

    contestant: str
    epsilon: float
    role: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Contestant:
    """A method with settings of its own, none of `SAME_FOR_ALL`, and the learning rates it may try.

    One rate needs no search, none takes the default of the update rule.
    """

    name: str
    settings: dict[str, Any]
    lr: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A whole comparison: contestants of different names, each of which meets every epsilon with `seeds` final runs.

    `search_seeds` are runs of each learning rate of a grid, of `search_epochs` epochs each: the noise is calibrated to
    the same epsilon in that many epochs. None takes the contestant's own. `account_for_tuning` says whether the
    guarantee of all runs together is stated. `common` are settings of all contestants; a contestant's own win.
    """

    contestants: tuple[Contestant, ...]
    epsilon: tuple[float, ...]
    common: dict[str, Any] = field(default_factory=dict)
    seeds: int = 3
    search_seeds: int = 1
    search_epochs: int | None = None
    account_for_tuning: bool = False

    def __post_init__(self) -> None:
        if not self.contestants:
            raise ArgumentError("methods=(): name at least one method, or contestants in a file with --config")
        if len(self._named) < len(self.contestants):
            raise ArgumentError("contestants: two have the same name; each needs a name of its own")
        if not self.epsilon:
            raise ArgumentError("epsilon=None: give at least one, such as --epsilon 1,8")
        for name, values in (
            ("epsilon", self.epsilon),
            *((f"lr of {item.name}", item.lr) for item in self.contestants),
        ):
            if len(set(values)) < len(values):
                raise ArgumentError(f"{name}={values!r}: has a value twice")
        if not 1 <= self.seeds <= FIRST_SEARCH_SEED:
            raise ArgumentError(f"seeds={self.seeds!r}: must lie between 1 and {FIRST_SEARCH_SEED}")
        if self.search_seeds < 1:
            raise ArgumentError(f"search_seeds={self.search_seeds!r}: must be at least 1")
        if self.search_epochs is not None and self.search_epochs < 1:
            raise ArgumentError(f"search_epochs={self.search_epochs!r}: must be at least 1")
        for contestant in self.contestants:
            for rate in self.grid(contestant.name):
                if not rate > 0:
                    raise ArgumentError(f"lr of {contestant.name}={rate!r}: must be greater than 0")

    @cached_property
    def _named(self) -> dict[str, Contestant]:
        return {item.name: item for item in self.contestants}

    @cached_property
    def shared(self) -> Settings:
        """The settings of the first contestant, whose data, model, delta and backend are those of all."""
        return self._settings(self.contestants[0], self.epsilon[0], None, 0)

    def grid(self, contestant: str) -> tuple[float, ...]:
        """Return the learning rates a contestant tries, in increasing order."""
        named = self._named[contestant]
        return tuple(sorted(named.lr)) or (self._settings(named, self.epsilon[0], None, 0).learning_rate,)

    def settings_for(self, run: Run) -> Settings:
        """Return what `dpcore train` would be given for this run."""
        settings = self._settings(self._named[run.contestant], run.epsilon, run.lr, run.seed)
        if run.role == SEARCH and self.search_epochs is not None:
            settings = replace(settings, epochs=self.search_epochs)
        return settings

    def search(self, contestant: str, epsilon: float) -> list[Run]:
        """Return the runs that decide the learning rate; none where there is nothing to choose."""
        grid = self.grid(contestant)
        if len(grid) == 1:
            return []
        seeds = range(FIRST_SEARCH_SEED, FIRST_SEARCH_SEED + self.search_seeds)
        return [Run(contestant, epsilon, SEARCH, lr, seed) for lr in grid for seed in seeds]

    def final(self, contestant: str, epsilon: float, lr: float) -> list[Run]:
        """Return the runs that are compared."""
        return [Run(contestant, epsilon, FINAL, lr, seed) for seed in range(self.seeds)]

    def chosen(self, contestant: str, epsilon: float, accuracy: Mapping[Run, float]) -> float | None:
        """Return the learning rate with the best mean held-out accuracy, or None while the search is not complete.

        Of equally good ones the smallest is taken.
        """
        grid, search = self.grid(contestant), self.search(contestant, epsilon)
        if not search:
            return grid[0]
        if any(run not in accuracy for run in search):
            return None
        means = {lr: float(np.mean([accuracy[run] for run in search if run.lr == lr])) for lr in grid}
        return max(grid, key=lambda lr: (means[lr], -lr))

    def due(self, accuracy: Mapping[Run, float]) -> list[Run]:
        """Return the runs that may begin now, where those with an accuracy are complete."""
        ahead = self.ahead(accuracy)
        return [r for r in ahead if r.role == SEARCH or self.chosen(r.contestant, r.epsilon, accuracy) is not None]

    def ahead(self, accuracy: Mapping[Run, float]) -> list[Run]:
        """Return all runs to come, in the order in which they are made one after the other.

        Those whose learning rate is not chosen yet stand there with the smallest of their grid.
        """
        wanted: list[Run] = []
        for epsilon in self.epsilon:
            for contestant in self._named:
                lr = self.chosen(contestant, epsilon, accuracy)
                wanted += self.search(contestant, epsilon)
                wanted += self.final(contestant, epsilon, self.grid(contestant)[0] if lr is None else lr)
        return [run for run in wanted if run not in accuracy]

    @property
    def total(self) -> int:
        """The number of runs."""
        return len(self.epsilon) * sum(len(self.search(name, self.epsilon[0])) + self.seeds for name in self._named)

    @property
    def examples(self) -> list[Run]:
        """One run of each plan that occurs: contestant, epsilon and role decide it, learning rate and seed do not."""
        pairs = [(name, epsilon) for epsilon in self.epsilon for name in self._named]
        searches = [run for name, epsilon in pairs for run in self.search(name, epsilon)[:1]]
        return searches + [self.final(name, epsilon, self.grid(name)[0])[0] for name, epsilon in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain values, in the form of a configuration file."""
        own = {key: value for key, value in asdict(self).items() if key not in ("contestants", "common")}
        tables = {item.name: {**item.settings, "lr": list(self.grid(item.name))} for item in self.contestants}
        return {"backend": self.shared.backend, **self.common, **own, "contestants": tables}

    def words(self, contestant: str | None = None) -> str:
        """Return the settings of a contestant that differ among them, or those that all share; no learning rates."""
        known = {item.name: self._settings(item, self.epsilon[0], None, 0) for item in self.contestants}
        own = [key for key in SETTINGS if key not in (*SAME_FOR_ALL, "lr", "method")]
        differs = {key: len({repr(getattr(s, key)) for s in known.values()}) > 1 for key in own}
        shown = known[contestant or self.contestants[0].name]
        keys = [key for key in own if differs[key] == (contestant is not None)]
        values = {key: getattr(shown, key) for key in keys}
        return ", ".join(
            f"{key.replace('_', ' ')} {_said(value)}" for key, value in values.items() if value is not None
        )

    def method(self, contestant: str) -> str:
        """Return the method's name."""
        return str(self._named[contestant].settings["method"])

    def _settings(self, contestant: Contestant, epsilon: float, lr: float | None, seed: int) -> Settings:
        try:
            return settings_from({**self.common, **contestant.settings, "epsilon": epsilon, "lr": lr, "seed": seed})
        except ArgumentError as error:
            if len(self.contestants) == 1:
                raise
            raise ArgumentError(f"contestant {contestant.name!r}: {error}") from error


def _said(value: Any) -> str:
    if isinstance(value, float):
        return format_number(value)
    if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)):
        return "(" + ", ".join(_said(item) for item in value) + ")"
    return str(value)
