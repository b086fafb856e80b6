"""Collects the run folders of docs/mnist.md into docs/results/mnist-cnn5.json and a picture.

python docs/mnist_results.py RUNS...       (each RUN a folder that `dpcore train` wrote)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dpcore.report import plots

HERE = Path(__file__).parent


def collect(folder: Path) -> dict[str, object]:
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
    first = next(iter(runs.values()))["epochs"]
    curves = {name: [[line["test_accuracy"] for line in run["epochs"]]] for name, run in runs.items()}
    plots.comparison(
        HERE / "_static" / "mnist-cnn5.png",
        curves,
        [line["epoch"] for line in first],
        [line["epsilon"] for line in first],
        title="MNIST, cnn-5, epsilon 3 at delta 1e-5, one run each",
    )
    for name, run in runs.items():
        accuracy = [100 * line["test_accuracy"] for line in run["epochs"]]
        settings = run["statement"]["method"]
        print(name, settings["update"]["lr"], settings["batch_size"], " ".join(f"{value:.1f}" for value in accuracy))


if __name__ == "__main__":
    main()
