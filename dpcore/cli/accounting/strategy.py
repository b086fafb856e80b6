"""``dpcore strategy``: find the best correlated noise, and bound its distance from the best possible."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli.options import Commands, Json, count, flag, names, one_of, option, real, takes, written
from dpcore.cli.output import told_if_slow, write_answer
from dpcore.errors import ArgumentError
from dpcore.stages import strategies
from dpcore.stages.strategies import Strategy, Workload, workloads
from dpcore.stages.strategies.search.optimize import KINDS, WITH_BANDS
from dpcore.statement.text import counted

NO_BOUND = "its distance from the best is not known for this number of steps"

strategy = Commands()  # its help is in dpcore.cli.app

# How each is made, and what it takes after the steps, with the values if left out.
_MADE: dict[str, tuple[Callable[..., Workload], dict[str, float]]] = {
    "prefix": (workloads.ones, {}),
    "momentum": (workloads.momentum, {"momentum": 0.9}),
    "weight-decay": (workloads.weight_decay, {"decay": 0.01}),
    "average": (workloads.exponential_average, {"decay": 0.999}),
    "srg": (workloads.srg, {"decay": math.exp(-2.5), "momentum": 0.9}),
}

_Steps = Annotated[int, option(count, "N", "Steps of the run.")]
_Bands = Annotated[Any, option(count, "B", "Bands of banded-toeplitz and banded-inverse; 32 if left out.")]
_Buffers = Annotated[Any, option(count, "M", "Buffers of blt; 4 if left out.")]
_NoCache = Annotated[bool, flag("--no-cache", "Search again, and save nothing on disk.")]


_Kept = Annotated[Any, option(written(".npz"), "FILE", "Save the strategy in this file (.npz).")]


@dataclass(frozen=True)
class _Wanted:
    """The use of the noisy sums: options of all these commands."""

    # fmt: off
    workload: Annotated[str, option(one_of(_MADE), "NAME",
        "Use of the noisy sums: prefix (the iterates of SGD), momentum, weight-decay, average (of the "
        "iterates, exponential) or srg (DP-SRG, with --momentum).")] = "prefix"
    momentum: Annotated[Any, option(real, "M", "Momentum of the update, for momentum and srg; 0.9 if left out.")] = None
    decay: Annotated[Any, option(real, "D",
        "For weight-decay, average and srg: 0.01, 0.999 and exp(-2.5) if left out.")] = None
    epochs: Annotated[int, option(count, "K", "Participations of each example, in a fixed order.")] = 1
    # fmt: on

    def over(self, steps: int) -> Workload:
        """Return the workload of a run of `steps` steps."""
        if steps < 1:
            raise ArgumentError(f"--steps {steps}: must be at least 1")
        make, defaults = _MADE[self.workload]
        for name in ("decay", "momentum"):
            if (given := getattr(self, name)) is not None and name not in defaults:
                raise ArgumentError(f"--{name} {given:g}: is not for --workload {self.workload}; leave it out")
        values = (default if getattr(self, name) is None else getattr(self, name) for name, default in defaults.items())
        return make(steps, *values)


@strategy.command(
    "optimize", example="dpcore strategy optimize --kind blt --workload prefix --steps 1024 --out blt.npz"
)
@takes(_Wanted)
@told_if_slow("the strategy with the least error")
def optimize_command(
    steps: _Steps,
    kind: Annotated[str, option(one_of(KINDS), "NAME", ", ".join(KINDS) + ".")] = "dense",
    bands: _Bands = None,
    buffers: _Buffers = None,
    out: _Kept = None,
    no_cache: _NoCache = False,
    as_json: Json = False,
    **given: Any,
) -> None:  # fmt: skip
    """Find the strategy of a kind with the least error, and prove its distance from the best possible."""
    wanted, epochs = _Wanted(**given).over(steps), given["epochs"]
    best = strategies.optimal(kind, wanted, epochs=epochs, bands=bands, buffers=buffers, keep=not no_cache)
    if out is not None:
        strategies.save(out, best.strategy)
    near = NO_BOUND
    if best.lower_bound is not None:
        near = f"no mechanism is below {best.lower_bound:.6g}: this one is at most {best.above:.2%} above the best"
    write_answer(
        as_json,
        {"kind": kind, "workload": wanted.name, "steps": steps, "epochs": epochs,
            "error": best.error, "lower_bound": best.lower_bound, "above": best.above, "seconds": best.seconds,
            "strategy": _described(best.strategy)},
        f"root mean squared error of {wanted.name} over {counted(steps, 'step')} at mu = 1: "
        f"{best.error:.6g} clip norms",
        near,
        f"found in {best.seconds:.2f} s",
        *([] if out is None else [f"saved in {out}; dpcore.strategies.load reads it"]),
    )  # fmt: skip


@strategy.command("compare", example="dpcore strategy compare --steps 1024")
@takes(_Wanted)
def compare_command(
    steps: _Steps,
    bands: _Bands = None,
    buffers: _Buffers = None,
    kinds: Annotated[Any, option(names(KINDS), "A,B,...", "Kinds to search.")] = KINDS,
    no_cache: _NoCache = False,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Compare strategies on a workload, each with its distance from the best possible."""
    wanted, epochs = _Wanted(**given).over(steps), given["epochs"]
    compared: dict[str, tuple[Strategy, float]] = {}
    for kind in kinds:
        own = {"bands": bands} if kind in WITH_BANDS else {"buffers": buffers} if kind == "blt" else {}
        best = strategies.optimal(kind, wanted, epochs=epochs, keep=not no_cache, **own)
        compared[kind] = best.strategy, best.error
    for name in ("square-root", "tree-optimal", "identity"):
        chosen = strategies.strategy(name, steps)
        compared[name] = chosen, strategies.error_of(chosen, wanted, epochs)
    bound = _bound_of(wanted, epochs)
    above = {name: None if bound is None else error / bound - 1 for name, (_, error) in compared.items()}
    title = f"{wanted.name}, {counted(steps, 'step')}, {counted(epochs, 'epoch')}"
    costs = {name: strategies.streaming_cost(chosen, steps) for name, (chosen, _) in compared.items()}
    write_answer(
        as_json,
        {"workload": wanted.name, "steps": steps, "epochs": epochs, "lower_bound": bound, "errors":
            {name: {"error": error, "above": above[name], "state_vectors": chosen.order,
                    "streaming": asdict(costs[name])} for name, (chosen, error) in compared.items()}},
        title if bound is None else f"{title}; no mechanism is below {bound:.5g}",
        f"{'strategy':<18}{'error':>10}{'above the best':>16}  streaming",
        *(f"{name:<18}{error:>10.5g}{_share(above[name]):>16}  {costs[name].words}"
          for name, (_, error) in sorted(compared.items(), key=lambda item: item[1][1])),
    )  # fmt: skip


