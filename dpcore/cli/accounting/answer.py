"""``dpcore epsilon``, ``delta`` and ``calibrate``: the cost of a plan, or a plan that meets a target.

Other commands share the options of a plan.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, ClassVar, TypeAlias

import typer

from dpcore import accounting, sampling
from dpcore.accounting import (
    OPACUS_ASSUMPTIONS,
    Adjacency,
    Event,
    Gaussian,
    PoissonSampledGaussian,
    from_opacus,
)
from dpcore.accounting.other_libraries import accountant_state
from dpcore.accounting.phases import demand_phases
from dpcore.cli.options import Json, count, name_or_file, one_of, option, real, takes
from dpcore.cli.output import remark, told_if_slow, write_answer, write_json, write_line
from dpcore.errors import ArgumentError, ArgumentTypeError, DataError, PrivacyError
from dpcore.ledger import Ledger, Remaining
from dpcore.methods import memf
from dpcore.plan.plan import Plan, tightest
from dpcore.sampling import Sampler
from dpcore.spec.canonical import read_json_file
from dpcore.spec.extras import needs
from dpcore.stages.strategies import NAMES
from dpcore.stages.strategies.saved import ENDINGS, named_or_saved
from dpcore.statement.text import counted, format_epsilon, format_lower, format_number

ACCOUNTED = (*sampling.NAMES, "full-batch")

_Real: TypeAlias = float | None
_Count: TypeAlias = int | None


@dataclass(frozen=True)
class EventOptions:
    """A plan from the options: each field is an option of this name. None means: not given."""

    # fmt: off
    noise_multiplier: Annotated[_Real, option(real, "SIGMA",
        "Standard deviation of the noise on the sum over the clip norm.")] = None
    sample_rate: Annotated[_Real, option(real, "RATE",
        "Probability that an example enters a step, such as 0.01 or 256/60000.")] = None
    dataset_size: Annotated[_Count, option(count, "N",
        "Number of examples; with --batch-size, replaces a rate.")] = None
    batch_size: Annotated[_Count, option(count, "N", "Expected number of examples in a batch.")] = None
    steps: Annotated[_Count, option(count, "N", "Number of optimizer steps.")] = None
    epochs: Annotated[_Real, option(real, "N", "Passes over the data, instead of --steps.")] = None
    sampling: Annotated[str, option(one_of(ACCOUNTED), "NAME",
        f"How batches are drawn: {', '.join(ACCOUNTED)}.")] = "poisson"
    max_batch_size: Annotated[_Count, option(count, "N",
        "Limit of truncated-poisson; by default exceeded once in a million steps.")] = None
    groups: Annotated[_Count, option(count, "N", "For cyclic-poisson: groups that take turns.")] = None
    strategy: Annotated[str | None, option(name_or_file(NAMES, ENDINGS), "NAME",
        f"Correlates the noise: {', '.join(NAMES)}, or a file ({', '.join(ENDINGS)}).")] = None
    bands: Annotated[_Count, option(count, "N",
        "Bands of --strategy banded-inverse-square-root, which needs it.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        if self.steps is not None and self.epochs is not None:
            raise ArgumentError("steps, epochs: give one of --steps and --epochs, not both")
        if self.epochs is not None and self.epochs <= 0:
            raise ArgumentError(f"epochs={self.epochs!r}: must be greater than 0")
        if self.sample_rate is not None:
            if self.batch_size is not None:
                raise ArgumentError(
                    "sample_rate: give either --sample-rate, or --dataset-size with --batch-size, not both"
                )
            if not 0 < self.sample_rate <= 1:
                raise ArgumentError(f"sample_rate={self.sample_rate!r}: must be greater than 0 and at most 1")
            if self.sampling not in ("poisson", "truncated-poisson"):
                raise ArgumentError(f"sample_rate: is not for --sampling {self.sampling}; {self._sizes}")
        for name, kind in {"max_batch_size": "truncated-poisson", "groups": "cyclic-poisson"}.items():
            if getattr(self, name) is not None and self.sampling != kind:
                option = name.replace("_", "-")
                raise ArgumentError(f"{name}={getattr(self, name)!r}: --{option} is only for --sampling {kind}")
        if self.batch_size is not None and self.sampling == "full-batch":
            raise ArgumentError(f"batch_size={self.batch_size!r}: must be left out with --sampling full-batch")
        if self.bands is not None and self.strategy is None:
            raise ArgumentError(f"bands={self.bands!r}: is only for --strategy banded-inverse-square-root")

    @property
    def _sizes(self) -> str:
        """The options that the sampling needs."""
        return _SIZES.get(self.sampling, "give --dataset-size and --batch-size")

    def event(self) -> Event:
        """Return the event of the plan; ArgumentError if an option is missing or contradicts another."""
        if self.noise_multiplier is None:
            raise ArgumentError("noise_multiplier: give --noise-multiplier")
        if self.steps is None and self.epochs is None:
            raise ArgumentError("steps, epochs: give one of --steps and --epochs")
        sampler, sigma = self.sampler(), self.noise_multiplier
        if self.strategy is not None:
            if sampler is None:
                raise ArgumentError(
                    f"strategy={self.strategy!r}: needs --dataset-size and --batch-size, and a --sampling other than "
                    "full-batch"
                )
            named: Any = sampler  # frozen: it can be looked up
            unit: Any = _correlated(self.strategy, self.bands, named, self.steps_in_all)
            event: Event = replace(unit, noise_multiplier=sigma)
            return event
        if sampler is not None:
            return sampler.event(sigma, self.steps_in_all)
        if self.sample_rate is None:
            return Gaussian(sigma, self.steps_in_all, Adjacency.ZERO_OUT)
        # The rate is not rounded to a multiple of 2^-32, as that of a run is.
        return PoissonSampledGaussian(self.sample_rate, sigma, self.steps_in_all)

    @property
    def words(self) -> str:
        """The plan in words."""
        sampler, total, said = self.sampler(), self.steps_in_all, _WORDS[self.sampling]
        rate = self.sample_rate if sampler is None else getattr(sampler, "sample_rate", None)
        said += "" if rate is None else f" at rate {rate:.6g}"
        if self.sampling == "truncated-poisson":
            said += f" cut off at {getattr(sampler, 'max_batch_size', None):,} examples"
        if self.sampling == "fixed-size":
            said += f" of {self.batch_size:,} of {self.dataset_size:,} examples"
        if self.groups is not None:
            said += f" in {counted(self.groups, 'group')}"
        taken = counted(total, "step")
        if self.sampling in ("fixed-order", "shuffled"):
            taken = f"each example in {getattr(sampler, 'participations', int)(total):,} of {taken}"
        correlated = "" if self.strategy is None else f", noise correlated by {self.strategy}"
        return f"{said}, {taken}{correlated}"

    @property
    def steps_per_epoch(self) -> int:
        """The steps of one pass over the data; 1 if one step is a pass, or if the length of a pass is unknown."""
        sampler = self.sampler()
        if sampler is not None:
            return sampler.steps_per_epoch
        return 1 if self.sample_rate is None else math.ceil(round(1 / self.sample_rate, 9))

    @property
    def steps_in_all(self) -> int:
        """The given number of steps, or that of the epochs, rounded up."""
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * self.steps_per_epoch)

    def sampler(self) -> Sampler | None:
        """Return the sampler of the sizes; None if a rate is given without them, and for full batches."""
        size, batch, rate = self.dataset_size, self.batch_size, self.sample_rate
        if self.sampling == "cyclic-poisson" and self.groups is None:
            raise ArgumentError("groups: give --groups, the number of groups that take turns")
        if self.sampling == "full-batch":
            return None
        if self.sampling == "poisson" and rate is not None and size is None:
            return None
        if size is None or (batch is None and rate is None):
            name = "sample_rate" if self.sampling == "poisson" else "dataset_size"
            raise ArgumentError(f"{name}: {self._sizes}")
        return sampling.sampler(
            self.sampling,
            dataset_size=size,
            batch_size=batch,
            sample_rate=rate,
            max_batch_size=self.max_batch_size,
            groups=self.groups,
        )


@lru_cache(maxsize=4)
def _correlated(strategy: str, bands: int | None, sampler: Any, steps: int) -> Event:
    """Return the event of a run with correlated noise, at noise multiplier 1."""
    method = memf(lr=1.0, strategy=named_or_saved(strategy, bands), noise_multiplier=1.0)
    return Plan(method, sampler, steps).event


_WORDS = {"poisson": "Poisson sampling", "truncated-poisson": "Poisson sampling", "fixed-size": "uniform subsets",
    "fixed-order": "a fixed order of batches", "shuffled": "a fresh order every epoch (no amplification)",
    "cyclic-poisson": "cyclic Poisson sampling", "random-allocation": "one random batch of every epoch",
    "full-batch": "the full batch"}  # fmt: skip
_SIZES = {
    "poisson": "give --sample-rate, or --dataset-size with --batch-size",
    "truncated-poisson": "give --dataset-size, with --batch-size or --sample-rate",
    "full-batch": "give --steps",
}


@dataclass(frozen=True)
class OpacusHistory:
    """The run in a file of Opacus, used in an answer instead of `EventOptions`."""

    mechanism: str
    recorded: Event
    assumptions: ClassVar[tuple[str, ...]] = OPACUS_ASSUMPTIONS
    noise_multiplier: ClassVar[None] = None  # the phases have theirs
    dataset_size: ClassVar[None] = None

    def event(self) -> Event:
        """Return the run's event."""
        return self.recorded

    @property
    def words(self) -> str:
        """The run in words."""
        counts = [getattr(part, "steps", 0) for part in getattr(self.recorded, "events", (self.recorded,))]
        if len(counts) > 1:
            return f"Poisson sampling, {sum(counts):,} steps in {len(counts):,} phases, recorded by Opacus"
        rate, noise = (getattr(self.recorded, name, 0.0) for name in ("sample_rate", "noise_multiplier"))
        return (
            f"Poisson sampling at rate {rate:.6g}, {counts[0]:,} steps, noise multiplier {noise:g}, recorded by Opacus"
        )

    def described(self) -> dict[str, Any]:
        """Return the run for a program."""
        return {"mechanism": self.mechanism, "holds_if": list(self.assumptions)}


