"""Collects the run folders of docs/mnist.md into docs/results/mnist-cnn5.json and pictures.

python docs/mnist_results.py RUNS...       (each RUN a folder that `dpcore train` wrote)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dpcore.cli.plots import Curves, by_epsilon

HERE = Path(__file__).parent


def collect(folder: Path) -> dict[str, Any]:
    """Return what is kept of one run: settings, per-epoch results, and the statement."""
    config = json.loads((folder / "config.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    statement = json.loads((folder / "statement.json").read_text())
    return {
        "settings": config["settings"],
        "software": config["software"],
        "epochs": [line for line in metrics if "test_accuracy" in line],
        "statement": statement,
    }


def main() -> None:
    """Write the JSON and the picture."""
    runs = {Path(name).name: collect(Path(name)) for name in sys.argv[1:]}
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "mnist-cnn5.json").write_text(json.dumps(runs, indent=1) + "\n")
    # A picture for each batch size: epsilon is spent at another pace under each.
    for size in sorted({run["statement"]["method"]["batch_size"] for run in runs.values()}):
        chosen = {n: run for n, run in runs.items() if run["statement"]["method"]["batch_size"] == size}
        first = next(iter(chosen.values()))
        curves = {
            run["statement"]["method"]["name"]: Curves(
                tuple(line["epoch"] for line in run["epochs"]),
                [[line["test_accuracy"] for line in run["epochs"]]],
            )
            for run in chosen.values()
        }
        last, rate = first["epochs"][-1], first["statement"]["method"]["update"]["lr"]
        by_epsilon(
            HERE / "_static" / f"mnist-cnn5-b{size:.0f}.png",
            {f"epsilon {last['epsilon']:.3g} at the end, delta 1e-5": curves},
            title=f"MNIST, cnn-5, batch size {size:,.0f}, learning rate {rate:g}",
        )
    for name, run in runs.items():
        accuracy = [100 * line["test_accuracy"] for line in run["epochs"]]
        settings = run["statement"]["method"]
        print(name, settings["update"]["lr"], settings["batch_size"], " ".join(f"{value:.1f}" for value in accuracy))


if __name__ == "__main__":
    main()
