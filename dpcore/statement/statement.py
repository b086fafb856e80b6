"""The privacy statement of a run: its guarantee, the conditions and the limits."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from dpcore.accounting.branches import check_rows, count
from dpcore.errors import ArgumentError, DataError, DpcoreError
from dpcore.spec.canonical import INFINITE, digest, plain, read_json
from dpcore.statement.assumptions import BRIEFLY
from dpcore.statement.text import counted, format_delta, format_epsilon, format_lower, format_number, visible

FORMAT = 3

# The mechanism and its cost depend on these. The rest (steps taken, software, note) may differ between runs of a plan.
SETTINGS = ("adjacency", "unit", "sampler", "clip", "noise", "method", "steps_planned", "delta")
_EPSILONS = ("epsilon", "epsilon_planned", "epsilon_interval")
_NEIGHBORS = {
    "add-remove": "one {unit} added or removed",
    "zero-out": "one {unit} replaced by one that contributes nothing",
    "replace-one": "one {unit} replaced by any other",
}
_SECTIONS = (
    ("Sampling", "sampler"), ("Clipping", "clip"), ("Noise", "noise"), ("Method", "method"),
    ("Accounted event", "event"), ("How epsilon follows from it", "derivation"), ("Randomness", "randomness"),
    ("Ledger", "ledger"), ("Software", "software"),
)  # fmt: skip
# The JSON types of a field, by that of the dataclass.
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "dict": ((dict,), "an object"), "str": ((str,), "text"), "tuple": ((list, tuple), "a list"),
    "int": ((int,), "a number"), "float": ((int, float), "a number"),
}  # fmt: skip
# Written next to the fields, and compared with them when read.
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
        Optimizer steps.
    delta : float
        The delta at which epsilon is stated.
    epsilon : dict
        Epsilon by accountant, of `event`; ``inf`` (or "inf") means that there is no guarantee.
    event : dict
        The event that was accounted: of the steps taken, or of all planned steps if results decided to stop.
    randomness : dict
        Generator, origin of the key, and whether it is cryptographic.
    caveats : sequence of str
        The limits of the guarantee, one sentence each.
    software : dict, optional
        Versions by package, and the backend.
    epsilon_planned, event_planned : dict, optional
        The same of all planned steps.
    epsilon_interval : dict, optional
        "lower" and "upper", certified bounds on the smallest epsilon of `event`.
    attacker : dict, optional
        An attacker's limits under `event`: "advantage", and "true_positive_rate" by false positive rate.
    derivation : dict, optional
        One sentence for each accountant: how epsilon follows from the event.
    unit : str
        The unit of the adjacency: "example" or "user".
    steps_abandoned, rows_abandoned : int, tuple of (first, stop)
        Steps released on top of the steps taken, and counted; their places, for each branch that was left, or empty.
    ledger : dict, optional
        "ledger" (its id), "run" (the id of this run in it) and "total" (the cost of all runs in the ledger).
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
        rows = tuple(check_rows(item, self.steps_planned, "rows_abandoned") for item in self.rows_abandoned)
        object.__setattr__(self, "rows_abandoned", rows)
        if rows and count(rows) != self.steps_abandoned:
            raise ArgumentError(f"rows_abandoned={rows!r}: must be {self.steps_abandoned!r} rows, the steps abandoned")
        if not 0 <= self.delta < 1:
            raise ArgumentError(f"delta={self.delta!r}: must be at least 0 and less than 1")
        if not self.epsilon:
            raise ArgumentError("epsilon={}: must have at least one accountant's value")

    @property
    def best_epsilon(self) -> float:
        """The smallest of the accountants' epsilons: each is an upper bound, so the smallest is one."""
        return min(self.epsilon.values())

    @property
    def private(self) -> bool:
        """Whether anything is guaranteed at all."""
        return math.isfinite(self.best_epsilon)

    @property
    def steps_counted(self) -> int:
        """Number of steps that `event` is of: all planned ones if it is theirs, as after a stop by results."""
        return self.steps_planned if self.event == self.event_planned else self.steps_taken

    @property
    def dataset_size(self) -> int | None:
        """Number of examples n, taken to be public; None if the sampler does not state it."""
        size = self.sampler.get("dataset_size")
        return size if isinstance(size, int) and size > 0 else None

    @property
    def delta_is_small(self) -> bool | None:
        """Whether delta < 1/n; None without n. A delta of 1/n allows one example to be published outright."""
        return None if self.dataset_size is None else bool(self.delta < 1 / self.dataset_size)

    @property
    def delta_on_floats(self) -> float:
        """Delta with what the draws' distance from their law adds: the one that holds for the numbers released."""
        grid = self.noise.get("grid")
        distance = grid.get("law_distance") if isinstance(grid, dict) else None
        if not isinstance(distance, (int, float)) or not distance > 0:
            return self.delta
        return min(1.0, self.delta + (1.0 + math.exp(min(self.best_epsilon, 700.0))) * distance)

    @property
    def floats_matter(self) -> bool:
        """Whether that distance adds more than a tenth to delta: it may where epsilon is 10 and more."""
        return self.private and self.delta_on_floats > 1.1 * self.delta

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

    def summary(self, width: int = 80, *, full: bool = False) -> str:
        """Return the most important facts, in about ten lines of at most `width` characters; all fields if `full`."""
        return _text(self, width) if full else _summary(self, width)

    def text(self, width: int = 80) -> str:
        """Return ``summary(width, full=True)``, as a run's folder has it in statement.txt."""
        return self.summary(width, full=True)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Statement:
        """Return the statement of a `to_dict`; DataError for other content, or if it does not match its hashes."""
        statement = cls.unchecked(content)
        problems = {
            "its settings do not match their hash": content["settings_hash"] != statement.settings_hash,
            "its claim on delta and 1/n is wrong": content["delta_is_below_1/n"] is not statement.delta_is_small,
            "it does not match its hash": content["statement_hash"] != statement.statement_hash,
        }
        for problem, applies in problems.items():
            if applies:
                raise DataError(f"statement: {problem}; it was changed after it was written")
        return statement

    @classmethod
    def unchecked(cls, content: Mapping[str, Any]) -> Statement:
        """Return the statement of a `to_dict` without comparing hashes; DataError for other content."""
        if not isinstance(content, Mapping):
            raise DataError("statement: is not a JSON object")
        version = content.get("format")
        if version != FORMAT or isinstance(version, bool):
            newer = isinstance(version, int) and version > FORMAT
            hint = "; a newer dpcore wrote it, which is needed to read it" if newer else ""
            raise DataError(f"statement: has format {version!r}, expected {FORMAT}{hint}")
        names = {item.name for item in fields(cls)}
        expected = names | {"format", *_DERIVED}
        missing, unknown = expected - content.keys(), content.keys() - expected
        if missing or unknown:
            problem = f"lacks {sorted(missing)}" if missing else f"has unknown fields {sorted(unknown)}"
            raise DataError(f"statement: {problem}")
        for item in fields(cls):
            (kinds, words), value = _KINDS[_kind(item)], content[item.name]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise DataError(f"statement: {item.name}={value!r} must be {words}")
        try:
            return cls(**{name: content[name] for name in names})
        except DpcoreError as cause:
            raise DataError(f"statement: {cause}") from cause

    @classmethod
    def from_json(cls, content: str) -> Statement:
        """Return the statement of a `to_json`; DataError as `from_dict`."""
        try:
            value = read_json(content)
        except ValueError as cause:
            raise DataError(f"statement: is not JSON ({cause})") from cause
        return cls.from_dict(value)


