"""Which of two neighboring data sets can have led to one released step? dpcore, float noise, and Opacus, in one run.

    python asv_benchmarks/released_floats.py --output released_floats.json

The attack of docs/floats.md on 20,000 parameters that begin at 0, noise multiplier 1. It counts the coordinates that no
possible noise explains, for the true data set and for its neighbor. Opacus is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.end_to_end.test_released_floats import (
    LR,
    B,
    by_minimize,
    by_torch,
    excluded,
    excluded_by_floats,
    gradients,
    near,
)

DIMENSION = 20_000


def float_noise(g: np.ndarray, n: int, lr: float) -> np.ndarray:
    """Return parameters after a step with float32 normals, as dpcore took it before its noise had a grid."""
    z = np.random.default_rng(2).standard_normal(len(g[0])).astype(np.float32)
    total = g[:n].astype(np.float64).sum(0) + z
    return np.float32(0) - np.float32(lr) * (total / n).astype(np.float32)


def opacus_step(g: np.ndarray, n: int, noise_multiplier: float) -> np.ndarray:
    """Return the sum that a step of Opacus releases at learning rate 1, in float32."""
    import torch
    from opacus.grad_sample.utils import wrap_model
    from opacus.optimizers import DPOptimizer

    layer = torch.nn.Linear(len(g[0]), 1, bias=False)
    torch.nn.init.zeros_(layer.weight)
    model = wrap_model(layer, grad_sample_mode="hooks", batch_first=True, loss_reduction="mean")
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = DPOptimizer(plain, noise_multiplier=noise_multiplier, max_grad_norm=1.0, expected_batch_size=B)
    model(torch.from_numpy(g[:n])).mean().backward()
    optimizer.step()
    released: np.ndarray = -layer.weight.detach().numpy().ravel() * B  # B is a power of two: nothing rounds
    return released


def excluded_of_opacus(y: np.ndarray, total: np.ndarray) -> int:
    """Return the coordinates that no float32 normal explains, if Opacus adds it to this sum in float32."""
    possible = np.zeros(len(y), bool)
    for z in near((y.astype(np.float64) - total).astype(np.float32)):
        possible |= total + z == y
    return int((~possible).sum())


def main() -> None:
    """Print a line for each contestant, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    g, found = gradients(DIMENSION), dict[str, dict[str, Any]]()

    def keep(name: str, learning_rate: float, count: Any) -> None:
        counts = {f"{truth} examples": [count(truth, n) for n in (truth, 2 * B + 1 - truth)] for truth in (B, B + 1)}
        found[name] = {"learning rate": learning_rate, "excluded: truth, neighbor": counts}
        print(f"{name}, learning rate {learning_rate}: {counts}", flush=True)

    released = {truth: float_noise(g, truth, LR) for truth in (B, B + 1)}
    keep("float noise", LR, lambda truth, n: excluded_by_floats(released[truth], g, n, LR, truth))
    for name, run in (
        ("dpcore.minimize", lambda n: by_minimize(g, n, LR, np.float32)),
        ("dpcore make_private", lambda n: by_torch(g, n, LR)),
    ):
        made = {truth: run(truth) for truth in (B, B + 1)}
        keep(name, LR, lambda truth, n, made=made: excluded(made[truth], g, n, LR, truth))
    about = {"command": " ".join(sys.argv), "numpy": np.__version__, "torch": metadata.version("torch")}
    if find_spec("opacus") is not None:
        about["opacus"] = metadata.version("opacus")
        sums = {n: opacus_step(g, n, 0.0) for n in (B, B + 1)}
        steps = {truth: opacus_step(g, truth, 1.0) for truth in (B, B + 1)}
        keep("Opacus", 1.0, lambda truth, n: excluded_of_opacus(steps[truth], sums[n]))
    if given.output:
        given.output.write_text(json.dumps({"about": about, "coordinates": DIMENSION, "found": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