def run_or_plan(file: Path | None, given: Mapping[str, Any]) -> EventOptions | OpacusHistory:
    """Return the run in the file, or without a file the plan that the options describe."""
    if file is None:
        return EventOptions(**given)
    extra = [item.name for item in fields(EventOptions) if given[item.name] != item.default]
    if extra:
        raise ArgumentError(f"opacus: the file describes the run; leave out --{extra[0].replace('_', '-')}")
    return history(file)


def history(file: Path) -> OpacusHistory:
    """Return the run in a file."""
    try:
        state = _state(file)
        event = from_opacus(state)
        demand_phases(event)  # counts that add up beyond float64 are refused here, with the file's name
    except (ArgumentError, ArgumentTypeError) as cause:
        raise DataError(f"{file}: {str(cause).removeprefix('state: ')}") from cause
    return OpacusHistory(str(state.get("mechanism")), event)


def _state(file: Path) -> Mapping[str, Any]:
    """Return the state of Opacus's accountant in a checkpoint or a JSON file."""
    with file.open("rb") as opened:
        is_json = opened.read(1) in (b"{", b"[", b" ", b"\n", b"\t", b"\r")
    if is_json:
        try:
            content = read_json_file(file)
        except ValueError as cause:
            raise DataError(f"{file}: is not JSON ({cause})") from cause
        return accountant_state(content)
    try:
        from dpcore.torch.opacus import read_opacus_checkpoint
    except ImportError as cause:
        more = "a JSON file with the accountant's state_dict() is read without"
        raise DataError(f"{file}: {needs('reading a checkpoint', 'torch')}; {more}") from cause
    return read_opacus_checkpoint(file)


