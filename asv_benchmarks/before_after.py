"""Private steps and set-up of two checkouts of dpcore and of plain training, in turn, in one process.

    git worktree add /tmp/before 0424647
    python asv_benchmarks/before_after.py --before /tmp/before --threads 2 --output before_after.json

Both packages are named dpcore: each is imported once, and its modules are put into ``sys.modules`` while it runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
_KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
if any(os.environ.get(name) is None for name in _KEEP):  # the allocator keeps freed memory, the same for all
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **_KEEP})
sys.path.insert(0, str(HERE))

import torch  # noqa: E402
from whole_step.models import cases, loss  # noqa: E402

CLOCK = time.perf_counter


class Package:
    """One checkout's modules."""

    def __init__(self, name: str, root: Path) -> None:
        self.name, self._paths = name, [str(root), str(root / "backends")]
        self._modules: dict[str, Any] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let ``import dpcore`` mean this one."""
        sys.path[:0] = self._paths
        sys.modules.update(self._modules)
        try:
            yield
        finally:
            del sys.path[:2]
            self._modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("dpcore")}


class Run:
    """A private run of one package; `step` takes the next batch."""

    def __init__(self, package: Package, case: Any, data: Any, method: str, sampling: str) -> None:
        self.package = package
        torch.manual_seed(0)
        model = case.build()
        with package.used():
            import dpcore
            from dpcore.sampling import FixedOrderSampler, PoissonSampler
            from dpcore.torch import make_private

            chosen = getattr(dpcore.methods, method)(
                lr=1e-3, base=case.update, noise_multiplier=1.0, batch_size=case.batch_size, max_grad_norm=1.0
            )
            sampler: Any = FixedOrderSampler(dataset_size=len(data[0]), batch_size=case.batch_size, shuffle=False)
            if sampling == "poisson":
                sampler = PoissonSampler(dataset_size=len(data[0]), batch_size=case.batch_size)
            begin = CLOCK()
            self.run = make_private(
                model, data, chosen, steps=10**5, sampling=sampler, loss=loss, key=bytes(32), exact_key=True
            )
            self.setup = CLOCK() - begin
        self._batches = self._endless()

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.run.loader

    def step(self) -> float:
        """Take a step; return its seconds."""
        with self.package.used():
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


def measured(
    name: str, packages: list[Package], rounds: int, methods: list[str], sampling: str, size: int | None
) -> dict[str, Any]:
    """Return the seconds of all contestants of one model."""
    case = cases()[name]
    case = case if size is None else replace(case, batch_size=size)
    data = case.data(4, 0)
    runs: dict[str, Any] = {"plain": Plain(case, data)}
    setup = {}
    for package in packages:
        for method in methods:
            runs[f"{package.name} {method}"] = run = Run(package, case, data, method, sampling)
            setup[f"{package.name} {method}"] = run.setup
    times: dict[str, list[float]] = {key: [] for key in runs}
    for turn in range(rounds + 1):
        order = list(runs)
        random.Random(turn).shuffle(order)
        for key in order:
            spent = runs[key].step()
            if turn:
                times[key].append(spent)
    plain = statistics.median(times["plain"])
    ratios = {key: round(statistics.median(spent) / plain, 3) for key, spent in times.items()}
    least = {key: round(min(spent) / min(times["plain"]), 3) for key, spent in times.items()}
    shown = {key: (ratio, least[key]) for key, ratio in ratios.items() if key != "plain"}
    print(f"{name:14} plain {1e3 * plain:8.1f} ms, ratios (medians, minima) {shown}, set-up {setup}", flush=True)
    return {"plain_s": plain, "ratio_of_medians": ratios, "ratio_of_minima": least, "setup_s": setup, "times_s": times}


def main() -> None:
    """Measure and print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--after", type=Path, default=HERE.parent)
    parser.add_argument("--models", default="mlp,cnn,transformer,lstm,resnet-18,bert,bert-lora")
    parser.add_argument("--methods", default="dp_sgd")
    parser.add_argument("--sampling", choices=["fixed-order", "poisson"], default="fixed-order")
    parser.add_argument("--batch-size", type=int, help="of all models, instead of their own")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu", action="store_true", help="processor time, which a busy machine moves less")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    global CLOCK
    CLOCK = time.process_time if given.cpu else time.perf_counter
    torch.set_num_threads(given.threads)
    packages = [Package("before", given.before.resolve()), Package("after", given.after.resolve())]
    options = given.rounds, given.methods.split(","), given.sampling, given.batch_size
    found = {name: measured(name, packages, *options) for name in given.models.split(",")}
    if given.output:
        about = {
            "command": " ".join(sys.argv), "threads": given.threads, "torch": torch.__version__,
            "python": platform.python_version(), "machine": platform.processor() or platform.machine(),
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "load": os.getloadavg(),
        }  # fmt: skip
        given.output.write_text(json.dumps({"about": about, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
