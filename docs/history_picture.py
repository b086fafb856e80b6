"""Draws docs/_static/history.png, of docs/performance.md, from the recorded history.

python docs/history_picture.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
FILE = "asv_benchmarks/recorded/history.json"
CHIPS = {"H200": "-", "L4": "--"}


def main() -> None:
    """Write the picture."""
    commits: list[dict[str, Any]] = json.loads((ROOT / FILE).read_text())["commits"]
    figure, (left, right, measured) = plt.subplots(1, 3, figsize=(14, 4.6), layout="constrained")
    kernels = list(dict.fromkeys(name for each in commits for name in each["figures"]))
    for place, name in enumerate(kernels):
        found = [each["figures"].get(name, {}).get("all instructions an element") for each in commits]
        left.plot([float("nan") if value is None else value for value in found], color=f"C{place % 10}", label=name,
                  linestyle="--" if place >= 10 else "-", marker=".", markersize=4, linewidth=1)  # fmt: skip
    left.set_yscale("log")
    left.set_title("instructions of a thread for an element, sm_90", fontsize=9)
    models = sorted({step.rpartition(", ")[0] for each in commits for step in each["steps"]})
    for place, model in enumerate(models):
        for chip, style in CHIPS.items():
            found = [each["steps"].get(f"{model}, {chip}") for each in commits]
            right.plot([float("nan") if value is None else value for value in found], style, color=f"C{place}",
                       label=f"{model}, {chip}", marker=".", markersize=4)  # fmt: skip
    right.set_title("private step / plain step, predicted", fontsize=9)
    places = [place for place, each in enumerate(commits) if each.get("ratios")]
    for model in dict.fromkeys(model for place in places for model in commits[place]["ratios"]):
        found = [commits[place]["ratios"].get(model, float("nan")) for place in places]
        measured.plot(places, found, label=model, marker=".", markersize=4)
    measured.set_title("private step / plain step on a CPU, measured at some commits", fontsize=9)
    for axis in (right, measured):
        axis.axhline(1, color="0.3", linewidth=0.8)
    for axis in (left, right, measured):
        axis.set_xticks(range(len(commits)), [each["commit"][:7] for each in commits], rotation=90, fontsize=6)
        axis.set_xlim(-0.5, len(commits) - 0.5)
        axis.legend(fontsize=6.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs/_static/history.png", dpi=150)


if __name__ == "__main__":
    main()
