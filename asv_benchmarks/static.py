"""What the compiler makes of the kernels, without a GPU: instructions by pipe, registers, spills, and predicted steps.

    python asv_benchmarks/static.py                 compare with asv_benchmarks/recorded/static.json; 1 if one is worse
    python asv_benchmarks/static.py --record        write that file

A figure that is more than 5 % worse than the recorded one is named, with its kernel and chip.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "asv_benchmarks" / "recorded" / "static.json"
CHIPS = (80, 89, 90)
#: Of kernels without tensor cores, on the last chip.
OTHERS = ("row_norms: squares", "weighted_sum", "pairs: norms", "linear_sums, one position", "step adam")
WORSE = 1.05

Figures = dict[str, dict[str, float]]


def measured() -> Figures:
    """Compile the kernels and return the figures of each, by kernel and chip."""
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    from asv_benchmarks.predicted import ratios
    from tests.unit.backends import test_compile as compiled

    compiled.without_a_gpu()
    others = [(case, 90) for case in compiled.cases() if case[0] in OTHERS]
    wanted = [(case, chip) for chip in CHIPS for case in compiled.core_cases(chip)] + others
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = {f"{case[0]}, sm_{chip}": figures(compiled.compile_and_measure(*case, chip)) for case, chip in wanted}
    return found | ratios(found)


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Return what is compared of a compiled kernel: less is better."""
    found = {name: float(record[name]) for name in ("registers", "spills", "shared", "instructions")}
    found |= {f"{pipe} instructions an element": count for pipe, count in record["executed"].items()}
    loop = record["product_loop"]
    products = {"16-bit products": ("HMMA", "HGMMA"), "float64 products": ("DMMA", "DFMA")}
    found |= {f"{name} of the loop": float(sum(loop[one] for one in names)) for name, names in products.items()}
    return {**found, "instructions of the loop": float(sum(loop.values())), "around it": float(record["around_loop"])}


def worse(now: Figures, before: Figures) -> list[str]:
    """Return a sentence for each figure that is more than 5 % worse, and for each kernel that is missing."""
    found = [f"{kernel}: not measured" for kernel in before if kernel not in now]
    found += [f"{kernel}: not recorded" for kernel in now if kernel not in before]
    for kernel in now.keys() & before.keys():
        for name, value in now[kernel].items():
            old = before[kernel].get(name, 0.0)
            if value > WORSE * old:
                found.append(f"{kernel}: {name} {value:g}, was {old:g}")
    return sorted(found)


def main() -> int:
    """Compare, or record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the figures that the next runs are compared with")
    parser.add_argument("--json", action="store_true", help="print the figures, and compare nothing")
    arguments = parser.parse_args()
    now = measured()
    if arguments.json:
        print(json.dumps(now))
        return 0
    if arguments.record:
        RECORDED.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        return 0
    found = worse(now, json.loads(RECORDED.read_text()))
    print("\n".join(found) or f"{len(now)} kernels and steps: no figure is more than 5 % worse")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