@strategy.command("show", example="dpcore strategy show blt.npz --steps 1024")
@takes(_Wanted)
def show_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of dpcore strategy optimize, or with a matrix.")],
    steps: Annotated[Any, option(count, "N", "Steps of the run; all of the strategy's if left out.")] = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Describe a strategy in a file, with its cost and its error."""
    chosen = strategies.load(file)
    if steps is None and chosen.steps is None:
        raise ArgumentError(f"{file}: has any number of steps; give the number with --steps")
    length = int(chosen.steps or 0) if steps is None else steps
    wanted, epochs = _Wanted(**given).over(length), given["epochs"]
    strategies.check_steps(chosen, length)
    error, bound = strategies.error_of(chosen, wanted, epochs), _bound_of(wanted, epochs)
    above = None if bound is None else error / bound - 1
    near = NO_BOUND if above is None else f"{above:.2%} above the best of all"
    cost, title = strategies.streaming_cost(chosen, length), f"{chosen.describe()['kind']}, {counted(length, 'step')}"
    write_answer(
        as_json,
        {"strategy": _described(chosen), "steps": length, "workload": wanted.name, "epochs": epochs,
            "error": error, "lower_bound": bound, "above": above, "state_vectors": chosen.order,
            "streaming": asdict(cost)},
        title,
        f"streams with {cost.words}",
        f"error of {wanted.name} at mu = 1: {error:.6g} clip norms, {near}",
    )  # fmt: skip


def _bound_of(wanted: Workload, epochs: int) -> float | None:
    try:
        return strategies.lower_bound(wanted, epochs=epochs)
    except ArgumentError:  # none is known for so many steps
        return None


def _share(above: float | None) -> str:
    return "not known" if above is None else f"{above:.2%}"


@strategy.command("recommend", example="dpcore strategy recommend --steps 2350 --epochs 10 --workload momentum")
@takes(_Wanted)
def recommend_command(
    steps: _Steps,
    vectors: Annotated[int, option(count, "V", "Vectors of the model's size that the noise may keep.")] = 4,
    rows: Annotated[int, option(count, "R", "Rows of noise that may be drawn in a step.")] = 1,
    bands: Annotated[Any, option(count, "B", "The most bands: the groups of cyclic-poisson.")] = None,
    out: _Kept = None,
    as_json: Json = False,
    **given: Any,
) -> None:
    """Name the strategy with the least error that streams in a given memory, and the reason."""
    wanted, epochs = _Wanted(**given).over(steps), given["epochs"]
    candidates = strategies.candidates(wanted, epochs=epochs, vectors=vectors, rows=rows, bands=bands)
    first, best = candidates[0], min(one.error for one in candidates)
    if out is not None:
        strategies.save(out, first.strategy)
    why = "its error is the least of those that fit"
    if first.error > best:
        why = f"its error is {first.error / best - 1:.2%} above the least of those that fit, and it keeps less"
    independent = next(one.error for one in candidates if one.kind == "identity")
    whole = repr(first.strategy)
    write_answer(
        as_json,
        {"workload": wanted.name, "steps": steps, "epochs": epochs, "recommended": first.kind,
            "strategy": _described(first.strategy), "candidates": [
                {"kind": one.kind, "error": one.error, "streaming": asdict(one.cost)} for one in candidates]},
        f"{wanted.name}, {counted(steps, 'step')}, {counted(epochs, 'epoch')}, at most {vectors} vectors kept",
        f"take {first.kind}: {whole}" if len(whole) < 200 else f"take {first.kind}",
        f"because {why}; independent noise has {independent / first.error:.3g} times its error",
        *(f"  {one.kind:<16}{one.error:>10.5g}  {one.cost.words}" for one in candidates),
        *([] if out is None else [f"saved in {out}; dpcore train --strategy {out} uses it"]),
    )  # fmt: skip


def _described(chosen: Strategy) -> dict[str, Any]:
    """Return a strategy's description, without long lists."""
    return {k: v for k, v in chosen.describe().items() if not isinstance(v, list) or len(v) <= 64}
