"""Draws docs/_static/cost.png, of README and docs/performance.md, from the recorded figures.

python docs/cost_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
FILE = "asv_benchmarks/recorded/training_vs_peers_threads2.json"
MODELS = {
    "mlp": "MLP", "cnn": "CNN", "transformer": "transformer", "resnet-18": "ResNet-18", "lstm": "LSTM",
    "bert": "BERT", "bert-lora": "BERT + LoRA",
}  # fmt: skip
CONTESTANTS = {
    "dpcore": "C0", "Opacus ghost": "C1", "Opacus hooks": "#f4c28f", "torch.func": "0.75",
}  # fmt: skip


def ratios() -> dict[str, dict[str, float]]:
    """Return a private step's median time over the plain step's, by model and contestant."""
    models: dict[str, Any] = json.loads((ROOT / FILE).read_text())["models"]
    found = {}
    for name in MODELS:
        times = {kind: median(models[name]["contestants"][kind]["seconds"]) for kind in ("non-private", *CONTESTANTS)}
        found[name] = {kind: times[kind] / times["non-private"] for kind in CONTESTANTS}
    return found


def main() -> None:
    """Write the picture."""
    found = ratios()
    figure, axis = plt.subplots(figsize=(8, 2.6), layout="constrained")
    width = 0.8 / len(CONTESTANTS)
    for place, (kind, color) in enumerate(CONTESTANTS.items()):
        heights = [found[name][kind] for name in MODELS]
        at = [i + (place - 1.5) * width for i in range(len(MODELS))]
        bars = axis.bar(at, heights, width, color=color, label=kind)
        axis.bar_label(bars, [f"{h:.1f}" if h < 10 else f"{h:.0f}" for h in heights], fontsize=6.5)
    axis.axhline(1, color="0.3", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_yticks([1, 2, 5, 10, 50], ["1", "2", "5", "10", "50"])
    axis.minorticks_off()
    axis.set_ylim(0.9, 130)
    axis.set_xticks(range(len(MODELS)), MODELS.values())
    axis.set_ylabel("private step / plain step")
    axis.legend(ncols=4, fontsize=8, frameon=False, loc="upper right")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/_static/cost.png", dpi=150)


if __name__ == "__main__":
    main()
