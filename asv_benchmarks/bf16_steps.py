"""Private steps in bfloat16 and float32 beside plain ones in both, in turn, in one process; time and memory.

    git worktree add /tmp/before aac341b4
    python asv_benchmarks/bf16_steps.py --roots before=/tmp/before,after=. --threads 1 --output bf16_steps.json

Each checkout has a process of its own. Ratios are of the plain step in the same precision, by processor time, which a
busy machine moves less than the clock. Memory is of tensors that are made in a step, at one time.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def contestants(name: str) -> dict[str, Any]:
    """Return what takes a step, by name; each call takes the next batch."""
    import step_of_checkouts as base
    import torch
    from whole_step.models import cases

    from dpcore.torch import make_private

    case = cases()[name]
    data = case.data(4, 0)
    found: dict[str, Any] = {}
    for bf16 in (False, True):

        def autocast(bf16: bool = bf16) -> AbstractContextManager[None]:
            return torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()

        options: dict[str, Any] = {"microbatch_size": case.batch_size}
        around = nullcontext
        if bf16 and "precision" in inspect.signature(make_private).parameters:
            options["precision"] = "bf16"
        else:
            around = autocast
        with around():
            private = base.Run(case, data, **options)
        plain = base.Plain(case, data)
        forward = plain.model.forward

        def cast(*args: Any, forward: Any = forward, autocast: Any = autocast) -> Any:
            with autocast():
                return forward(*args).float()

        plain.model.forward = cast

        def step(private: Any = private, around: Any = around) -> None:
            with around():
                private.step()

        kind = "bf16" if bf16 else "float32"
        found |= {f"plain {kind}": plain.step, f"private {kind}": step}
    return found


def child(name: str, threads: int, rounds: int) -> None:
    """Print the seconds and the bytes of all contestants."""
    import torch

    torch.set_num_threads(threads)
    runs = contestants(name)
    from dpcore.torch.memory import Peak

    times: dict[str, list[tuple[float, float]]] = {key: [] for key in runs}
    for turn in range(rounds + 1):
        order = list(runs)
        random.Random(turn).shuffle(order)
        for key in order:
            begin = time.process_time(), time.perf_counter()
            runs[key]()
            if turn:
                times[key].append((time.process_time() - begin[0], time.perf_counter() - begin[1]))
    peaks = {}
    for key, step in runs.items():
        with Peak() as count:
            step()
        peaks[key] = count.peak
    print(json.dumps({"seconds": times, "peak_bytes": peaks}))


def main() -> None:
    """Measure, and print a line for each model and checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roots", default="after=.")
    parser.add_argument("--models", default="transformer,bert")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child")
    given = parser.parse_args()
    if given.child:
        child(given.child, given.threads, given.rounds)
        return
    from whole_step.record import machine

    found: dict[str, Any] = {"command": " ".join(sys.argv), "machine": machine(), "models": {}}
    for model in given.models.split(","):
        for name, _, path in (root.partition("=") for root in given.roots.split(",")):
            root = str(Path(path).resolve())
            command = [sys.executable, "-P", "-W", "ignore", "-c", CHILD, str(HERE), root, "--child", model]
            command += ["--threads", str(given.threads), "--rounds", str(given.rounds)]
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
            done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(done.stderr)
            measured = json.loads(done.stdout.splitlines()[-1])
            found["models"].setdefault(model, {})[name] = measured
            cpu = {key: statistics.median(own for own, _ in spent) for key, spent in measured["seconds"].items()}
            wall = {key: min(own for _, own in spent) for key, spent in measured["seconds"].items()}
            for of, label in ((cpu, "processor, medians"), (wall, "clock, minima")):
                shown = {key: round(1e3 * own) for key, own in of.items()}
                ratios = [round(of[f"private {k}"] / of[f"plain {k}"], 3) for k in ("float32", "bf16")]
                print(f"{model:12} {name:8} {label}: ms {shown}, ratios float32, bf16 {ratios}", flush=True)
            print(f"{'':21} peak MB { {k: round(v / 1e6) for k, v in measured['peak_bytes'].items()} }", flush=True)
            if given.output:
                found["load_after"] = os.getloadavg()
                given.output.write_text(json.dumps(found, indent=1) + "\n")


CHILD = (
    "import sys; here, root = sys.argv[1:3]; sys.path[:0] = [here, root, root + '/backends']; "
    "del sys.argv[1:3]; import bf16_steps; bf16_steps.main()"
)
"""The checkout's own modules come before those that are installed."""

if __name__ == "__main__":
    main()
