"""A private step over the plain step on this CPU, compared with what is recorded: no quiet machine is needed.

    python asv_benchmarks/cpu_ratios.py                 1 if a ratio is more than 15 % over the recorded one, twice
    python asv_benchmarks/cpu_ratios.py --record        write asv_benchmarks/recorded/cpu_ratios.json
    python asv_benchmarks/cpu_ratios.py --measure       print the ratios, as JSON (`history.py` does at each commit)

In one process private and plain steps take turns on one thread. A ratio is the median, over the turns, of the ratio of
their processor times, so that other programs slow down both sides of it. Processors of another name have other ratios:
there the limit is 50 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from whole_step.processes import Server
from whole_step.record import machine

RECORDED = Path(__file__).resolve().parent / "recorded" / "cpu_ratios.json"
#: Models of `whole_step.models`, whether the small form is taken, and turns: some seconds each.
MODELS = {"mlp": (False, 15), "cnn": (False, 7), "transformer": (True, 51), "bert": (True, 51), "lstm": (True, 51)}
SAME, OTHER = 1.15, 1.5
RECORDINGS = 3


def ratio(server: Server, model: str) -> float:
    """Return the ratio of a model, measured in a fresh process."""
    quick, turns = MODELS[model]
    task = {"model": model, "names": ["non-private", "dpcore"], "quick": quick, "rounds": turns, "seed": 0}
    return float(server.ask("workers.times", **task)["contestants"]["dpcore"]["ratio_of_pairs"])


def worse(measure: Callable[[str], float], recorded: dict[str, Any], cpu: str) -> list[str]:
    """Return a sentence for each model whose ratio is twice over the limit; print the ratio of every model."""
    limit = SAME if cpu == recorded["machine"]["cpu"] else OTHER
    found = []
    for model, before in recorded["ratios"].items():
        now = measure(model)
        if now > limit * before:
            now = min(now, measure(model))
        print(f"{model}: a private step takes {now:.2f} times the plain step, recorded {before:.2f}", flush=True)
        if now > limit * before:
            found.append(f"{model}: {now / before - 1:.0%} over the recorded ratio; the limit is {limit - 1:.0%}")
    return found


def main() -> int:
    """Compare, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the ratios that the next runs are compared with")
    parser.add_argument("--measure", action="store_true", help="only print the ratios")
    arguments = parser.parse_args()
    server, here = Server(1, "keep"), machine()
    try:
        if arguments.measure:
            print(json.dumps({model: round(ratio(server, model), 3) for model in MODELS}))
            return 0
        if arguments.record:
            each = {model: [ratio(server, model) for _ in range(RECORDINGS)] for model in MODELS}
            medians = {model: statistics.median(found) for model, found in each.items()}
            text = json.dumps({"machine": here, "ratios": medians, "measured": each}, indent=1)
            RECORDED.write_text(text + "\n")
            print(text)
            return 0
        found = worse(lambda model: ratio(server, model), json.loads(RECORDED.read_text()), here["cpu"])
    finally:
        server.close()
    print("\n".join(found) or "no ratio is over its limit")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