def _kind(item: Field[Any]) -> str:
    return str(item.type).partition("[")[0]


def _epsilon(value: Any, where: str) -> float:
    if value == INFINITE:
        return math.inf
    if isinstance(value, (str, bool)) or not hasattr(value, "__float__") or not float(value) >= 0:
        raise ArgumentError(f'{where}={value!r}: must be a number of at least 0, or "inf"')
    return float(value)


def _summary(statement: Statement, width: int) -> str:
    """Return the most important facts in about ten lines, with one epsilon and a pointer to the rest."""
    sampler, noise, caveats = statement.sampler, statement.noise, statement.caveats
    neighbors = _neighbors(statement) or f"one {statement.unit}"
    size = "" if statement.dataset_size is None else f", of {statement.dataset_size:,}"
    rows = {"protected": f"{neighbors}{size} ({statement.adjacency} adjacency)"}
    if statement.private:
        rows["guarantee"] = (
            f"epsilon = {format_epsilon(statement.best_epsilon)}, delta = {format_delta(statement.delta)}"
        )
    else:
        rows["guarantee"] = "NOT PRIVATE: epsilon is infinite; handle what was released like the training data"
    if statement.delta_is_small is False:
        rows["WARNING"] = f"delta is not below 1/n: one {statement.unit} published outright has such a delta"
    if statement.floats_matter:
        holds = format_delta(statement.delta_on_floats)
        rows["ON FLOATS"] = f"WARNING: delta = {holds} at this epsilon, for the law that the draws have as floats"
    if statement.note:
        rows["note"] = statement.note
    expected = _value(sampler.get("expected_batch_size", "unknown"))
    drawn = sampler.get("sampler", "unknown")
    if statement.event.get("event") == "PrivateSelection":
        runs = _value(statement.event.get("expected_runs"))
        rows["selection"] = f"the best of a secret number of such runs, {runs} expected; epsilon covers the choice"
    rows["steps"] = f"{_steps(statement)}; {drawn} batches, {expected} {statement.unit}s expected"
    at_first = " at the first step" if "adaptive" in statement.clip else ""
    moved = _value(statement.clip.get("sensitivity", "an unknown amount"))
    rows["clipping"] = (
        f"{statement.clip.get('rule', 'unknown')} rule; one {statement.unit} moves the sum by at most {moved}{at_first}"
    )
    multiplier = _value(noise.get("noise_multiplier", "unknown"))
    correlated = f", correlated ({strategy.get('kind')})" if isinstance(strategy := noise.get("strategy"), dict) else ""
    rows["noise"] = f"Gaussian{correlated}, noise multiplier {multiplier}; {statement.randomness.get('rng', 'unknown')}"
    rows["method"] = str(statement.method.get("name", "custom"))
    known = statement.ledger
    rows["ledger"] = f"{known.get('ledger', '')}, run {known.get('run', '')}" if known else "none: counts this run only"
    brief = [BRIEFLY[caveat] for caveat in caveats if caveat in BRIEFLY]
    if len(caveats) > len(brief):
        brief.append(f"{len(caveats) - len(brief)} more")
    rows["not covered"] = ", ".join(brief) or "nothing is stated"
    rows["all of it"] = "summary(full=True) or dpcore statement --full; check: dpcore verify"
    lines = [line for name, words in rows.items() for line in _wrap(words, width, f"{name:13}")]
    return "\n".join(map(visible, ["Privacy statement", *lines])) + "\n"


