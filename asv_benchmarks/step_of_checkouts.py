"""Private steps over plain ones in several checkouts, each in a process of its own, in turn.

    python asv_benchmarks/step_of_checkouts.py --roots before=/tmp/before,after=. --models mlp,cnn --output out.json

torch registers a checkout's operations once in a process. Seconds are of the clock; `--cpu` takes processor time, which
a busy machine moves less. Under Poisson sampling all checkouts draw the same batches.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from whole_step.models import cases, loss  # noqa: E402

CLOCK = time.perf_counter


class Run:
    """A private run; `step` takes the next batch and returns its seconds."""

    def __init__(self, case: Any, data: Any, sampling: str = "fixed-order", **options: Any) -> None:
        import dpcore
        from dpcore.torch import make_private

        torch.manual_seed(0)
        method = dpcore.methods.dp_sgd(
            lr=1e-3, base=case.update, noise_multiplier=1.0, batch_size=case.batch_size, max_grad_norm=1.0
        )
        model, options = case.build(), {"key": bytes(32), "exact_key": True, **options}
        begin = CLOCK()
        self.run = make_private(model, data, method, steps=10**5, sampling=sampling, loss=loss, **options)
        self.setup = CLOCK() - begin
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.run.loader

    def step(self) -> float:
        """Take a step; return its seconds."""
        batch = next(self._batches)
        begin = CLOCK()
        self.run.step(batch)
        return CLOCK() - begin


class Plain:
    """The non-private step."""

    def __init__(self, case: Any, data: Any) -> None:
        torch.manual_seed(0)
        self.model, self.data, self.size, self.place = case.build(), data, case.batch_size, 0
        make = torch.optim.Adam if case.update == "adam" else torch.optim.SGD
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)

    def step(self) -> float:
        """Take a step; return its seconds."""
        part = slice(self.place, self.place + self.size)
        self.place = (self.place + self.size) % len(self.data[0])
        inputs, targets = (t[part] for t in self.data)
        begin = CLOCK()
        self.optimizer.zero_grad()
        loss(self.model(inputs), targets).backward()
        self.optimizer.step()
        return CLOCK() - begin


def child(given: argparse.Namespace) -> None:
    """Print the seconds of plain and private steps, taken in turn."""
    root, name = given.child
    sys.path[:0] = [root, f"{root}/backends"]
    global CLOCK
    CLOCK = time.process_time if given.cpu else time.perf_counter
    torch.set_num_threads(given.threads)
    case = cases()[name]
    case = case if given.batch_size is None else replace(case, batch_size=given.batch_size)
    data = case.data(4, 0)
    plain, run = Plain(case, data), Run(case, data, given.sampling)
    times = [(plain.step(), run.step()) for _ in range(given.rounds + 1)][1:]
    print(json.dumps({"plain_s": [p for p, _ in times], "private_s": [p for _, p in times], "setup_s": run.setup}))


def main() -> None:
    """Measure, and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roots", default="after=.")
    parser.add_argument("--models", default="mlp,cnn,transformer")
    parser.add_argument("--sampling", default="fixed-order")
    parser.add_argument("--batch-size", type=int, help="of all models, instead of their own")
    parser.add_argument("--cpu", action="store_true", help="processor time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", nargs=2)
    given = parser.parse_args()
    if given.child:
        child(given)
        return
    roots = {name: str(Path(path).resolve()) for name, _, path in (r.partition("=") for r in given.roots.split(","))}
    found: dict[str, Any] = {}
    for model in given.models.split(","):
        runs: dict[str, list[Any]] = {name: [] for name in roots}
        for _ in range(given.turns):
            for name, root in roots.items():
                command = [sys.executable, "-P", "-W", "ignore", __file__, *sys.argv[1:], "--child", root, model]
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
        about = {
            "command": " ".join(sys.argv), "python": platform.python_version(), "torch": torch.__version__,
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg(),
        }  # fmt: skip
        given.output.write_text(json.dumps({"about": about, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
