"""``dpcore strategy recommend``: the strategies that stream in a given memory, and which of them to take."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from dpcore.cli.accounting.strategy import WORKLOADS, described, strategy, workload_of
from dpcore.cli.options import Json, option
from dpcore.cli.output import write_json, write_line
from dpcore.cli.values import count, one_of, real
from dpcore.errors import ArgumentError
from dpcore.spec.canonical import plain
from dpcore.statement.text import counted


@strategy.command(
    "recommend", epilog="Example:  dpcore strategy recommend --steps 2350 --epochs 10 --workload momentum"
)
def recommend_command(
    steps: Annotated[int, option(count, "N", "Of the run.")],
    epochs: Annotated[int, option(count, "K", "How often each example takes part, in a fixed order.")] = 1,
    workload: Annotated[str, option(one_of(WORKLOADS), "NAME", f"{', '.join(WORKLOADS)}.")] = "prefix",
    momentum: Annotated[float, option(real, "M", "Of the update, for momentum and srg.")] = 0.9,
    decay: Annotated[Any, option(real, "D", "For weight-decay, average and srg.")] = None,
    vectors: Annotated[int, option(count, "V", "Vectors of the model's size that the noise may keep.")] = 4,
    rows: Annotated[int, option(count, "R", "Rows of noise that may be drawn in a step.")] = 1,
    bands: Annotated[Any, option(count, "B", "The most bands: the groups of cyclic-poisson.")] = None,
    out: Annotated[Any, option(Path, "FILE", "Keep the strategy in this file (.npz).")] = None,
    as_json: Json = False,
) -> None:
    """Name the strategy with the least error that streams in so much memory, and why it is this one."""
    from dpcore import strategies

    if out is not None and Path(out).suffix != ".npz":
        raise ArgumentError(f"--out {out}: must end in .npz")
    wanted = workload_of(workload, steps, momentum, decay)
    found = strategies.candidates(wanted, epochs=epochs, vectors=vectors, rows=rows, bands=bands)
    first, best = found[0], min(one.error for one in found)
    if out is not None:
        strategies.save(out, first.strategy)
    if as_json:
        write_json({"workload": wanted.name, "steps": steps, "epochs": epochs, "recommended": first.kind,
            "strategy": plain(described(first.strategy)), "candidates": [
                {"kind": one.kind, "error": one.error, "streaming": asdict(one.cost)} for one in found]})  # fmt: skip
        return
    write_line(f"{wanted.name}, {counted(steps, 'step')}, {counted(epochs, 'epoch')}, at most {vectors} vectors kept")
    write_line(f"take {first.kind}: {first.strategy!r}" if len(repr(first.strategy)) < 200 else f"take {first.kind}")
    why = "its error is the least of those that fit"
    if first.error > best:
        why = f"its error is {first.error / best - 1:.2%} above the least of those that fit, and it keeps less"
    write_line(f"because {why}; independent noise has {_error(found, 'identity') / first.error:.3g} times its error")
    for one in found:
        write_line(f"  {one.kind:<16}{one.error:>10.5g}  {one.cost.words}")
    if out is not None:
        write_line(f"kept in {out}; dpcore train --strategy {out} takes it")


def _error(found: list[Any], kind: str) -> float:
    return next(float(one.error) for one in found if one.kind == kind)