def _text(statement: Statement, width: int) -> str:
    """Return the whole statement, headline first, in lines of at most `width` characters."""
    lines = ["Privacy statement", "=" * 17, ""]
    for paragraph in _paragraphs(statement):
        lines += [*_wrap(paragraph, width, ""), ""]
    lines += ["Epsilon"]
    known = {name: _stated(value) for name, value in statement.epsilon.items()}
    if statement.epsilon_interval:
        ends = statement.epsilon_interval["lower"], statement.epsilon_interval["upper"]
        known["certified"] = f"the smallest lies in [{format_lower(ends[0])}, {format_epsilon(ends[1])}]"
    when = f"after {_steps(statement)}"
    if statement.steps_counted > statement.steps_taken:
        when = f"all {statement.steps_planned:,} planned steps, {when}"
    lines += _entries(known | {"counted": when}, width, 2)
    if statement.epsilon_planned:
        planned = {name: _stated(value) for name, value in statement.epsilon_planned.items()}
        lines += ["", f"Epsilon after all {statement.steps_planned:,} planned steps", *_entries(planned, width, 2)]
    for title, name in _SECTIONS:
        content: dict[str, Any] = getattr(statement, name)
        if content:
            lines += ["", title, *_entries(content, width, 2)]
    if statement.caveats:
        lines += ["", "What this statement assumes and does not cover"]
        for caveat in statement.caveats:
            lines += _wrap(caveat, width, "  - ")
    lines += ["", "SHA-256", "  settings   " + statement.settings_hash, "  statement  " + statement.statement_hash]
    return "\n".join(map(visible, lines)) + "\n"


