"""``dpcore epsilon``, ``delta`` and ``calibrate``: what a plan costs, or which plan meets a target.

Other commands share the options of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache, wraps
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, ClassVar, TypeAlias

import typer

from dpcore import accounting, sampling
from dpcore.accounting import (
    OPACUS_ASSUMPTIONS,
    Adjacency,
    Composed,
    CyclicPoissonSampledGaussian,
    Event,
    Gaussian,
    PoissonSampledGaussian,
    from_opacus,
)
from dpcore.accounting.other_libraries import accountant_state
from dpcore.accounting.phases import demand_phases
from dpcore.cli.options import Json, count, flag, multiplier, name_or_file, one_of, option, real, takes
from dpcore.cli.output import remark, told_if_slow, write_answer, write_json, write_line
from dpcore.errors import ArgumentError, ArgumentTypeError, BudgetError, DataError, PrivacyError
from dpcore.ledger import Ledger, Remaining
from dpcore.methods import memf
from dpcore.plan.plan import Plan
from dpcore.sampling import Sampler
from dpcore.spec.canonical import read_json_file
from dpcore.spec.extras import needs
from dpcore.stages.strategies import NAMES, NamedStrategy, load
from dpcore.stages.strategies.saved import ENDINGS
from dpcore.statement.text import counted, format_epsilon, format_lower, format_number

ACCOUNTED = (*sampling.NAMES, "full-batch")

_Real: TypeAlias = float | None
_Count: TypeAlias = int | None


@dataclass(frozen=True)
class EventOptions:
    """A plan as the options give it: each field is an option of this name. None means: not given."""

    # fmt: off
    noise_multiplier: Annotated[_Real, option(multiplier, "SIGMA",
        "Standard deviation of the noise on the sum over the clip norm.")] = None
    sample_rate: Annotated[_Real, option(real, "RATE",
        "Probability that an example enters a step, such as 0.01 or 256/60000.")] = None
    dataset_size: Annotated[_Count, option(count, "N",
        "Number of examples; with --batch-size instead of a rate.")] = None
    batch_size: Annotated[_Count, option(count, "N", "Expected number of examples in a batch.")] = None
    steps: Annotated[_Count, option(count, "N", "Number of optimizer steps.")] = None
    epochs: Annotated[_Real, option(real, "N", "Passes over the data, instead of --steps.")] = None
    sampling: Annotated[str, option(one_of(ACCOUNTED), "NAME",
        f"How batches are drawn: {', '.join(ACCOUNTED)}.")] = "poisson"
    max_batch_size: Annotated[_Count, option(count, "N",
        "Of truncated-poisson; by default passed once in a million steps.")] = None
    groups: Annotated[_Count, option(count, "N", "Of cyclic-poisson: groups that take turns.")] = None
    strategy: Annotated[str | None, option(name_or_file(NAMES, ENDINGS), "NAME",
        f"Correlates the noise: {', '.join(NAMES)}, or a file ({', '.join(ENDINGS)}).")] = None
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
            if self.sampling in _A_NAME:
                raise ArgumentError(
                    f"sample_rate: {_A_NAME[self.sampling]} has none; give --epochs, or --dataset-size with "
                    "--batch-size"
                )
            if self.sampling in ("fixed-size", "full-batch", "random-allocation"):
                raise ArgumentError(f"sample_rate: is not for --sampling {self.sampling}; {_SIZES[self.sampling]}")
        for name, kind in {"max_batch_size": "truncated-poisson", "groups": "cyclic-poisson"}.items():
            if getattr(self, name) is not None and self.sampling != kind:
                option = name.replace("_", "-")
                raise ArgumentError(f"{name}={getattr(self, name)!r}: --{option} is only for --sampling {kind}")

    def with_(self, name: str, value: Any) -> EventOptions:
        """Return the plan with one setting more; `name` is that of the option, without the dashes before it."""
        return replace(self, **{name.replace("-", "_"): value})

    def after(self, steps: int) -> EventOptions:
        """Return the same plan with so many steps."""
        if self.sampling in _A_NAME and self.dataset_size is None:
            # Without sizes a step is an epoch.
            return replace(self, epochs=float(steps), steps=None)
        return replace(self, steps=steps, epochs=None)

    def event(self) -> Event:
        """Return what is released; ArgumentError says which option is missing, or contradicts another."""
        if self.noise_multiplier is None:
            raise ArgumentError("noise_multiplier: give --noise-multiplier")
        if self.steps is None and self.epochs is None:
            raise ArgumentError("steps, epochs: give one of --steps and --epochs")
        sampler, sigma = self.sampler(), self.noise_multiplier
        if self.strategy is not None:
            if sampler is None:
                raise ArgumentError(f"strategy={self.strategy!r}: needs --dataset-size and --batch-size")
            named: Any = sampler  # frozen: it can be looked up
            unit: Any = _correlated(self.strategy, named, self.steps_in_all)
            event: Event = replace(unit, noise_multiplier=sigma)
            return event
        if sampler is not None:
            return sampler.event(sigma, self.steps_in_all)
        if self.sample_rate is not None:
            # Taken as it is: the rounding of a run's rate to a multiple of 2^-32 is not asked for here.
            if self.groups is None:
                return PoissonSampledGaussian(self.sample_rate, sigma, self.steps_in_all)
            return CyclicPoissonSampledGaussian(self.sample_rate, self.groups, sigma, 1.0, self.steps_in_all)
        if self.sampling in _A_NAME and self.epochs is None:
            name = _A_NAME[self.sampling]
            raise ArgumentError(f"steps: for {name} give --epochs instead, or add --dataset-size and --batch-size")
        return Gaussian(sigma, self.steps_in_all, Adjacency.ZERO_OUT)

    @property
    def words(self) -> str:
        """The same for a person."""
        sampler, total, said = self.sampler(), self.steps_in_all, _WORDS[self.sampling]
        if self.sampling in _A_NAME:
            used = getattr(sampler, "participations", int)(total)
            whole = f"each example in {used:,} of {counted(total, 'step')}"
            said = f"{said}, {counted(total, 'epoch') if sampler is None else whole}"
        else:
            rate = self.sample_rate if sampler is None else getattr(sampler, "sample_rate", None)
            said += "" if rate is None else f" at rate {rate:.6g}"
            if self.sampling == "truncated-poisson":
                said += f" cut off at {getattr(sampler, 'max_batch_size', None):,} examples"
            if self.sampling == "fixed-size":
                said += f" of {self.batch_size:,} of {self.dataset_size:,} examples"
            if self.groups is not None:
                said += f" in {counted(self.groups, 'group')}"
            said += f", {counted(total, 'step')}"
        return said if self.strategy is None else f"{said}, noise correlated by {self.strategy}"

    @property
    def steps_per_epoch(self) -> int:
        """The steps of one pass over the data; 1 where one step is a pass, and where nothing says how long one is."""
        sampler = self.sampler()
        if sampler is not None:
            return sampler.steps_per_epoch
        return 1 if self.sample_rate is None else math.ceil(round((self.groups or 1) / self.sample_rate, 9))

    @property
    def steps_in_all(self) -> int:
        """The number of steps as given, or that of the epochs, a last part of an epoch rounded up."""
        return self.steps if self.steps is not None else math.ceil((self.epochs or 0) * self.steps_per_epoch)

    def sampler(self) -> Sampler | None:
        """Return the sampler of the sizes; None where rates or epochs are given without them."""
        size, batch, rate = self.dataset_size, self.batch_size, self.sample_rate
        if self.sampling == "cyclic-poisson" and self.groups is None:
            raise ArgumentError("groups: give --groups, the number of groups that take turns")
        if self.sampling == "full-batch" or (self.sampling in _A_NAME and None in (size, batch)):
            return None
        if rate is not None and (self.sampling == "cyclic-poisson" or (self.sampling == "poisson" and size is None)):
            return None
        if size is None or (batch is None and rate is None):
            name = "dataset_size" if self.sampling == "truncated-poisson" else "sample_rate"
            raise ArgumentError(f"{name}: {_SIZES[self.sampling]}")
        return sampling.sampler(
            self.sampling,
            dataset_size=size,
            batch_size=batch,
            sample_rate=rate,
            max_batch_size=self.max_batch_size,
            groups=self.groups,
        )


@lru_cache(maxsize=4)
def _correlated(strategy: str, sampler: Any, steps: int) -> Event:
    """Return the event of a run with correlated noise, at noise multiplier 1."""
    chosen = load(strategy) if Path(strategy).suffix.lower() in ENDINGS else NamedStrategy(strategy)
    return Plan(memf(lr=1.0, strategy=chosen, noise_multiplier=1.0), sampler, steps).event


_A_NAME = {"fixed-order": "a fixed order", "shuffled": "a shuffled order"}
_WORDS = {"poisson": "Poisson sampling", "truncated-poisson": "Poisson sampling", "fixed-size": "uniform subsets",
    "fixed-order": "a fixed order of batches", "shuffled": "a fresh order every epoch (no amplification)",
    "cyclic-poisson": "cyclic Poisson sampling", "random-allocation": "one random batch of every epoch",
    "full-batch": "the full batch"}  # fmt: skip
_SIZES = {
    "poisson": "give --sample-rate, or --dataset-size with --batch-size",
    "truncated-poisson": "give --dataset-size, with --batch-size or --sample-rate",
    "fixed-size": "give --dataset-size and --batch-size",
    "cyclic-poisson": "give --sample-rate, or --dataset-size with --batch-size",
    "random-allocation": "give --dataset-size and --batch-size",
    "full-batch": "give --steps",
}


Opacus = Annotated[Path | None, option(Path, "FILE",
    "What a run of Opacus cost: its checkpoint, or its accountant's state_dict() as JSON; no plan then.")]  # fmt: skip


@dataclass(frozen=True)
class OpacusHistory:
    """What the file of a run of Opacus holds; in an answer it stands where `EventOptions` does."""

    mechanism: str
    recorded: Event
    assumptions: ClassVar[tuple[str, ...]] = OPACUS_ASSUMPTIONS
    noise_multiplier: ClassVar[None] = None  # the phases have theirs
    dataset_size: ClassVar[None] = None

    def event(self) -> Event:
        """Return what was released."""
        return self.recorded

    @property
    def words(self) -> str:
        """The same for a person."""
        counts = [getattr(part, "steps", 0) for part in getattr(self.recorded, "events", (self.recorded,))]
        if len(counts) > 1:
            return f"Poisson sampling, {sum(counts):,} steps in {len(counts):,} phases, recorded by Opacus"
        rate, noise = (getattr(self.recorded, name, 0.0) for name in ("sample_rate", "noise_multiplier"))
        return (
            f"Poisson sampling at rate {rate:.6g}, {counts[0]:,} steps, noise multiplier {noise:g}, recorded by Opacus"
        )

    def described(self) -> dict[str, Any]:
        """Return the same for a program."""
        return {"mechanism": self.mechanism, "holds_if": list(self.assumptions)}


def asked(file: Path | None, given: Mapping[str, Any]) -> EventOptions | OpacusHistory:
    """Return the run in the file, or without one the plan that the options describe."""
    if file is None:
        return EventOptions(**given)
    extra = [item.name for item in fields(EventOptions) if given[item.name] != item.default]
    if extra:
        raise ArgumentError(f"opacus: the file says what was run; leave out --{extra[0].replace('_', '-')}")
    return history(file)


def history(file: Path) -> OpacusHistory:
    """Return the run in a file."""
    with file.open("rb") as opened:
        is_json = opened.read(1) in (b"{", b"[", b" ", b"\n", b"\t", b"\r")
    try:
        if is_json:
            try:
                state = accountant_state(read_json_file(file))
            except ArgumentError:
                raise
            except ValueError as cause:
                raise DataError(f"{file}: is not JSON ({cause})") from cause
        else:
            try:
                from dpcore.torch.opacus import read_opacus_checkpoint
            except ImportError as cause:
                raise DataError(
                    f"{file}: {needs('reading a checkpoint', 'torch')}; a JSON file with the accountant's state_dict() "
                    "is read without"
                ) from cause
            state = read_opacus_checkpoint(file)
        event = from_opacus(state)
        demand_phases(event)  # counts that add up beyond float64 are refused here, with the file's name
        return OpacusHistory(str(state.get("mechanism")), event)
    except (ArgumentError, ArgumentTypeError) as cause:
        raise DataError(f"{file}: {str(cause).removeprefix('state: ')}") from cause


_Bound = Callable[[Event, float, str], float]

Accountant = Annotated[str | None, option(one_of(accounting.available_accountants), "NAME",
    "The accountant; the tightest that covers it if not given.")]  # fmt: skip
AllAccountants = Annotated[bool, flag("--all", "Also show what every other accountant says.")]


def accounts(where: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Let a command take the options of a plan, and say what it computes if that takes long.

    `where` says what makes one bound into many, as ", at every point of the curve".
    """

    def changed(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def told(*args: Any, **given: Any) -> Any:
            steps = given.get("steps")
            whose = "a plan" if steps is None else counted(steps, "step")
            whose = "what Opacus recorded" if given.get("opacus") else whose
            with told_if_slow(f"certified bounds on the privacy loss of {whose}{where}"):
                return command(*args, **given)

        return takes(EventOptions)(told)

    return changed


def bounds_of(
    bound: _Bound, event: Event, at: float, asked: str | None, every: bool = False
) -> tuple[str, dict[str, float]]:
    """Return the accountant asked for, or the one with the smallest bound, and the upper bounds by accountant.

    The bound is `accounting.epsilon` at a delta, or `accounting.delta` at an epsilon. Where one accountant is asked
    for, the others are left out, unless `every` one is wanted. PrivacyError where none covers the event.
    """
    names = accounting.accountants_for(event)
    if asked is not None and not (every and asked in names):
        names = (asked,)
    if not names:
        raise PrivacyError(f"event={type(event).__name__}: no accountant of this version covers it")
    found = {name: bound(event, at, name) for name in names}
    return asked or min(found, key=lambda name: found[name]), found


def sentence(accountant: str, plan: EventOptions | OpacusHistory, event: Event) -> str:
    """Return what was asked, in words."""
    noise = "" if plan.noise_multiplier is None else f", noise multiplier {plan.noise_multiplier:g}"
    return f"{accountant} accountant, {event.adjacency} adjacency, {plan.words}{noise}"


# Above it a delta is remarked on also where the number of examples is not known: few data sets have fewer than 1,000.
_LARGE_DELTA = 1e-3


def remark_on_delta(delta: float, plan: EventOptions | OpacusHistory, event: Event) -> str | None:
    """Remark on standard error where delta is not below 1/n, or is large and n unknown; return the sentence."""
    size = plan.dataset_size if plan.dataset_size is not None else accounting.known_dataset_size(event)
    sentence = accounting.delta_remark(delta, size)
    if sentence is not None:
        # With the digits in which the answer gives it; a value that was found has many more.
        sentence = accounting.delta_remark(min(float(format_epsilon(delta)), 0.9999), size)
    elif size is None:
        sentence = large_delta(delta)
    remark(sentence)
    return sentence


def large_delta(delta: float) -> str | None:
    """Return a sentence where a delta is large for any data set, whatever its size."""
    if delta <= _LARGE_DELTA:
        return None
    return (
        f"delta={format_epsilon(delta)}: ought to lie well below 1/n, and is below it for fewer than "
        f"{math.ceil(1.0 / delta):,} examples only"
    )


def described(event: Event) -> dict[str, Any]:
    """Return what every answer says of its event in JSON."""
    return {"adjacency": str(event.adjacency), "event": event.to_dict()}


@accounts()
def epsilon(
    delta: Annotated[float, option(real, "DELTA", "Well below 1/N; for example 1e-5.")],
    accountant: Accountant = None,
    opacus: Opacus = None,
    show_all: AllAccountants = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Say what epsilon a noise multiplier gives."""
    _answer("epsilon", "delta", delta, accountant, opacus, show_all, as_json, given)


@accounts()
def delta(
    epsilon: Annotated[float, option(real, "EPSILON", "0 or more, for example 3.")],
    accountant: Accountant = None,
    opacus: Opacus = None,
    show_all: AllAccountants = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Say what delta a plan has at an epsilon."""
    _answer("delta", "epsilon", epsilon, accountant, opacus, show_all, as_json, given)


def _answer(
    wanted: str,
    other: str,
    at: float,
    accountant: str | None,
    opacus: Path | None,
    show_all: bool,
    as_json: bool,
    given: dict[str, Any],
) -> None:  # fmt: skip
    """Write the bound on one of the two at a value of the other, the certified interval, and it by accountant."""
    plan = asked(opacus, given)
    event = plan.event()
    bound: Callable[..., float] = accounting.delta
    bounds: Callable[..., tuple[float, float]] = accounting.delta_interval
    if wanted == "epsilon":
        bound, bounds = accounting.epsilon, accounting.epsilon_interval
    name, table = bounds_of(bound, event, at, accountant, show_all or as_json)
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
    # Where anything was released, an upper bound of 0 is one that a float64 cannot hold.
    underflow = wanted == "delta" and value == 0.0 and bound(event, 0.0, name) > 0.0
    write_line(f"{wanted} = {'below 1e-300' if underflow else format_epsilon(value)} at {other} = {format_number(at)}")
    write_line(sentence(name, plan, event))
    if value == math.inf:
        write_line("Infinite: there is no guarantee at all.")
    if wanted == "delta" and value == 1.0:
        write_line("A delta of 1 is no guarantee at all.")
    if interval is not None and math.isfinite(interval[1]):
        low, high = format_lower(interval[0]), format_epsilon(interval[1])
        write_line(f"certified: the smallest {wanted} lies in [{low}, {high}]")
    for each, found in table.items() if show_all else ():
        write_line(f"  {each.ljust(max(map(len, table)))}  {format_epsilon(found)}")
    if isinstance(plan, OpacusHistory):
        if plan.mechanism == "gdp":
            write_line("Opacus's own gdp accountant approximates, and may report less.")
        write_line("It holds if:")
        for one in plan.assumptions:
            write_line("\n".join(wrap(one, 80, initial_indent="  - ", subsequent_indent="    ")))


UNKNOWNS = ("noise-multiplier", "steps", "sample-rate", "batch-size", "delta")


@accounts(", for one trial value after another")
def calibrate(
    epsilon: Annotated[float | None, option(real, "EPSILON", "The target, for example 3.")] = None,
    delta: Annotated[float | None, option(real, "DELTA", "Well below 1/N; for example 1e-5.")] = None,
    solve_for: Annotated[str | None, option(one_of(UNKNOWNS), "NAME",
        f"What is unknown: {', '.join(UNKNOWNS)}. Or leave it out.")] = None,
    ledger: Annotated[Path | None, typer.Option(metavar="FILE",
        help="What this ledger leaves: the target is for its runs and this one together.")] = None,
    accountant: Accountant = None,
    as_json: Json = False,
    **given: Any,
) -> None:  # fmt: skip
    """Say what meets a target epsilon: the noise, the steps, the batch size or the delta, whichever is left out."""
    plan = EventOptions(**given)
    spent = None if ledger is None else Spent.of(ledger)
    if spent is not None:
        epsilon, delta = spent.target(epsilon, delta)
    unknown = _unknown(plan, delta, solve_for)
    if epsilon is None:
        raise ArgumentError("epsilon: give the target, as --epsilon 3; dpcore epsilon says what a complete plan costs")
    if unknown == "delta":
        event = _together(spent, plan.event())
        name, bounds = bounds_of(accounting.delta, event, epsilon, accountant)
        value: float = bounds[name]
        known, reached, delta = plan, epsilon, value
    else:
        assert delta is not None
        value, name = _solve(plan, unknown, epsilon, delta, accountant, spent)
        known = plan.with_(unknown, value)
        event = _together(spent, known.event())
        reached = accounting.epsilon(event, delta, name)
    if value == 0 and unknown != "delta":
        raise PrivacyError(
            f"epsilon={format_number(epsilon)}: not even one step meets it at delta={format_number(delta)}; more noise "
            "(--noise-multiplier) is needed, or a larger epsilon"
        )
    remark = remark_on_delta(delta, plan, event) if 0 < delta < 1 else None

    def make_event(found: Any) -> Event:
        return (plan if unknown == "delta" else plan.with_(unknown, found)).event()

    granted = None if spent is None else spent.pays_for(unknown, value, make_event)
    told = {unknown.replace("-", "_"): value, "unknown": unknown, "epsilon": reached,
        "target_epsilon": epsilon, "delta": delta, "accountant": name, **described(event),
        **({} if spent is None else {"ledger": spent.to_dict(granted)}),
        **({} if remark is None else {"remark": remark})}  # fmt: skip
    said, epochs, epoch = sentence(name, known, event), list[str](), known.steps_per_epoch
    if unknown == "steps" and epoch > 1:
        whole, more = divmod(int(value), epoch)
        rest = f", and {more:,} more" if more else ""
        epochs = [f"{counted(int(value), 'step')}: {counted(whole, 'epoch')} of {epoch:,} steps{rest}"]
    at = _safe(unknown, value) if unknown == "delta" else format_number(delta)
    write_answer(
        as_json,
        told,
        f"{unknown.replace('-', ' ')} = {_safe(unknown, value)}",
        f"gives epsilon = {format_epsilon(reached)} at delta = {at}",
        said.rpartition(", noise")[0] if unknown == "noise-multiplier" else said,
        *epochs,
        *(() if spent is None else spent.words(unknown, value, granted)),
    )


def _unknown(plan: EventOptions, delta: float | None, asked: str | None) -> str:
    """Return the one thing that was left out; with --solve-for, see that it was, and nothing else."""
    rateless = plan.sampling == "full-batch" or (
        plan.sampling in ("fixed-order", "shuffled") and plan.dataset_size is None
    )
    size = "sample-rate" if plan.dataset_size is None else "batch-size"
    left_out = {
        "noise-multiplier": plan.noise_multiplier is None,
        "steps": plan.steps is None and plan.epochs is None,
        size: plan.sample_rate is None and plan.batch_size is None and not rateless,
        "delta": delta is None,
    }
    open_ = [name for name, missing in left_out.items() if missing]
    if asked == "batch-size" and "sample-rate" in open_:
        raise ArgumentError("dataset_size: give --dataset-size, or solve for the sample-rate")
    if asked == "sample-rate" and "batch-size" in open_ and plan.sampling == "poisson":
        open_[open_.index("batch-size")] = asked
    if asked is not None and asked not in open_:
        raise ArgumentError(f"solve_for={asked!r}: was given as an option already; leave that option out")
    if len(open_) != 1:
        needed = f"solve_for: exactly one of {', '.join(UNKNOWNS)} must be left out, and "
        if not open_:
            raise ArgumentError(f"{needed}none is; dpcore epsilon says what a complete plan costs")
        give = {"steps": "--steps or --epochs", "sample-rate": "--sample-rate, or --dataset-size with --batch-size"}
        # Most people look for the noise; without it among them, for the first.
        rest = "; ".join(give.get(name, f"--{name}") for name in open_[1:])
        raise ArgumentError(f"{needed}these are: {', '.join(open_)}. For the {open_[0].replace('-', ' ')}, give {rest}")
    if open_ == ["sample-rate"] and plan.sampling not in ("poisson", "truncated-poisson"):
        raise ArgumentError("dataset_size: give --dataset-size, and the batch size is looked for")
    if open_ == ["sample-rate"] and plan.epochs is not None and plan.dataset_size is None:
        raise ArgumentError("epochs: give --steps to look for a sample rate; an epoch has 1/rate steps")
    return open_[0]


def _solve(
    plan: EventOptions, unknown: str, epsilon: float, delta: float, accountant: str | None, spent: Spent | None
) -> tuple[float, str]:
    """Return the value and the accountant that allows most: each epsilon is an upper bound."""
    before = None if spent is None else spent.event
    probe = {"noise-multiplier": 1.0, "steps": 1, "sample-rate": 0.01, "batch-size": 1}[unknown]

    def make_event(value: Any) -> Event:
        return plan.with_(unknown, value).event()

    names = [accountant] if accountant else accounting.accountants_for(_together(spent, make_event(probe)))
    found: list[tuple[float, str]] = []
    refusals: list[Exception] = []
    settings: Any = {"spent": before, "dataset_size": plan.dataset_size or 1}
    for name in names or ["rdp"]:
        try:
            value = accounting.calibrate(unknown.replace("-", "_"), epsilon, delta, make_event, name, **settings)
            found.append((value, name))
        except (ArgumentError, PrivacyError) as refusal:  # another accountant may certify the target
            refusals.append(refusal)
    if not found:
        raise refusals[0]
    # Of equal values the first, whose accountant comes first in a statement.
    best = min if unknown == "noise-multiplier" else max
    return best(found, key=lambda pair: pair[0])


def _together(spent: Spent | None, event: Event) -> Event:
    return event if spent is None else accounting.Composed((*spent.event.events, event))


def _safe(unknown: str, value: float) -> str:
    """Return the value so rounded that typing it in again keeps the target."""
    if unknown in ("steps", "batch-size"):
        return f"{int(value)}"
    if unknown == "sample-rate":
        return format_lower(value, digits=6)
    return format_epsilon(value, digits=6)


@dataclass(frozen=True)
class Spent:
    """A ledger, and its runs as one event: all that they release at most.

    `left` is what the budget leaves; None where there is no budget, or where nothing is left of it for another run.
    """

    ledger: Ledger
    event: Composed
    left: Remaining | None

    @classmethod
    def of(cls, path: Path) -> Spent:
        """Read a ledger, without changing it; PrivacyError where one of its runs has no guarantee."""
        ledger = Ledger.open(path, read_only=True)
        runs = ledger.runs()
        lost = [run.name for run in runs if run.event.adjacency is None and run.releases]
        if lost:
            raise PrivacyError(f"ledger: its run {lost[0]!r} has no guarantee, so that nothing is left for another one")
        left = None if ledger.budget is None or ledger.total().alone else ledger.remaining()
        return cls(ledger, Composed(tuple(run.event for run in runs)), left)

    @property
    def name(self) -> str:
        """What the data set is called, or the file."""
        return self.ledger.name or self.ledger.path.name

    def target(self, epsilon: float | None, delta: float | None) -> tuple[float | None, float | None]:
        """Return the target: as given, or where neither was, the ledger's budget."""
        if epsilon is None and delta is None and self.ledger.budget is not None:
            return self.ledger.budget
        if epsilon is None:
            raise ArgumentError("epsilon: give the target for all runs together, for the ledger has no budget")
        return epsilon, delta

    def pays_for(self, unknown: str, value: float, make_event: Callable[[Any], Event]) -> float | None:
        """Return what the ledger itself pays for: the value that was found, another one, or None.

        The value was found as if all runs had been fixed beforehand. What begins after a release may have been chosen
        by looking at it, and the ledger holds it to its filter, which allows less. `make_event` makes the run's event
        of a value of the `unknown`, which is written as an option.
        """
        if self.ledger.budget is None:
            return value
        if self.left is None:
            return None
        if self.left.fits(make_event(value)):
            return value
        if unknown == "steps":
            return self.left.steps(make_event, int(value)) or None
        if unknown == "noise-multiplier":
            try:
                return self.left.noise_multiplier(make_event)
            except BudgetError:
                return None
        return None

    def words(self, unknown: str, found: float, granted: float | None) -> list[str]:
        """Return the same for a person, and what the value holds for."""
        budget, ends = self.ledger.budget, ""
        if budget is not None:
            ends = f" (budget: epsilon = {format_epsilon(budget[0])} at delta = {format_number(budget[1])})"
        held = f"the {counted(len(self.event.events), 'run')} of the ledger {self.name}{ends}"
        first = f"together with {held}, as if all had been fixed beforehand"
        if budget is None:
            return [first, "it has no budget and stops nothing (dpcore ledger show)"]
        if granted is None:
            return [first, "the ledger does NOT pay for this run as a whole (dpcore ledger show)"]
        if granted == found:
            return [first, "the ledger pays for this run as a whole"]
        less = f"asks for noise multiplier = {format_epsilon(granted, digits=6)}"
        if unknown == "steps":
            less = f"pays for {counted(int(granted), 'step')} only"
        return [first, f"the ledger itself {less}: it covers runs that are chosen by looking at earlier ones, too"]

    def to_dict(self, granted: float | None) -> dict[str, Any]:
        """Return the same for JSON."""
        runs, budget = len(self.event.events), self.ledger.budget
        return {"ledger": self.name, "runs": runs, "budget": budget, "pays_for": granted}