_Bound = Callable[[Event, float, str], float]

Accountant = Annotated[str | None, option(one_of(accounting.available_accountants), "NAME",
    "The accountant; by default the tightest that covers the event.")]  # fmt: skip


@dataclass(frozen=True)
class AnswerOptions(EventOptions):
    """The options of ``epsilon`` and ``delta``: those of a plan, and how to answer."""

    accountant: Accountant = None
    # fmt: off
    opacus: Annotated[Path | None, option(Path, "FILE",
        "A run of Opacus, not a plan: its checkpoint, or its accountant's state_dict() as JSON.")] = None
    # fmt: on
    as_json: Json = False


def accounts(table: type = EventOptions) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take the options of a plan, and report a long computation."""
    slow = told_if_slow("certified bounds on the privacy loss")
    return lambda command: takes(table)(slow(command))


def bounds_of(
    bound: _Bound, event: Event, at: float, chosen: str | None, every: bool = False
) -> tuple[str, dict[str, float]]:
    """Return the requested accountant, or the one with the smallest bound, and the upper bounds by accountant.

    The bound is `accounting.epsilon` at a delta, or `accounting.delta` at an epsilon. If one accountant is requested,
    the others are left out, unless `every` one is wanted. PrivacyError if none covers the event.
    """
    names = accounting.accountants_for(event)
    if chosen is not None and not (every and chosen in names):
        names = (chosen,)
    if not names:
        raise PrivacyError(f"event={type(event).__name__}: no accountant of this version covers it")
    bounds = {name: bound(event, at, name) for name in names}
    return chosen or min(bounds, key=lambda name: bounds[name]), bounds


def sentence(accountant: str, plan: EventOptions | OpacusHistory, event: Event) -> str:
    """Return the question in words."""
    noise = "" if plan.noise_multiplier is None else f", noise multiplier {plan.noise_multiplier:g}"
    return f"{accountant} accountant, {event.adjacency} adjacency, {plan.words}{noise}"


# A larger delta gets a remark even if the number of examples is unknown: few data sets have fewer than 1,000.
_LARGE_DELTA = 1e-3


def remark_on_delta(delta: float, plan: EventOptions | OpacusHistory, event: Event) -> str | None:
    """Remark on standard error if delta is not below 1/n, or is large and n unknown; return the sentence."""
    size = plan.dataset_size if plan.dataset_size is not None else accounting.known_dataset_size(event)
    sentence = accounting.delta_remark(delta, size)
    if sentence is not None:
        # With the digits of the answer; a computed value has many more.
        sentence = accounting.delta_remark(min(float(format_epsilon(delta)), 0.9999), size)
    elif size is None:
        sentence = large_delta(delta)
    remark(sentence)
    return sentence


def large_delta(delta: float) -> str | None:
    """Return a sentence if a delta is large for any data set, else None."""
    if delta <= _LARGE_DELTA:
        return None
    return (
        f"delta={format_epsilon(delta)}: ought to be well below 1/n, and is below it for fewer than "
        f"{math.ceil(1.0 / delta):,} examples only"
    )


def described(event: Event) -> dict[str, Any]:
    """Return the JSON of an event that every answer includes."""
    return {"adjacency": str(event.adjacency), "event": event.to_dict()}


@accounts(AnswerOptions)
def epsilon(delta: Annotated[float, option(real, "DELTA", "Well below 1/N; for example 1e-5.")], **given: Any) -> None:
    """Compute the epsilon of a noise multiplier."""
    _answer("epsilon", "delta", delta, **given)


@accounts(AnswerOptions)
def delta(epsilon: Annotated[float, option(real, "EPSILON", "0 or more, for example 3.")], **given: Any) -> None:
    """Compute the delta of a plan at an epsilon."""
    _answer("delta", "epsilon", epsilon, **given)


def _answer(
    wanted: str, other: str, at: float, *, accountant: str | None, opacus: Path | None, as_json: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Write the bound on epsilon or delta at a value of the other, its certified interval, and each accountant's."""
    plan = run_or_plan(opacus, given)
    event = plan.event()
    bound: Callable[..., float] = accounting.delta
    bounds: Callable[..., tuple[float, float]] = accounting.delta_interval
    if wanted == "epsilon":
        bound, bounds = accounting.epsilon, accounting.epsilon_interval
    name, table = bounds_of(bound, event, at, accountant, as_json)
    value = table[name]
    interval = bounds(event, at) if name == "pld" else None
    stated = value if wanted == "delta" else at
    remark = remark_on_delta(stated, plan, event) if wanted == "epsilon" or 0 < value < 1 else None
    if as_json:
        ends = {} if interval is None else {"interval": list(interval)}
        rests = plan.described() if isinstance(plan, OpacusHistory) else {}
        write_json({wanted: value, other: at, "accountant": name, **ends, "accountants": table,
            **described(event), **({} if remark is None else {"remark": remark}), **rests})  # fmt: skip
        return
    # If anything was released, an upper bound of 0 is an underflow of float64.
    underflow = wanted == "delta" and value == 0.0 and bound(event, 0.0, name) > 0.0
    write_line(f"{wanted} = {'below 1e-300' if underflow else format_epsilon(value)} at {other} = {format_number(at)}")
    write_line(sentence(name, plan, event))
    if value == math.inf:
        write_line("Infinite: there is no guarantee at all.")
    if wanted == "delta" and value == 1.0:
        write_line("A delta of 1 is no guarantee at all.")
    if interval is not None and math.isfinite(interval[1]):
        low, high = format_lower(interval[0]), format_epsilon(interval[1])
        write_line(f"certified: the smallest {wanted} is in [{low}, {high}]")
    if isinstance(plan, OpacusHistory):
        if plan.mechanism == "gdp":
            write_line("Opacus's own gdp accountant approximates, and may report less.")
        write_line("It holds if:")
        for one in plan.assumptions:
            write_line("\n".join(wrap(one, 80, initial_indent="  - ", subsequent_indent="    ")))