def _paragraphs(statement: Statement) -> list[str]:
    """Return the guarantee, its limits and its meaning, one paragraph each."""
    headline = (
        f"NOT PRIVATE. Epsilon is infinite: nothing is guaranteed about any {statement.unit}, and what this run "
        "produced must be handled like the training data itself."
    )
    if statement.private:
        neighbors = _neighbors(statement)
        meaning = f": data sets are neighbors if they differ in {neighbors}" if neighbors else ""
        headline = (
            f"What this run released is (epsilon, delta)-differentially private with epsilon = "
            f"{format_epsilon(statement.best_epsilon)} and delta = {format_delta(statement.delta)}, "
            f"for {statement.adjacency} adjacency{meaning}."
        )
    paragraphs = [headline]
    if statement.delta_is_small is False:
        n = statement.dataset_size
        paragraphs.append(
            f"WARNING: delta = {format_delta(statement.delta)} is not below 1/n = 1/{n}. A mechanism that publishes "
            f"one {statement.unit} chosen at random has such a delta; this one has not been shown to do better."
        )
    if statement.floats_matter:
        paragraphs.append(
            f"WARNING: delta = {format_delta(statement.delta)} is that of exact draws. For the numbers that are "
            f"released it is {format_delta(statement.delta_on_floats)}: (1 + exp(epsilon)) times the law distance is "
            "added, and at this epsilon it is not small. A smaller epsilon has a smaller one."
        )
    if statement.attacker and statement.private:
        paragraphs.append(_attack(statement))
    said = {"Note": statement.note, "Written": statement.date and f"{statement.date}."}
    return paragraphs + [f"{name}: {text}" for name, text in said.items() if text]


def _attack(statement: Statement) -> str:
    said: dict[str, Any] = statement.attacker
    rates = [
        f"{format_epsilon(100 * power, 3)} % at a false alarm rate of {format_epsilon(100 * float(rate), 3)} %"
        for rate, power in said["true_positive_rate"].items()
    ]
    unknown = f"whether one {statement.unit} counted"
    if statement.adjacency == "replace-one":
        unknown = f"which of two known ones one {statement.unit} is"
    return (
        f"What it means: whoever sees all that was released, and knows everything about the data but {unknown}, "
        f"finds out correctly with probability at most {' or '.join(rates)}; over all "
        f"tests the two rates differ by at most {format_epsilon(100 * said['advantage'], 3)} %."
    )


def _neighbors(statement: Statement) -> str:
    return _NEIGHBORS.get(statement.adjacency.replace("_", "-"), "").format(unit=statement.unit)


def _steps(statement: Statement) -> str:
    taken = f"{statement.steps_taken:,} of {statement.steps_planned:,} steps"
    if statement.steps_abandoned:
        taken += f", and {statement.steps_abandoned:,} that were abandoned"
        if statement.rows_abandoned:
            taken += f" on {counted(len(statement.rows_abandoned), 'branch', 'branches')}"
    return taken


def _stated(value: float) -> str:
    return "infinite (this accountant gives no guarantee)" if math.isinf(value) else format_epsilon(value)


def _entries(content: dict[str, Any], width: int, indent: int) -> list[str]:
    flat = {key: value for key, value in content.items() if not isinstance(value, dict)}
    column = min(30, max((len(key) for key in flat), default=0)) + indent + 2
    lines = []
    for key, value in content.items():
        label = " " * indent + key.replace("_", " ")
        if isinstance(value, dict):
            lines += [label, *_entries(value, width, indent + 2)]
            continue
        lead = label.ljust(column) if len(label) < column else label + "  "
        lines += textwrap.wrap(
            # A ledger's spent epsilon is nested here, and must not be rounded down either.
            format_epsilon(value) if key.startswith("epsilon") and isinstance(value, float) else _value(value),
            width,
            initial_indent=lead,
            subsequent_indent=" " * min(len(lead), column),
            break_on_hyphens=False,
        ) or [label]
    return lines


def _value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return format_number(value)
    if isinstance(value, list):
        return "; ".join(
            ", ".join(f"{key} {_value(inner)}" for key, inner in item.items())
            if isinstance(item, dict)
            else _value(item)
            for item in value
        )
    return "infinite" if value == "inf" else str(value)


def _wrap(text: str, width: int, bullet: str) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False
    )
