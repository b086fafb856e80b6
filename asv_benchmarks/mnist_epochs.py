"""Time whole epochs of the commands of docs/mnist.md, each command a process of its own, as a user runs it.

    python asv_benchmarks/mnist_epochs.py --data-dir ../shared/data/mnist --threads 1 --output mnist.json

An epoch's time is that between two lines of the run's metrics.jsonl: all its steps, drawing the batches, the evaluation
on the test set and the statement. The first epoch begins when the run writes its first statement, which is after the
model is built and the noise calibrated. Nothing is extrapolated. The noise is calibrated to `--epochs`; its size costs
no time. Which dpcore runs is what PYTHONPATH or the environment gives, so that one script measures before and after.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from whole_step.record import machine

POLL = 0.02  # seconds: far below an epoch


def epochs_of(command: list[str], out: Path, environment: dict[str, str]) -> list[float]:
    """Run the command and return the seconds of each of its epochs."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    marks: list[float] = []  # the first statement, then the end of each epoch
    while True:
        ended = process.poll() is not None
        lines = out / "metrics.jsonl"
        seen = lines.read_bytes().count(b"\n") if lines.exists() else 0
        if not marks and (out / "statement.json").exists():
            marks.append(time.perf_counter())
        marks += [time.perf_counter()] * (seen - len(marks) + 1 if marks else 0)
        if ended:
            break
        time.sleep(POLL)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\n{process.stderr.read() if process.stderr else ''}")
    return [end - begin for begin, end in itertools.pairwise(marks)]


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True, help="where the files of MNIST are")
    parser.add_argument("--methods", default="dp_sgd,doppler,disk")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, help="if not given, the command's own (512); docs/mnist.md: 1024 too")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "DPCORE_NUM_THREADS"), str(arguments.threads))
    result: dict[str, Any] = {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "machine": machine(),
        "threads": arguments.threads,
        "methods": {},
    }
    for method in arguments.methods.split(","):
        with tempfile.TemporaryDirectory() as folder:
            options = {
                "--data": "mnist", "--data-dir": arguments.data_dir, "--model": "cnn-5", "--method": method,
                "--epsilon": 3, "--delta": 1e-5, "--epochs": arguments.epochs, "--batch-size": arguments.batch_size,
                "--out": f"{folder}/run",
            }  # fmt: skip
            given = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
            command = [sys.executable, "-m", "dpcore.cli", "train", *given]
            seconds = epochs_of(command, Path(folder, "run"), os.environ | threads)
        row = {"command": " ".join(["dpcore train", *given]), "seconds": seconds}
        result["methods"][method] = row | {"median_s": median(seconds), "min_s": min(seconds)}
        print(f"{method:8s} {' '.join(f'{each:.1f}' for each in seconds)} s an epoch", flush=True)
    result["load_after"] = os.getloadavg()
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