@accounts()
def calibrate(
    epsilon: Annotated[float | None, option(real, "EPSILON", "The target, for example 3.")] = None,
    delta: Annotated[float | None, option(real, "DELTA", "Well below 1/N; for example 1e-5.")] = None,
    ledger: Annotated[Path | None, typer.Option(metavar="FILE",
        help="Use the rest of this ledger's budget instead of a target.")] = None,
    accountant: Accountant = None,
    as_json: Json = False,
    **given: Any,
) -> None:  # fmt: skip
    """Find the noise, the steps, the batch size or the delta for a target epsilon, whichever is left out."""
    plan, opened = EventOptions(**given), None if ledger is None else Ledger.open(ledger, read_only=True)
    if opened is not None:
        if epsilon is not None or delta is not None:
            raise ArgumentError(f"--ledger {ledger}: has the target, its budget; leave out --epsilon and --delta")
        opened.remaining()  # refuses a ledger without a budget
        epsilon, delta = opened.budget or (None, None)
    unknown = _unknown(plan, delta)
    if epsilon is None:
        raise ArgumentError("epsilon: give the target, as --epsilon 3; dpcore epsilon computes that of a complete plan")
    if unknown == "delta":
        event = plan.event()
        name, bounds = bounds_of(accounting.delta, event, epsilon, accountant)
        value: float = bounds[name]
        known, reached, delta = plan, epsilon, value
    else:
        assert delta is not None
        # With groups that take turns, a batch has the examples of one at most.
        setting, size = unknown.replace("-", "_"), max(1, (plan.dataset_size or 1) // (plan.groups or 1))
        make_event: Callable[[Any], Event] = lambda found: replace(plan, **{setting: found}).event()  # noqa: E731
        value, name = tightest(setting, epsilon, delta, make_event, accountant, size)
        if opened is not None:
            value = _paid(opened.remaining(), unknown, value, make_event)
        settings: Any = {setting: value}
        known = replace(plan, **settings)
        event = known.event()
        reached = accounting.epsilon(event, delta, name)
    if value == 0 and unknown != "delta":
        raise PrivacyError(
            f"epsilon={format_number(epsilon)}: not even one step meets it at delta={format_number(delta)}; more noise "
            "(--noise-multiplier) is needed, or a larger epsilon"
        )
    remark = remark_on_delta(delta, plan, event) if 0 < delta < 1 else None
    result = {unknown.replace("-", "_"): value, "unknown": unknown, "epsilon": reached,
        "target_epsilon": epsilon, "delta": delta, "accountant": name, **described(event),
        **({} if opened is None else {"ledger": opened.ledger_id}),
        **({} if remark is None else {"remark": remark})}  # fmt: skip
    lines = [f"{unknown.replace('-', ' ')} = {_safe(unknown, value)}"]
    at = _safe(unknown, value) if unknown == "delta" else format_number(delta)
    lines.append(f"gives epsilon = {format_epsilon(reached)} at delta = {at}{'' if opened is None else ' by itself'}")
    said, epoch = sentence(name, known, event), known.steps_per_epoch
    lines.append(said.rpartition(", noise")[0] if unknown == "noise-multiplier" else said)
    if unknown == "steps" and epoch > 1:
        whole, more = divmod(int(value), epoch)
        rest = f", and {more:,} more" if more else ""
        lines.append(f"{counted(int(value), 'step')}: {counted(whole, 'epoch')} of {epoch:,} steps{rest}")
    if opened is not None:
        lines.append(f"the rest of the budget of the ledger {opened.name or opened.path.name} pays for the whole plan")
    write_answer(as_json, result, *lines)


def _paid(left: Remaining, unknown: str, alone: float, make_event: Callable[[Any], Event]) -> float:
    """Return the value that a ledger's rest pays for; `alone` is that of its whole budget."""
    if unknown not in ("noise-multiplier", "steps"):
        raise ArgumentError(f"--ledger: answers for the noise multiplier or the steps, not for the {unknown}")
    if left.fits(make_event(alone)):
        return alone
    return left.steps(make_event, int(alone)) if unknown == "steps" else left.noise_multiplier(make_event)


def _unknown(plan: EventOptions, delta: float | None) -> str:
    """Return the one thing that was left out."""
    left_out = {
        "noise-multiplier": plan.noise_multiplier is None,
        "steps": plan.steps is None and plan.epochs is None,
        "batch-size": plan.sample_rate is None and plan.batch_size is None and plan.sampling != "full-batch",
        "delta": delta is None,
    }
    names = [name for name, missing in left_out.items() if missing]
    needed = "exactly one of noise-multiplier, steps, batch-size, delta must be left out, and "
    if not names:
        raise ArgumentError(f"{needed}none is; dpcore epsilon computes the epsilon of a complete plan")
    if len(names) > 1:
        give = {"steps": "--steps or --epochs", "batch-size": "--sample-rate, or --dataset-size with --batch-size"}
        # Most people want the noise; if it is given, suggest the first.
        rest = "; ".join(give.get(name, f"--{name}") for name in names[1:])
        raise ArgumentError(f"{needed}these are: {', '.join(names)}. For the {names[0].replace('-', ' ')}, give {rest}")
    if names == ["batch-size"] and plan.dataset_size is None:
        raise ArgumentError("dataset_size: give --dataset-size to find the batch size")
    return names[0]


def _safe(unknown: str, value: float) -> str:
    """Return the value so rounded that typing it in again keeps the target."""
    if unknown in ("steps", "batch-size"):
        return f"{int(value)}"
    return format_epsilon(value, digits=6)
