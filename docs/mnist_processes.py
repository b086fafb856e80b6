"""MNIST by one process and by two: the same command under torchrun, the same statement; writes docs/results.

python docs/mnist_processes.py DIR   # the folder of the IDX files
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

SEEDS = range(3)
COMMAND = "train --data mnist --model cnn-5 --method dp_sgd --epsilon 3 --delta 1e-5 --epochs 4"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dpcore"]


def outcome(processes: int, seed: int, data: str) -> dict[str, Any]:
    """Run the command; return its accuracy and its statement."""
    start = [sys.executable, "-m", "dpcore"] if processes == 1 else TORCHRUN
    with tempfile.TemporaryDirectory() as folder:
        given = [*COMMAND.split(), "--data-dir", data, "--seed", str(seed), "--out", f"{folder}/run", "--json"]
        done = subprocess.run([*start, *given], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    return {"accuracy": result["test_accuracy"], "statement": result["statement"]}


def main() -> None:
    """Run each, compare the statements, and write what came out."""
    found = {n: [outcome(n, seed, sys.argv[1]) for seed in SEEDS] for n in (1, 2)}
    accuracies = {n: [round(100 * run["accuracy"], 2) for run in runs] for n, runs in found.items()}
    one, two = (found[n][0]["statement"] for n in (1, 2))
    result = {
        "command": f"[torchrun --nproc-per-node 2 --no-python] dpcore {COMMAND} --data-dir DIR --seed 0, 1, 2",
        "machine": f"{platform.machine()}, torch {torch.__version__}, NumPy {np.__version__}",
        "accuracy": accuracies,
        "mean": {n: round(float(np.mean(of)), 2) for n, of in accuracies.items()},
        "deviation": {n: round(float(np.std(of, ddof=1)), 2) for n, of in accuracies.items()},
        "epsilon": {n: runs[0]["statement"]["epsilon"] for n, runs in found.items()},
        "fields_of_the_statement_that_differ": [name for name in one if one[name] != two[name]],
        "said_of_two_processes_only": [said for said in two["caveats"] if said not in one["caveats"]],
    }
    path = Path(__file__).parent / "results/mnist-processes.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
