"""``dpcore compare`` and ``dpcore demo``: methods on one data set and model, at one guarantee, over several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dpcore.cli.compare.comparison import SAME_FOR_ALL, Comparison, Contestant
from dpcore.cli.options import Json, flag, option, parsers, takes
from dpcore.cli.train import config_file
from dpcore.cli.train.settings import DATA, METHOD, PRIVACY, RUN, Settings
from dpcore.cli.train.train import Ledger
from dpcore.cli.values import count, names, real, reals
from dpcore.errors import ArgumentError
from dpcore.methods import METHODS
from dpcore.spec.validate import nearest

# The same model, clip, batch size and epochs for all; learning rates from a search over one grid for all three, with
# other seeds than those shown (docs/command-line.md has its table). That search is not part of the guarantee.
COMMON = {"data": "digits", "model": "mlp", "epochs": 10, "batch_size": 64, "clipping": "automatic"}
CONTESTANTS = (
    Contestant("DP-SGD", {"method": "dp_sgd"}, (0.35,)),
    Contestant("DOPPLER", {"method": "doppler"}, (0.7,)),
    Contestant("DiSK", {"method": "disk"}, (0.35,)),
)


@takes(Settings, without=("noise_multiplier",))
def compare(
    context: typer.Context,
    methods: Annotated[Any, option(names(METHODS), "M1,M2,...",
        "Methods, all with the options given here; for settings of their own see --config.", METHOD)] = None,
    epsilon: Annotated[Any, option(reals, "E1,E2,...", "Targets; each run is calibrated to one.", PRIVACY)] = None,
    account_for_tuning: Annotated[bool, flag("--account-for-tuning",
        "Also state epsilon of all runs together, search included.", PRIVACY)] = False,
    ledger: Ledger = None,
    lr: Annotated[Any, option(reals, "R1,R2,...",
        "Learning rates; of several each contestant takes its best by held-out accuracy.", METHOD)] = None,
    seeds: Annotated[int, option(count, "N", "Final runs of each contestant at each epsilon.", RUN)] = 3,
    search_seeds: Annotated[int, option(count, "N", "Runs of each learning rate, other seeds.", RUN)] = 1,
    search_epochs: Annotated[int | None, option(count, "N", "Epochs of a search run; --epochs if not given.",
        RUN)] = None,
    jobs: Annotated[int, option(count, "N", "Runs side by side, one thread each.", RUN)] = 1,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder; the same command goes on where it stopped.",
        rich_help_panel=RUN)] = Path("comparison"),
    overwrite: Annotated[bool, flag("--overwrite", "Begin anew in that folder.", RUN)] = False,
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=config_file.use, metavar="FILE",
        help="Settings from a .toml file, one table \\[contestants.NAME] each; options win.",
        rich_help_panel=DATA)] = None,
    as_json: Json = False,
    **given: Any,
) -> int:  # fmt: skip
    """Compare methods on one data set at the same epsilon and delta, over several seeds."""
    tables = context.meta.get(config_file.TABLES)
    if tables and methods:
        raise ArgumentError(f"methods={','.join(methods)}: must not be given beside the contestants of {config}")
    comparison = Comparison(
        contestants=from_tables(tables, lr or ()) if tables else from_methods(methods or (), lr or ()),
        epsilon=tuple(epsilon or ()),
        common={name: value for name, value in given.items() if value is not None},
        seeds=seeds,
        search_seeds=search_seeds,
        search_epochs=search_epochs,
        account_for_tuning=account_for_tuning,
    )
    # After the quick checks: torch takes a second to import.
    from dpcore.cli.compare.run_comparison import run_comparison

    return run_comparison(comparison, out, jobs=jobs, overwrite=overwrite, as_json=as_json, ledger=ledger)


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


def from_methods(methods: Iterable[str], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return one contestant for each method, all with the same learning rates."""
    return tuple(Contestant(method, {"method": method}, lr) for method in methods)


def from_tables(tables: Mapping[str, Any], lr: tuple[float, ...]) -> tuple[Contestant, ...]:
    """Return the contestants of a configuration file; `lr` is for those whose table has none."""
    contestants = []
    for name, table in tables.items():
        if not isinstance(table, Mapping):
            raise ArgumentError(f"contestants: {name!r} must be a table, as in [contestants.{name}]")
        own = {key.replace("-", "_"): value for key, value in table.items()}
        grid = tuple(_parse(name, "lr", own.pop("lr"), _rates)) if own.get("lr") is not None else lr
        read = {key: _parse(name, key, value, _parser(name, key)) for key, value in own.items()}
        if "method" not in read:
            raise ArgumentError(f"contestant {name!r}: names no method, such as method = 'disk'")
        contestants.append(Contestant(name, read, grid))
    return tuple(contestants)


def _rates(value: Any) -> tuple[float, ...]:
    return reals([value] if isinstance(value, (int, float)) else value)


def _parser(contestant: str, key: str) -> Callable[[Any], Any]:
    known = parsers(Settings)
    if key in SAME_FOR_ALL:
        raise ArgumentError(f"contestant {contestant!r}: {key!r} is the same for all; set it outside of the table")
    if key in known:
        return known[key]
    own = sorted(set(known).difference(SAME_FOR_ALL) | {"lr"})
    near = nearest(key, own)
    hint = f"did you mean {near!r}?" if near else f"known keys are {', '.join(own)}"
    raise ArgumentError(f"contestant {contestant!r}: has the unknown key {key!r}; {hint}")


def _parse(contestant: str, key: str, value: Any, parser: Callable[[Any], Any]) -> Any:
    try:
        return parser(value)
    except typer.BadParameter as error:
        raise ArgumentError(f"contestant {contestant!r}: {key}: {error.message}") from error
