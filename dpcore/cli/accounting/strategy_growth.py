"""``dpcore strategy growth``: how errors grow with the number of steps, beside the least error of any mechanism."""

from __future__ import annotations

from typing import Annotated, Any

from dpcore.cli.accounting.strategy import WORKLOADS, strategy, workload_of
from dpcore.cli.options import Json, option, picture
from dpcore.cli.output import write_json, write_line
from dpcore.cli.values import count, names, one_of, real, reals
from dpcore.errors import ArgumentError
from dpcore.stages.strategies.search.kinds import KINDS
from dpcore.statement.text import counted

_OTHERS = ("square-root", "tree-optimal", "identity")


@strategy.command("growth", epilog="Example:  dpcore strategy growth --steps 16,64,256,1024 --out growth.png")
def growth_command(
    steps: Annotated[Any, option(reals, "A,B,...", "Numbers of steps.")] = (16, 64, 256, 1024),
    workload: Annotated[str, option(one_of(WORKLOADS), "NAME", f"{', '.join(WORKLOADS)}.")] = "prefix",
    momentum: Annotated[float, option(real, "M", "Of the update, for momentum and srg.")] = 0.9,
    decay: Annotated[Any, option(real, "D", "For weight-decay, average and srg.")] = None,
    epochs: Annotated[int, option(count, "K", "How often each example takes part, in a fixed order.")] = 1,
    kinds: Annotated[Any, option(names((*KINDS, *_OTHERS)), "A,B,...", "Strategies that are shown.")] = (
        "banded-toeplitz", "blt", "banded-inverse", *_OTHERS,
    ),
    out: Annotated[Any, option(picture, "FILE", "Draw the errors against the steps.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show how the errors of strategies grow with the number of steps, beside what no mechanism is below."""
    from dpcore import strategies

    if any(value != int(value) or value < 1 for value in steps):
        raise ArgumentError(f"steps={','.join(f'{value:g}' for value in steps)}: must be whole numbers from 1 on")
    sizes = sorted({int(value) for value in steps})
    bounds: list[float | None] = []
    errors: dict[str, list[float]] = {kind: [] for kind in kinds}
    for size in sizes:
        wanted = workload_of(workload, size, momentum, decay)
        for kind in kinds:
            if kind in _OTHERS:
                error = strategies.error_of(strategies.strategy(kind, size), wanted, epochs)
            else:
                error = strategies.optimal(kind, wanted, epochs=epochs, certified=False).error
            errors[kind].append(error)
        try:
            bounds.append(strategies.lower_bound(wanted, epochs=epochs))
        except ArgumentError:  # not known for so many steps
            bounds.append(None)
    if out is not None:
        from dpcore.cli.plots.strategy_plots import growth_picture

        growth_picture(out, sizes, errors, bounds, title=f"{workload}, {counted(epochs, 'epoch')}")
    if as_json:
        write_json({"workload": workload, "epochs": epochs, "steps": sizes, "lower_bound": bounds, "errors": errors})
        return
    write_line(f"{'steps':<18}" + "".join(f"{size:>12,}" for size in sizes))
    for kind, values in sorted(errors.items(), key=lambda item: item[1][-1]):
        write_line(f"{kind:<18}" + "".join(f"{value:>12.5g}" for value in values))
    least = ["unknown" if bound is None else f"{bound:.5g}" for bound in bounds]
    write_line(f"{'no mechanism below':<18}" + "".join(f"{value:>12}" for value in least))
