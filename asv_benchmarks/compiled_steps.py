"""Private steps over plain ones, both compiled or neither, in float32 and in bfloat16, beside Opacus: processor time.

    PYTHONPATH=/tmp/opacus python asv_benchmarks/compiled_steps.py --output compiled_steps.json

For each model and precision one process, on one thread, in which all contestants take a step in turn, in random order.
A ratio is the median, over the rounds, of a step's processor time over that of the plain step of its kind: compiled
beside compiled. Other programs slow down both. bfloat16 is autocast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from whole_step.processes import Server
from whole_step.record import machine

PLAIN = {False: "non-private", True: "non-private compiled"}
NAMES = (*PLAIN.values(), "dpcore", "dpcore compiled", "Opacus hooks", "Opacus ghost")


def ratios(found: dict[str, Any]) -> dict[str, float]:
    """Return each contestant's ratio; those that cannot train the model have none."""
    seconds = {name: row["cpu_seconds"] for name, row in found["contestants"].items() if "refused" not in row}
    plain = {name: seconds[PLAIN[name.endswith("compiled")]] for name in seconds}
    pairs = {name: zip(seconds[name], plain[name], strict=True) for name in seconds if name not in PLAIN.values()}
    return {name: statistics.median(own / other for own, other in each) for name, each in pairs.items()}


def main() -> None:
    """Measure, print a line for each model and precision, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="transformer,bert")
    parser.add_argument("--contestants", default=",".join(NAMES), help="some of them, with commas; both plain ones too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="small models")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "models": {}}
    server = Server(given.threads, "keep")
    for model in given.models.split(","):
        for kind, precision in (("float32", None), ("bf16", "bf16")):
            task = {"model": model, "names": given.contestants.split(","), "quick": given.quick, "seed": 0}
            found = server.ask("workers.times", rounds=given.rounds, precision=precision, **task)
            found["ratios"] = ratios(found)
            result["models"][f"{model}, {kind}"] = found
            plain = {n: statistics.median(found["contestants"][n]["cpu_seconds"]) for n in PLAIN.values()}
            shown = {name: round(value, 2) for name, value in {**plain, **found["ratios"]}.items()}
            print(f"{model}, {kind}: {shown}", flush=True)
            result["load_after"] = os.getloadavg()
            if given.output is not None:
                given.output.write_text(json.dumps(result, indent=1) + "\n")
    server.close()


if __name__ == "__main__":
    main()
