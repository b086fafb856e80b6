"""A private step of a small model of each kind that `training_vs_peers.py` compares in full size.

All are measured once, in fresh processes, in turn with the non-private step of the same model. The ratio is that of
processor time, and drifts less from machine to machine than the time; `cpu_ratios.py` fails if it grows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .common import CHECK, require_torch

ROUNDS = 2 if CHECK else 9


class PrivateStep:
    """Gradients, clip, noise and update by DP-SGD: the fastest of some steps, and the memory of the first ones."""

    # `cpu_ratios.py`, which `make bench-check` runs, too, measures others.
    params = ("bert-lora", "lstm") if CHECK else ("mlp", "transformer", "cnn", "resnet-18", "bert", "bert-lora", "lstm")
    param_names = ("model",)
    timeout = 600

    def setup_cache(self) -> dict[str, dict[str, Any]]:
        require_torch()
        sys.path.append(str(Path(__file__).parents[1]))  # asv puts only this package's name on its path
        from whole_step.processes import Server

        timing, plain = Server(1, "keep"), Server(1, "default")
        task, found = {"names": ["non-private", "dpcore"], "quick": True, "seed": 0}, {}
        for model in self.params:
            row = timing.ask("workers.times", model=model, rounds=ROUNDS, **task)["contestants"]["dpcore"]
            needed = plain.ask("workers.memory", model=model, **task | {"names": ["dpcore"]})
            found[model] = {"seconds": row["min_s"], "ratio": row["ratio_of_pairs"], "mb": needed["above_data_mb"]}
        timing.close()
        plain.close()
        return found

    def track_seconds(self, found: dict[str, Any], model: str) -> float:
        return float(found[model]["seconds"])

    track_seconds.unit = "seconds"  # type: ignore[attr-defined]

    def track_over_non_private(self, found: dict[str, Any], model: str) -> float:
        return float(found[model]["ratio"])

    track_over_non_private.unit = "times the non-private step"  # type: ignore[attr-defined]

    def track_peak_memory(self, found: dict[str, Any], model: str) -> float:
        return float(found[model]["mb"])

    track_peak_memory.unit = "MB above model and data"  # type: ignore[attr-defined]
