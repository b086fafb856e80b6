"""``dpcore demo``: a comparison of three methods on the built-in digits, at one guarantee, over several seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dpcore.cli.compare.comparison import Comparison, Contestant
from dpcore.cli.options import Json, flag, option
from dpcore.cli.values import count, real

# The same model, clip, batch size and epochs for all; learning rates from a search over one grid for all three, with
# other seeds than those shown (docs/command-line.md has its table). That search is not part of the guarantee.
COMMON = {"data": "digits", "model": "mlp", "epochs": 10, "batch_size": 64, "clipping": "automatic"}
CONTESTANTS = (
    Contestant("DP-SGD", {"method": "dp_sgd"}, (0.35,)),
    Contestant("DOPPLER", {"method": "doppler"}, (0.7,)),
    Contestant("DiSK", {"method": "disk"}, (0.35,)),
)


def demo(
    out: Annotated[Path, typer.Option(metavar="FOLDER",
        help="Folder; the same command goes on where it stopped.")] = Path("demo"),
    seeds: Annotated[int, option(count, "N", "Runs of each method.")] = 6,
    epsilon: Annotated[float, option(real, "EPSILON", "The guarantee of each run.")] = 1.0,
    delta: Annotated[float, option(real, "DELTA", "Well below 1/1438.")] = 1e-5,
    overwrite: Annotated[bool, flag("--overwrite", "Begin anew in that folder.")] = False,
    as_json: Json = False,
) -> int:  # fmt: skip
    """Compare DP-SGD, DOPPLER and DiSK on the built-in digits, at the same epsilon and delta."""
    comparison = Comparison(CONTESTANTS, (epsilon,), {**COMMON, "delta": delta}, seeds=seeds)
    from dpcore.cli.compare.run_comparison import run_comparison

    return run_comparison(comparison, out, jobs=1, overwrite=overwrite, as_json=as_json)
