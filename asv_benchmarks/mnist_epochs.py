"""Time whole epochs of the commands of docs/mnist.md, each command a process of its own, as a user runs it.

    python asv_benchmarks/mnist_epochs.py --data-dir ../shared/data/mnist --threads 1 --output mnist.json

An epoch's time is that between two lines of the run's metrics.jsonl: all its steps, drawing the batches, the evaluation
on the test set and the statement. The first epoch begins when the run writes its first statement, which is after the
model is built and the noise calibrated. Nothing is extrapolated. The noise is calibrated to `--epochs`; its size costs
no time. Both seconds of the clock and of the processor are printed: on a busy machine the latter are the better figure.
PYTHONPATH or the environment chooses the dpcore that runs, so that one script measures before and after.
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


def epochs_of(command: list[str], out: Path, environment: dict[str, str]) -> list[tuple[float, float]]:
    """Run the command and return the seconds of each of its epochs, and the processor's seconds in it."""
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    marks: list[tuple[float, float]] = []  # the first statement, then the end of each epoch
    while True:
        # Seen without being waited for, so that its times can still be read.
        ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        lines = out / "metrics.jsonl"
        seen = lines.read_bytes().count(b"\n") if lines.exists() else 0
        now = time.perf_counter(), processor_seconds(process.pid)
        if not marks and (out / "statement.json").exists():
            marks.append(now)
        marks += [now] * (seen - len(marks) + 1 if marks else 0)
        if ended:
            break
        time.sleep(POLL)
    if process.wait():
        raise SystemExit(f"{' '.join(command)}\n{process.stderr.read() if process.stderr else ''}")
    return [(end[0] - begin[0], end[1] - begin[1]) for begin, end in itertools.pairwise(marks)]


def processor_seconds(process: int) -> float:
    """Return the user's and the system's seconds of a child that was not yet waited for."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(arguments.threads))
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
            command = [sys.executable, "-m", "dpcore", "train", *given]
            measured = epochs_of(command, Path(folder, "run"), os.environ | threads)
        seconds, processor = (list(each) for each in zip(*measured, strict=True))
        row = {"command": " ".join(["dpcore train", *given]), "seconds": seconds, "processor_seconds": processor}
        result["methods"][method] = row | {"median_s": median(seconds), "min_s": min(seconds)}
        figures = (f"{wall:.1f} (processor {used:.1f})" for wall, used in measured)
        print(f"{method:8s} {', '.join(figures)} s an epoch", flush=True)
    result["load_after"] = os.getloadavg()
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
