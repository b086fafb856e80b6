"""Time whole training steps of dpcore, the non-private step, Opacus, FastDP and twenty lines of torch.func.

For every model there is one process in which all contestants take a step in turn, in random order, round after round;
then one process for each contestant's memory; then one in which all take the same step of a small model of the kind,
almost without noise, which shows that they agree. If a contestant cannot train a model, its reason is printed.

The allocator. A step that gets fresh pages from the kernel for every buffer pays more for the faults than for the
arithmetic, depending on the process's earlier work. So the processes that measure times keep freed memory
(MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and MALLOC_TOP_PAD_ of glibc, in the environment, the same for all
contestants); `--allocator default` changes nothing. Faults of every step are in the JSON. Memory is measured under the
default, which returns freed memory: otherwise a peak would be the allocator's.

    pip install --no-deps --target /tmp/opacus opacus==1.6.0 opt_einsum
    PYTHONPATH=/tmp/opacus python asv_benchmarks/training_vs_peers.py --threads 2 --output training_threads2.json
    python asv_benchmarks/training_vs_peers.py --tables training_threads2.json      # as markdown
    python asv_benchmarks/training_vs_peers.py --profile --models mlp               # where dpcore's step goes

What is not installed is recorded as that. `--quick` takes small models, two rounds, and the memory of the first model
only: it shows that all of it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from whole_step.processes import KEEP_PAGES, Server
from whole_step.record import machine
from whole_step.tables import markdown

MODELS = ("mlp", "transformer", "cnn", "resnet-18", "bert", "bert-lora", "lstm", "gpt-2")
CONTESTANTS = (
    "non-private", "dpcore", "dpcore per-layer", "dpcore DiSK",
    "Opacus hooks", "Opacus functorch", "Opacus ghost", "FastDP", "torch.func",
    "non-private compiled", "dpcore compiled",
)  # fmt: skip


def arguments_of(command_line: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="some of them, with commas")
    parser.add_argument("--contestants", default=",".join(CONTESTANTS), help="some of them, with commas")
    parser.add_argument("--rounds", type=int, help="9 if not given, 2 with --quick")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--update", choices=("sgd", "adam"), help="for every model, instead of its own")
    parser.add_argument("--fused", action="store_true", help="torch's fused optimizers, not its default loops")
    parser.add_argument("--allocator", choices=("keep", "default"), default="keep")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data and the order within a round")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--profile", action="store_true", help="split each contestant's step instead")
    parser.add_argument("--tables", nargs="+", type=Path, metavar="JSON", help="only print these results as markdown")
    parser.add_argument("--output", type=Path)
    found = parser.parse_args(command_line)
    for kind, known in (("models", MODELS), ("contestants", CONTESTANTS)):
        chosen = getattr(found, kind).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{kind}: {', '.join(sorted(unknown))}: known are {', '.join(known)}")
        setattr(found, kind, chosen)
    found.rounds = found.rounds or (2 if found.quick else 9)
    return found


def measure(model: str, arguments: argparse.Namespace, timing: Server, plain: Server) -> dict[str, Any]:
    """Return times, memory and agreement of all contestants of one model."""
    options = {"seed": arguments.seed, "update": arguments.update or "", "fused": arguments.fused}
    task = {"model": model, "names": arguments.contestants, "quick": arguments.quick, **options}
    found = timing.ask("workers.times", rounds=arguments.rounds, **task)
    if "contestants" not in found:
        print(f"{model}: {found}", flush=True)
        return found
    rows = found["contestants"]
    if not (arguments.no_memory or (arguments.quick and model != arguments.models[0])):
        for name in arguments.contestants:
            rows[name]["memory"] = plain.ask("workers.memory", **task | {"names": [name]})
        reference = rows.get("non-private", {}).get("memory", {}).get("above_data_mb")
        for row in rows.values():
            if reference and "above_data_mb" in row["memory"]:
                row["memory"]["ratio"] = row["memory"]["above_data_mb"] / reference
    found["agreement"] = plain.ask("workers.agreement", model=model, names=arguments.contestants, seed=arguments.seed)
    show(model, found)
    return found


def show(model: str, found: dict[str, Any]) -> None:
    """Print a line for every contestant."""
    print(f"{model} (B={found['batch_size']}, {found['trained_parameters']:,} parameters)", flush=True)
    for name, row in found["contestants"].items():
        if "refused" in row:
            print(f"  {name:18s} refused: {row['refused'][:150]}")
            continue
        needed = row.get("memory", {}).get("above_data_mb")
        memory = "" if needed is None else f"   {needed:7.0f} MB ({row['memory'].get('ratio', float('nan')):.2f}x)"
        ratio = f"{row.get('ratio_of_medians', float('nan')):6.2f} / {row.get('ratio_of_minima', float('nan')):6.2f}"
        print(f"  {name:18s} {1e3 * row['median_s']:9.1f} ms   {ratio}{memory}", flush=True)
    distances = found["agreement"].items()
    same = (f"{name} {f'{value:.0e}' if isinstance(value, float) else 'no'}" for name, value in distances)
    print(f"  one step without noise, distance to torch.func's: {', '.join(same)}", flush=True)


def main() -> None:
    """Measure, print and write the figures."""
    arguments = arguments_of(sys.argv[1:])
    if arguments.tables:
        print(markdown([json.loads(path.read_text()) for path in arguments.tables]))
        return
    result: dict[str, Any] = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(),
        **{name: getattr(arguments, name) for name in ("threads", "rounds", "seed", "quick", "fused")},
        "allocator": {"times": KEEP_PAGES if arguments.allocator == "keep" else "default", "memory": "default"},
        "models": {},
    }
    timing, plain = Server(arguments.threads, arguments.allocator), Server(arguments.threads, "default")
    for model in arguments.models:
        if arguments.profile:
            task = {"model": model, "names": arguments.contestants, "quick": arguments.quick, "seed": arguments.seed}
            found = timing.ask("split.split", rounds=arguments.rounds, **task)
            print(found.get("text", found), flush=True)
            continue
        result["models"][model] = measure(model, arguments, timing, plain)
        result["load_after"] = os.getloadavg()
        if arguments.output is not None:  # after every model: an interrupted run keeps what it has
            arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    timing.close()
    plain.close()


if __name__ == "__main__":
    main()
