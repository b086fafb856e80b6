"""Private steps over plain ones in several checkouts, each in a process of its own, in turn.

    python asv_benchmarks/step_of_checkouts.py --roots before=/tmp/before,after=. --models mlp,cnn --output out.json

`before_after.py` takes two checkouts into one process, which torch allows only if one of them registers operations.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def child(root: str, name: str, threads: int, rounds: int) -> None:
    """Print the seconds of plain and private steps, taken in turn."""
    sys.path[:0] = [str(HERE), root, f"{root}/backends"]
    import before_after as base
    import torch
    from whole_step.models import cases

    torch.set_num_threads(threads)
    case = cases()[name]
    data = case.data(4, 0)
    plain, run = base.Plain(case, data), base.Run(base.Package("one", Path(root)), case, data, "dp_sgd")
    times = [(plain.step(), run.step()) for _ in range(rounds + 1)][1:]
    print(json.dumps({"plain_s": [p for p, _ in times], "private_s": [p for _, p in times], "setup_s": run.setup}))


def main() -> None:
    """Measure, and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roots", default="after=.")
    parser.add_argument("--models", default="mlp,cnn,transformer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child:
        child(*given.child, given.threads, given.rounds)
        return
    roots = {name: str(Path(path).resolve()) for name, _, path in (r.partition("=") for r in given.roots.split(","))}
    found: dict[str, Any] = {}
    for model in given.models.split(","):
        runs: dict[str, list[Any]] = {name: [] for name in roots}
        for _ in range(given.turns):
            for name, root in roots.items():
                command = [sys.executable, "-P", "-W", "ignore", __file__, "--child", root, model]
                command += ["--threads", str(given.threads), "--rounds", str(given.rounds)]
                environment = {**os.environ, "PYTHONPATH": f"{root}:{root}/backends"}
                done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, check=True)
                runs[name].append(json.loads(done.stdout))
        found[model] = runs
        for name, all_of in runs.items():
            ratios = [statistics.median(r["private_s"]) / statistics.median(r["plain_s"]) for r in all_of]
            print(
                f"{model:12} {name:8} private / plain, each turn: {[round(ratio, 3) for ratio in ratios]}", flush=True
            )
    if given.output:
        about = {"command": " ".join(sys.argv), "python": platform.python_version(), "load": os.getloadavg()}
        given.output.write_text(json.dumps({"about": about, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
