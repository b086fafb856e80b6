"""How far one example moves the sum of the others, by rounding alone, in models that amplify the last digit.

    git worktree add /tmp/before c780a223
    python asv_benchmarks/rounding_by_others.py --roots before=/tmp/before,after=. --output rounding_by_others.json

Each checkout has a process of its own. `moved` is by how many clip norms one example more moves the sum, which is to be
1 at most; `stray` is by how many the others' sum moves where the first example, or the last one, is taken away.
`models` counts the models of tests/isolation, one seed each, in which the last digits of the others move at all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class Recurrent(nn.Module):
    """Its gradients explode: after 100 steps the last digit has become the first."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.RNN(8, 64, batch_first=True), nn.Linear(64, 2)
        with torch.no_grad():
            self.recurrent.weight_hh_l0.copy_(3 / 8 * torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of two classes."""
        return self.out(self.recurrent(x)[0][:, -1])


class Deep(nn.Module):
    """Thirty layers of one nonlinearity."""

    def __init__(self, inputs: int, width: int, scale: float, bend: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.bend, self.first, self.out = bend, nn.Linear(inputs, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(30))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores of two classes."""
        x = self.bend(self.first(x))
        for layer in self.layers:
            x = self.bend(layer(x))
        return self.out(x)


def tanh() -> nn.Module:
    """Return layers of a hyperbolic tangent."""
    return Deep(784, 100, 0.35, torch.tanh)


def sigmoid() -> nn.Module:
    """Return layers of a sigmoid, of which some kernels compute the end of an array otherwise."""
    return Deep(37, 37, 2.0, lambda x: torch.sigmoid(x) - 0.5)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, tuple[int, ...], int]] = {
    "recurrent, 1 thread": (Recurrent, (100, 8), 16, (2, 3, 4, 16), 1),
    "30 tanh, 1 thread": (tanh, (784,), 128, (16, 129, 147, 174, 192), 1),
    "30 tanh, 2 threads": (tanh, (784,), 128, (16, 129, 147, 174, 192), 2),
    "30 sigmoids, 1 thread": (sigmoid, (37,), 1000, (997, 1000), 1),
    "30 sigmoids, 2 threads": (sigmoid, (37,), 1000, (997, 1000), 2),
}
"""Model, shape of an example, expected batch size, sizes of batches, threads."""


def strays(name: str) -> dict[int, dict[str, float]]:
    """Return what is moved, for each size of a batch."""
    from dpcore.methods import dp_sgd
    from dpcore.torch import make_private
    from dpcore.torch.doctor.audit_run import add_up

    build, shape, expected, counts, threads = CASES[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, size = build(), max(400, 2 * expected)
    data = torch.randn(size, *shape), torch.randint(0, 2, (size,))
    method = dp_sgd(lr=0.1, noise_multiplier=1.0, batch_size=expected)
    run = make_private(model, data, method, steps=9, key=bytes(32), exact_key=True)

    def total(first: int, last: int) -> Any:
        add_up(run, tuple(part[first:last] for part in data))
        found = run.engine.mechanism.summed().copy()
        run.engine.mechanism.discard()
        return found

    found = {}
    for count in counts:
        every, without_last, without_first = total(0, count), total(0, count - 1), total(1, count)
        found[count] = {
            "moved": float(np.linalg.norm(every - without_last)),
            "stray, last": float(np.linalg.norm(every - without_last - total(count - 1, count))),
            "stray, first": float(np.linalg.norm(every - without_first - total(0, 1))),
        }
    return found


def models() -> dict[str, float]:
    """Return how many models of tests/isolation there are, and in how many the others' digits move."""
    from tests.isolation.moves import outcome
    from tests.isolation.test_isolation import CASES as ALL

    torch.set_num_threads(1)
    found = [outcome(case, 0) for case in ALL.values() if case.kind != "mixer"]
    strays = [each.stray for each in found if each.accepted]
    moved = sum(stray > 1e-12 for stray in strays)  # the sums are exact, but their division by the clip norm is not
    return {"accepted": len(strays), "moved": moved, "largest stray": max(strays)}


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--roots", default="after=.")
    parser.add_argument("--models", action="store_true", help="count models of tests/isolation, too: minutes")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child")
    given = parser.parse_args()
    if given.child:
        warnings.simplefilter("ignore")
        print(json.dumps(models() if given.child == "models" else strays(given.child)))
        return
    found: dict[str, Any] = {}
    for name, _, root in (part.partition("=") for part in given.roots.split(",")):
        path = Path(root).resolve()
        environment = {**os.environ, "PYTHONPATH": f"{path}:{path}/backends"}
        for case in [*CASES, *(["models"] if given.models else [])]:
            command = [sys.executable, "-P", "-W", "ignore", __file__, "--child", case]
            done = subprocess.run(command, env=environment, cwd=path, stdout=subprocess.PIPE, text=True, check=True)
            found.setdefault(name, {})[case] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name:8} {case}: {found[name][case]}", flush=True)
    if given.output:
        about = {
            "command": " ".join(sys.argv), "torch": torch.__version__, "python": platform.python_version(),
            "machine": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        }  # fmt: skip
        given.output.write_text(json.dumps({"about": about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
