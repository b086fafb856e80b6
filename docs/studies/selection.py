"""Private selection against an untuned run and accounted runs, on the digits, at one epsilon for all that was run.

    OMP_NUM_THREADS=1 python docs/studies/selection.py --out FOLDER

writes selection.json there, and prints a table. Every arm may spend epsilon 3 at delta 1e-5 in all. Rates are drawn
uniformly in their logarithm, from three decades. Half of the test set chooses, the other half measures. The accounted
runs are as cheap as they can be: K plans that are fixed beforehand. See docs/tuning.md.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from study import out_folder, save

from dpcore.accounting import Event, PrivateSelection, SelfComposed
from dpcore.cli.datasets import Dataset, load
from dpcore.cli.interrupt import Interruption
from dpcore.cli.intervals import mean_interval
from dpcore.cli.train.settings import Settings
from dpcore.cli.train.training import Training
from dpcore.ledger import Ledger
from dpcore.tuning import LogUniform, Outcome, select

EPSILON, DELTA, EXPECTED, REPETITIONS = 3.0, 1e-5, 20.0, 10
RATES = LogUniform(0.02, 20.0)
RUN = {"model": "logistic", "epochs": 5, "delta": DELTA}
ARMS = ("selection", "untuned, the default rate", "untuned, a rate drawn", "5 accounted runs", "20 accounted runs")


def noise(dataset: Dataset, released: Callable[[Event], Event]) -> float:
    """Return the noise multiplier at which all that an arm releases costs `EPSILON`."""
    plan = Settings(**RUN, epsilon=EPSILON).plan(len(dataset)).calibrated(EPSILON, DELTA, released=released)
    return plan.noise_multiplier


def made(dataset: Dataset, sigma: float, lr: float | None, seed: int) -> tuple[float, float, Event]:
    """Make one run; return its accuracy on the half that chooses, on the half that measures, and its event."""
    settings = Settings(**RUN, noise_multiplier=sigma, lr=lr, seed=seed).resolved(len(dataset))
    training, chooses = Training(settings, dataset.tested_on(1)), dataset.tested_on(0)
    if training.run(Interruption()).diverged:
        return 0.0, 0.1, training.private.plan.event
    measured = training.evaluations[-1]["test_accuracy"]
    return training.accuracy(chooses.test_inputs, chooses.test_targets), measured, training.private.plan.event


def selected(dataset: Dataset, sigma: float, seed: int, folder: Path) -> dict[str, Any]:
    """Return the accuracy of a selection's winner, its rate, and how many runs there were."""
    runs = []

    def run(values: dict[str, Any]) -> Outcome:
        score, measured, event = made(dataset, sigma, values["lr"], seed)
        runs.append(score)
        return Outcome(score, str(measured).encode(), event)

    event = Settings(**RUN, noise_multiplier=sigma).plan(len(dataset)).event
    ledger = Ledger.create(folder / "ledger.db", accept_file_system=True)
    options: Any = {"folder": folder / "selection", "ledger": ledger, "scored_on": "public", "expected_runs": EXPECTED}
    winner = select(run, {"lr": RATES}, event, **options)
    assert winner.result is not None
    assert winner.settings is not None
    return {"accuracy": float(winner.result), "lr": winner.settings["lr"], "runs": len(runs)}


def best_of(count: int, dataset: Dataset, sigma: float, seed: int) -> dict[str, Any]:
    """Return the accuracy of the best of `count` runs, and its rate."""
    rates = [RATES.draw() for _ in range(count)]
    found = [(*made(dataset, sigma, lr, seed)[:2], lr) for lr in rates]
    _, accuracy, lr = max(found)
    return {"accuracy": accuracy, "lr": lr, "runs": count}


def main() -> None:
    out, began, dataset = out_folder(__doc__.splitlines()[0]), time.perf_counter(), load("digits")
    sigma = {
        "selection": noise(dataset, lambda run: PrivateSelection(run, EXPECTED)),
        "untuned, the default rate": noise(dataset, lambda run: run),
        "untuned, a rate drawn": noise(dataset, lambda run: run),
        "5 accounted runs": noise(dataset, lambda run: SelfComposed(run, 5)),
        "20 accounted runs": noise(dataset, lambda run: SelfComposed(run, 20)),
    }
    arms: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for seed in range(REPETITIONS):
        with tempfile.TemporaryDirectory() as folder:
            arms["selection"].append(selected(dataset, sigma["selection"], seed, Path(folder)))
        default = made(dataset, sigma["untuned, the default rate"], None, seed)[1]
        arms["untuned, the default rate"].append({"accuracy": default, "lr": 0.5, "runs": 1})
        for arm, count in (("untuned, a rate drawn", 1), ("5 accounted runs", 5), ("20 accounted runs", 20)):
            arms[arm].append(best_of(count, dataset, sigma[arm], seed))
        print(seed, {arm: rows[-1]["accuracy"] for arm, rows in arms.items()}, flush=True)
    table = {}
    for arm, rows in arms.items():
        accuracy = [row["accuracy"] for row in rows]
        gained = [row["accuracy"] - other["accuracy"] for row, other in zip(arms["selection"], rows, strict=True)]
        table[arm] = {"noise_multiplier": sigma[arm], "accuracy": mean_interval(accuracy),
            "selection_better_by": mean_interval(gained), "repetitions": rows}  # fmt: skip
        shown = (f"{100 * mean:.1f} ± {100 * half:.1f}" for mean, half in map(mean_interval, (accuracy, gained)))
        print(f"{arm:28}{sigma[arm]:.2f}", *shown, sep="   ")
    save(out / "selection.json", {"epsilon": EPSILON, "delta": DELTA, "expected_runs": EXPECTED,
        "rates": [RATES.low, RATES.high], "run": RUN, "arms": table}, began)  # fmt: skip


if __name__ == "__main__":
    main()
