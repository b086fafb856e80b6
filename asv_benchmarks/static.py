"""What the compiler makes of the kernels, without a GPU: instructions by pipe, bytes, registers, spills, whole steps.

    python asv_benchmarks/static.py                 compare with asv_benchmarks/recorded/static.json; 1 if one is worse
    python asv_benchmarks/static.py --record        write that file
    python asv_benchmarks/static.py --all           compare all, also what the compiler would make again
    python asv_benchmarks/static.py --only sums     the kernels with this word in their names; also with --record

A figure that is more than 5 % worse than the recorded one is named, with its kernel and chip. Every kernel of
`tests/unit/backends/test_compile.py` is tracked, variants for one chip: a new one is tracked without a change here. A
kernel is compiled if anything that its figures follow from is not what it was when they were recorded (`digest` there).
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
#: Noise in a step takes the compiler as long as all others: one step with it, for one chip.
SLOW = {"step sgd": (90,)}
STEPS = ("step sgd, no noise", "step adam, no noise", *SLOW)
#: Variants of a kernel, by the end of their names, that the compiler treats as it treats the kernel itself.
VARIANTS = (", mixed", ", scale", ", overwriting")
WORSE = 1.05

Figures = dict[str, dict[str, float]]


def wanted(titles: list[str]) -> list[tuple[str, int]]:
    """Return the kernels to compile, each with a chip."""
    variants = {title for title in titles if title.endswith(VARIANTS) and title.rpartition(", ")[0] in titles}
    chips = {**dict.fromkeys(variants, CHIPS[-1:]), **SLOW}
    chosen = [title for title in titles if title[:5] != "step " or title in STEPS]
    return [(title, chip) for title in chosen for chip in chips.get(title, CHIPS)]


def measured(only: str = "", *, fresh: bool = True) -> tuple[Figures, dict[str, Any]]:
    """Return the figures of the kernels whose names contain a word, by kernel and chip, and the compiler's records.

    What is as it was recorded is not compiled, unless it is asked `fresh`.
    """
    os.environ.pop("TRITON_INTERPRET", None)
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    from asv_benchmarks.predicted import ratios
    from tests.unit.backends import test_compile as compiled

    compiled.without_a_gpu()
    cases = {case[0]: case for case in compiled.cases()}
    on_cores = {chip: {case[0]: case for case in compiled.core_cases(chip)} for chip in CHIPS}
    titles = [*cases, *on_cores[CHIPS[-1]]]
    recorded = {} if fresh else json.loads(compiled.RECORDED.read_text())
    found: Figures = {}
    records: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("TRITON_CACHE_DIR", folder)
        for title, chip in wanted(titles):
            name = f"{title}, sm_{chip}"
            if only not in name:
                continue
            case = {**cases, **on_cores[chip]}[title]
            records[name] = compiled.recorded_or_compiled(case, chip, recorded)
            found[name] = figures(records[name])
    return (found if only else found | ratios(found)), records


def recorded_beside(now: Figures, before: Figures, only: str) -> Figures:
    """Return the figures of some kernels, with the recorded ones of all others, and what is predicted from both."""
    from asv_benchmarks.predicted import ratios

    found = {name: each for name, each in before.items() if only not in name or name.startswith("step of ")} | now
    return found | ratios(found)


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Return what is compared of a compiled kernel: less is better."""
    found = {name: float(record[name]) for name in ("registers", "spills", "shared", "instructions")}
    found |= {f"{pipe} instructions an element": count for pipe, count in record["executed"].items()}
    found |= {"loads and stores": float(record["moved"][0]), "bytes of loads and stores": float(record["moved"][1])}
    loop = record["product_loop"]
    products = {"16-bit products": ("HMMA", "HGMMA"), "8-bit products": ("IMMA", "IGMMA")}
    products["float64 products"] = "DMMA", "DFMA"
    products["float64"] = "DADD", "DMUL", "DFMA", "F2F"
    found |= {f"{name} of the loop": float(sum(loop.get(one, 0) for one in names)) for name, names in products.items()}
    found |= {"instructions of loops that read": float(sum(record["reading_loops"]))}
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
    parser.add_argument("--all", action="store_true", help="compile also what has not changed since it was recorded")
    parser.add_argument("--only", default="", metavar="WORD", help="only kernels with this in their names")
    arguments = parser.parse_args()
    before = json.loads(RECORDED.read_text())
    now, records = measured(arguments.only, fresh=arguments.all or arguments.json)
    if arguments.json:
        print(json.dumps(now))
        return 0
    if arguments.only:
        now = recorded_beside(now, before, arguments.only)
    if arguments.record:
        from tests.unit.backends.test_compile import RECORDED as COMPILED

        kept = json.loads(COMPILED.read_text()) if arguments.only else {}
        RECORDED.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n")
        lines = [f"{json.dumps(name)}: {json.dumps(record)}" for name, record in sorted((kept | records).items())]
        COMPILED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    found = worse(now, before)
    print("\n".join(found) or f"{len(now)} kernels and steps: no figure is more than 5 % worse")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
